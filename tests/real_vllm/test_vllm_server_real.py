"""One real vLLM server on an untied Qwen3: weights, keys, lengths, what vLLM would do silently."""

import os
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import httpx2
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from helpers import make_config, make_query

from sgpo_jax.files import write_json
from sgpo_jax.models.architecture import read_architecture
from sgpo_jax.models.qwen import Transformer, token_logprobs
from sgpo_jax.rollouts import vllm_client
from sgpo_jax.rollouts.probe import Prober
from sgpo_jax.rollouts.vllm_client import CompletionCall, RequestRefusedError
from sgpo_jax.rollouts.vllm_engine import VLLMEngine, make_vllm_engine
from sgpo_jax.types import FinishReason, GroupRequest, MachineError, Purpose, SamplingParams, UserError

ROOT = Path(__file__).parents[2]
PYTHON = ROOT / os.environ.get("VLLM_VENV", ".venv-vllm") / "bin" / "python"
COMMAND = [str(PYTHON), "-m", "vllm.entrypoints.openai.api_server"]
STOP, LONGEST_PROMPT, MAX_COMPLETION, VOCABULARY = 0, 400, 16, 64
CONFIG = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "hidden_act": "silu",
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "intermediate_size": 128,
    "rope_theta": 1e6,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
    "torch_dtype": "float32",
    "eos_token_id": STOP,
}


def write_model(directory: Path) -> Path:
    """Configuration and tokenizer; the engine brings the weights. Its generation configuration must not apply."""
    from tokenizers import Tokenizer, models

    write_json(directory / "config.json", CONFIG)
    write_json(directory / "generation_config.json", {"top_k": 1, "temperature": 0.1, "eos_token_id": 5})
    vocabulary = {f"t{i}": i for i in range(VOCABULARY)}
    Tokenizer(models.WordLevel(vocabulary, unk_token="t1")).save(str(directory / "tokenizer.json"))
    write_json(directory / "tokenizer_config.json", {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "t0"})
    return directory


def make_model(directory: Path, seed: int) -> Transformer:
    model = Transformer(read_architecture(directory), rngs=nnx.Rngs(seed), remat="none")
    model.lm_head[...] = model.lm_head[...] * 8  # distributions far from uniform
    return model


def prompts(count: int, length: int, seed: int = 0) -> list[tuple[int, ...]]:
    rng = np.random.default_rng(seed)
    return [tuple(rng.integers(1, VOCABULARY, length).tolist()) for _ in range(count)]


@pytest.fixture(scope="module")
def directory(tmp_path_factory) -> Path:
    return write_model(tmp_path_factory.mktemp("untied"))


@pytest.fixture(scope="module")
def prober(directory) -> Prober:
    return Prober(make_model(directory, 0), prompts(4, 40), STOP, chunk_tokens=256)


@pytest.fixture(scope="module")
def engine(directory, prober, tmp_path_factory):
    options = {
        "command": COMMAND,
        "platform": "cpu",
        "start_time_limit_s": 600.0,
        "max_batched_tokens": 2048,
        "env": {"VLLM_CPU_OMP_THREADS_BIND": "nobind"},
    }
    config = make_config(rollouts={"engine": "vllm", "max_completion_tokens": MAX_COMPLETION}, vllm=options, seed=7)
    params = nnx.state(make_model(directory, 0))
    engine = make_vllm_engine(
        config,
        read_architecture(directory),
        directory,
        stop_ids=[STOP],
        longest_prompt=LONGEST_PROMPT,
        log=tmp_path_factory.mktemp("log") / "vllm.log",
        initial=params,
        probe=prober(params),
    )
    yield engine
    engine.close()


def update(engine: VLLMEngine, directory: Path, prober: Prober, seed: int) -> float:
    params = nnx.state(make_model(directory, seed))
    figures = engine.update_weights(params, seed, prober(params))
    assert figures["sync/num_failures"] == 0
    return figures["sync/probe_gap"]


def sample(engine: VLLMEngine, ids: list[tuple[int, ...]], num_samples: int = 4) -> dict[Any, Any]:
    requests = [GroupRequest(make_query(f"q{i}", p), num_samples, Purpose.TRAIN) for i, p in enumerate(ids)]
    groups = engine.generate(requests, SamplingParams(MAX_COMPLETION, temperature=0.8))
    return {(g.request.query.query_id, c.sample_index): c for g in groups for c in g.completions}


def assert_trainers_logprobs(model: Transformer, ids: list[tuple[int, ...]], found: dict[Any, Any]) -> None:
    for (query_id, _), completion in found.items():
        row = [*ids[int(query_id[1:])], *completion.token_ids_C.tolist()]
        length = len(row)
        padded = np.zeros((1, LONGEST_PROMPT + MAX_COMPLETION), np.int32)
        padded[0, :length] = row
        segments = (np.arange(padded.shape[1]) < length)[None].astype(np.int32)
        positions = np.arange(padded.shape[1])[None]
        logprobs = token_logprobs(
            model, jnp.asarray(padded), jnp.asarray(positions), jnp.asarray(segments), temperature=0.8, chunk_tokens=512
        ).logprobs_BT
        expected = np.asarray(logprobs)[0, length - len(completion.token_ids_C) : length]
        np.testing.assert_allclose(completion.sampler_logprobs_C, expected, atol=1e-4)


