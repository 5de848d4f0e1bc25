"""A vLLM engine over the fake server of fake_vllm.py, and what that server's bigram model should give."""

import json
import sys
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from flax import nnx
from helpers import make_config, tiny_architecture, tiny_model

from sgpo_jax.files import write_json
from sgpo_jax.models.qwen import Transformer
from sgpo_jax.rollouts.engine import Probe
from sgpo_jax.rollouts.vllm_engine import VLLMEngine, make_vllm_engine

FAKE = [sys.executable, str(Path(__file__).parent / "fake_vllm.py")]
SEQUENCES = ((1, 2, 3, 0), (5, 4), (7, 7, 9, 2, 0))
LONGEST_PROMPT = 8
STOP = 0


def model_dir(directory: Path, *, tied: bool = False) -> Path:
    """A directory with the configuration of helpers.tiny_architecture, and no weights."""
    arch = tiny_architecture()
    write_json(
        directory / "config.json",
        {
            "model_type": arch.family,
            "hidden_act": "silu",
            "vocab_size": arch.vocab_size,
            "hidden_size": arch.model_dim,
            "num_hidden_layers": arch.num_layers,
            "num_attention_heads": arch.num_heads,
            "num_key_value_heads": arch.num_kv_heads,
            "intermediate_size": arch.mlp_dim,
            "rope_theta": arch.rope_theta,
            "rms_norm_eps": arch.rms_norm_eps,
            "max_position_embeddings": arch.max_positions,
            "tie_word_embeddings": tied,
            "torch_dtype": "bfloat16",
        },
    )
    return directory


def bigram_logprobs(model: Transformer, last: int, temperature: float = 1.0) -> np.ndarray:
    logits_V = np.asarray(model.embedding[last], np.float64) @ np.asarray(model.lm_head[...], np.float64).T
    logits_V /= temperature
    return logits_V - np.log(np.exp(logits_V).sum())


def bigram_probe(model: Transformer) -> Probe:
    return Probe(
        SEQUENCES,
        tuple(np.array([bigram_logprobs(model, a)[b] for a, b in pairwise(ids)], np.float32) for ids in SEQUENCES),
    )


@contextmanager
def fake_engine(
    tmp_path: Path, model: Transformer | None = None, longest_prompt: int = LONGEST_PROMPT, **options: Any
) -> Iterator[VLLMEngine]:
    """An engine whose server is the fake, with the weights of `model`; options of the section vllm."""
    model = model or tiny_model()
    options = {"command": FAKE, "platform": "cpu", "start_time_limit_s": 20.0, **options}
    config = make_config(rollouts={"engine": "vllm", "max_completion_tokens": 12}, vllm=options, seed=7)
    source = model_dir(tmp_path / "model")
    engine = make_vllm_engine(
        config,
        tiny_architecture(),
        source,
        stop_ids=[STOP],
        longest_prompt=longest_prompt,
        log=tmp_path / "vllm.log",
        initial=nnx.state(model),
        probe=bigram_probe(model),
    )
    try:
        yield engine
    finally:
        engine.close()


def server_of(engine: VLLMEngine) -> Any:
    return engine._replicas[0].server


def ask_fake(url: str, **faults: int) -> Any:
    """Switch faults on, or (without any) learn what the fake was asked for."""
    data = json.dumps(faults).encode() if faults else None
    with urllib.request.urlopen(urllib.request.Request(f"{url}/fake", data=data), timeout=10) as response:
        return json.loads(response.read())
