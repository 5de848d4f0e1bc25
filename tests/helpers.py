"""Small models, queries and configurations that several tests share."""

from typing import Any

import numpy as np
from flax import nnx

from sgpo_jax.config import Config, parse_config
from sgpo_jax.models.architecture import Architecture
from sgpo_jax.models.qwen import Transformer
from sgpo_jax.types import (
    Completion,
    FinishReason,
    GroupRequest,
    Judgement,
    Purpose,
    Query,
    Rollout,
    RolloutGroup,
    Verdict,
)

VOCABULARY = 16


def tiny_architecture(**changes: Any) -> Architecture:
    fields = {
        "family": "qwen2",
        "vocab_size": VOCABULARY,
        "num_layers": 2,
        "model_dim": 32,
        "num_heads": 4,
        "num_kv_heads": 2,
        "head_dim": 8,
        "mlp_dim": 48,
        "rope_theta": 1e4,
        "rms_norm_eps": 1e-6,
        "tie_embeddings": False,
        "qkv_bias": True,
        "output_bias": False,
        "qk_norm": False,
        "max_positions": 128,
    }
    return Architecture(**{**fields, **changes})


def tiny_model(seed: int = 0, sharpness: float = 20.0, **changes: Any) -> Transformer:
    """Random weights, the last ones large enough that distributions are far from uniform."""
    model = Transformer(tiny_architecture(), rngs=nnx.Rngs(seed), remat="none", **changes)
    model.lm_head[...] = model.lm_head[...] * sharpness
    return model


def make_config(**sections: Any) -> Config:
    tree: dict[str, Any] = {"run_dir": "unused", "model": {"path": "unused"}, "data": {"train": [{"path": "unused"}]}}
    for name, values in sections.items():
        tree[name] = {**tree.get(name, {}), **values} if isinstance(values, dict) else values
    return parse_config(tree, "test")


def make_query(name: str, prompt_ids: tuple[int, ...] = (1, 2, 3), gold: str = "1") -> Query:
    return Query(name, f"question {name}", gold, "exact", "test", f"question {name}", prompt_ids)


def make_group(
    query: Query,
    outcomes: list[bool | None],
    *,
    purpose: Purpose = Purpose.TRAIN,
    visit: int = 0,
    length: int = 4,
    seed: int = 0,
) -> RolloutGroup:
    """A judged group: True correct, False wrong, None could not be judged."""
    rng = np.random.default_rng(seed)
    rollouts = []
    for index, outcome in enumerate(outcomes):
        token_ids_C = rng.integers(1, VOCABULARY, length).astype(np.int32)
        logprobs_C = np.log(rng.uniform(0.05, 0.9, length)).astype(np.float32)
        verdict = Verdict.ERROR if outcome is None else Verdict.CORRECT if outcome else Verdict.WRONG
        judgement = Judgement(verdict, reward=float(outcome or 0), extracted=str(int(bool(outcome))))
        completion = Completion(index, token_ids_C, logprobs_C, FinishReason.STOP, 0)
        rollouts.append(Rollout(completion, "text", judgement, float(outcome or 0)))
    return RolloutGroup(GroupRequest(query, len(outcomes), purpose, visit), tuple(rollouts))
