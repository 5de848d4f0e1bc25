"""What the package brings for the demo fits together: model, tokenizer, stop token, questions, configs/demo.yaml."""

import json
import re
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from sgpo_jax.config import Config, load_config
from sgpo_jax.files import read_jsonl
from sgpo_jax.models.architecture import Architecture, read_architecture
from sgpo_jax.models.weights import num_parameters, weight_table

ROOT = Path(__file__).parents[1]
DEMO = ROOT / "sgpo_jax" / "demo"
EXAMPLE = "+8:31*3:93$"


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerBase:
    return AutoTokenizer.from_pretrained(DEMO / "model")


@pytest.fixture(scope="module")
def arch() -> Architecture:
    return read_architecture(DEMO / "model")


@pytest.fixture(scope="module")
def config() -> Config:
    return load_config(ROOT / "configs" / "demo.yaml")


def answer_of(question: str) -> int:
    """From left to right with exact integers, reduced at the end."""
    value = int(question[:2])
    for symbol, digit in re.findall(r"([-+*])(\d)", question):
        value = {"+": value.__add__, "-": value.__sub__, "*": value.__mul__}[symbol](int(digit))
    return value % 100


def test_a_token_a_character_and_none_beyond_the_embedding(
    tokenizer: PreTrainedTokenizerBase, arch: Architecture
) -> None:
    assert len(tokenizer("23+8*3=")["input_ids"]) == 7
    assert len(tokenizer) == arch.vocab_size == 17


def test_decoding_keeps_the_stop_token_and_adds_no_space(tokenizer: PreTrainedTokenizerBase) -> None:
    ids = tokenizer(EXAMPLE)["input_ids"]
    assert tokenizer.decode([*ids, tokenizer.pad_token_id], skip_special_tokens=True) == EXAMPLE


@pytest.mark.parametrize("file", ["config.json", "generation_config.json"])
def test_the_dollar_ends_a_completion(tokenizer: PreTrainedTokenizerBase, file: str) -> None:
    fields = json.loads((DEMO / "model" / file).read_text())
    assert tokenizer.convert_ids_to_tokens(fields["eos_token_id"]) == "$"
    assert fields["pad_token_id"] == tokenizer.pad_token_id


def test_weights_are_those_of_the_architecture_finite_and_few(arch: Architecture) -> None:
    tensors = load_file(DEMO / "model" / "model.safetensors")
    expected = {
        weight.hf_name.format(layer=layer): weight.hf_shape
        for weight in weight_table(arch)
        for layer in range(weight.num_tensors)
    }
    assert {name: tensor.shape for name, tensor in tensors.items()} == expected
    assert all(tensor.dtype == np.float32 and np.isfinite(tensor).all() for tensor in tensors.values())
    assert sum(tensor.size for tensor in tensors.values()) == num_parameters(arch) <= 2_000_000


def test_the_package_stays_small() -> None:
    assert sum(file.stat().st_size for file in DEMO.rglob("*") if file.is_file()) < 1_500_000


@pytest.mark.parametrize(("file", "count"), [("train.jsonl", 3000), ("heldout.jsonl", 1000)])
def test_questions_differ_and_their_answers_are_right(file: str, count: int) -> None:
    rows = read_jsonl(DEMO / file)
    assert len({row["question"] for row in rows}) == len(rows) == count
    assert all(row["answer"] == str(answer_of(row["question"])) for row in rows)
    assert all(row["kind"] == "exact" for row in rows)
    assert all(row["metadata"] == {"answer_after": ":", "answer_end": "$"} for row in rows)


def test_held_out_questions_are_not_trained_on() -> None:
    train, held_out = ({row["question"] for row in read_jsonl(DEMO / f"{name}.jsonl")} for name in ("train", "heldout"))
    assert train.isdisjoint(held_out)


def test_the_configuration_names_these_files_and_no_prompt_is_too_long(
    tokenizer: PreTrainedTokenizerBase, config: Config, arch: Architecture
) -> None:
    assert ROOT / config.model.path == DEMO / "model"
    files = [*config.data.train, *config.evaluate.sets]
    assert [ROOT / source.path for source in files] == [DEMO / "train.jsonl", DEMO / "heldout.jsonl"]
    questions = [row["question"] for source in files for row in read_jsonl(ROOT / source.path)]
    assert max(len(tokenizer(question)["input_ids"]) for question in questions) == config.data.max_prompt_tokens
    assert config.data.max_prompt_tokens + config.rollouts.max_completion_tokens <= arch.max_positions