def test_weights_go_there_and_back(engine, directory, prober):
    ids = prompts(3, 40)
    first = sample(engine, ids)
    assert update(engine, directory, prober, 1) < 1e-4
    second = sample(engine, ids)
    assert_trainers_logprobs(make_model(directory, 1), ids, second)
    assert update(engine, directory, prober, 0) < 1e-4
    again = sample(engine, ids)
    tokens = [{key: c.token_ids_C.tolist() for key, c in found.items()} for found in (first, second, again)]
    assert tokens[0] == tokens[2] != tokens[1]


def test_log_probs_are_the_trainers_and_the_models_own_generation_configuration_is_not_used(engine, directory, prober):
    update(engine, directory, prober, 0)
    ids = prompts(4, 30, seed=2)
    found = sample(engine, ids, 8)
    assert_trainers_logprobs(make_model(directory, 0), ids, found)
    assert len({tuple(c.token_ids_C) for c in found.values()}) > 24, "its top_k of 1 would give each group one answer"
    assert any(5 in c.token_ids_C[:-1] for c in found.values()), "its end token would end a completion"
    assert {c.finish_reason for c in found.values()} == set(FinishReason)


def test_more_prompt_tokens_than_a_step_takes(engine):
    """A seeded request whose prompt is read in pieces killed the CPU engine."""
    before = engine._num_failures
    ids = prompts(30, 390, seed=3)
    assert len(sample(engine, ids, 2)) == 60
    assert engine._num_failures == before


def test_the_developer_endpoints_need_the_key(engine):
    def status(path: str, key: str | None) -> int:
        request = urllib.request.Request(engine._replicas[0].client.url + path, data=b"{}", method="POST")
        if key:
            request.add_header("Authorization", f"Bearer {key}")
        try:
            return urllib.request.urlopen(request, timeout=20).status
        except urllib.error.HTTPError as error:
            return error.code

    for path in ("/pause", "/collective_rpc", "/reset_prefix_cache", "/resume", "/v1/completions", "/sleep"):
        assert status(path, None) == status(path, "wrong") == 401
    assert status("/resume", engine._replicas[0].server.key) == 200
    assert httpx2.get(engine._replicas[0].client.url + "/health").status_code == 200


def test_a_prompt_longer_than_the_model_is_refused_by_the_server_too(engine):
    call = CompletionCall((1,) * 600, 1, 1, SamplingParams(4), (STOP,))
    with pytest.raises(RequestRefusedError, match="status 400"):
        engine._run(engine._replicas[0].client.complete(call, "x", 60))


def test_a_failed_sync_ends_in_a_new_server_with_the_right_weights(engine, directory, prober):
    client = engine._replicas[0].client
    load = client.load_weights

    async def broken(path: Path, limit_s: float) -> None:
        client.load_weights = load
        await load(path / "nowhere", limit_s)

    client.load_weights = broken
    params = nnx.state(make_model(directory, 5))
    figures = engine.update_weights(params, 5, prober(params))
    assert figures["sync/num_failures"] == 1
    assert figures["sync/probe_gap"] < 1e-4
    ids = prompts(2, 20, seed=4)
    assert_trainers_logprobs(make_model(directory, 5), ids, sample(engine, ids))


def test_an_unsupported_version_is_refused(engine, monkeypatch):
    monkeypatch.setattr(vllm_client, "TOO_NEW", (0, 32))
    with pytest.raises(UserError, match=r"vLLM 0\.32\.\S* is not supported; allowed is 0.32 or newer, older than 0.32"):
        engine._run(engine._replicas[0].client.introduce())


def start_another(directory: Path, prober: Prober, log: Path, **options: Any) -> None:
    config = make_config(
        rollouts={"engine": "vllm", "max_completion_tokens": 4},
        vllm={"command": COMMAND, "platform": "cpu", **options},
    )
    params = nnx.state(make_model(directory, 0))
    make_vllm_engine(
        config,
        read_architecture(directory),
        directory,
        stop_ids=[STOP],
        longest_prompt=8,
        log=log,
        initial=params,
        probe=prober(params),
    ).close()


def test_a_port_in_use_is_named(engine, directory, prober, tmp_path):
    port = engine._replicas[0].server._port
    with pytest.raises(UserError, match=f"vllm.port={port}: cannot be used: Address already in use"):
        start_another(directory, prober, tmp_path / "vllm.log", port=port)


def test_a_server_that_is_not_healthy_in_time_is_ended(directory, prober, tmp_path):
    begun, before = time.monotonic(), set(Path("/dev/shm").iterdir())
    with pytest.raises(MachineError, match=r"was not healthy within vllm.start_time_limit_s=3; .*vllm.log ends with"):
        start_another(directory, prober, tmp_path / "vllm.log", start_time_limit_s=3.0)
    assert time.monotonic() - begun < 60
    assert set(Path("/dev/shm").iterdir()) <= before


def test_an_option_that_vllm_does_not_know_is_an_error_with_its_words(directory, prober, tmp_path):
    with pytest.raises(
        MachineError,
        match=r"ended before it was healthy \(error: unrecognized arguments: --no-such-option\); .*vllm.log ends with",
    ):
        start_another(directory, prober, tmp_path / "vllm.log", extra_args=["--no-such-option"])
