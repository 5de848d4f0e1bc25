"""Probes of the trainer's weights: the log-probs that an engine with the same weights must give."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from sgpo_jax.hosts.messages import lead
from sgpo_jax.models.qwen import Transformer, token_logprobs
from sgpo_jax.models.sharding import everywhere
from sgpo_jax.rollouts.engine import Probe

_MAX_PROMPT_TOKENS = 64


class Prober:
    """Makes probes on some prompts (token ids), each ended by `end_id`; one compiled program for the whole run.

    The last tokens of a prompt are taken where it is longer than 64.
    """

    def __init__(self, model: Transformer, prompts: Sequence[Sequence[int]], end_id: int, *, chunk_tokens: int) -> None:
        lead("prober", {"prompts": [list(map(int, prompt)) for prompt in prompts], "end_id": end_id})
        self._graphdef = nnx.graphdef(model)
        self._token_ids = tuple((*prompt[-_MAX_PROMPT_TOKENS:], end_id) for prompt in prompts)
        self._chunk_tokens = chunk_tokens
        longest = max(map(len, self._token_ids))
        self._token_ids_BT = np.zeros((len(prompts), longest), np.int32)
        self._segment_ids_BT = np.zeros((len(prompts), longest), np.int32)
        for row, ids in enumerate(self._token_ids):
            self._token_ids_BT[row, : len(ids)] = ids
            self._segment_ids_BT[row, : len(ids)] = 1
        self._logprobs = jax.jit(self._logprobs_of, out_shardings=everywhere())

    def __call__(self, params: nnx.State) -> Probe:
        lead("probe")
        logprobs_BT = np.asarray(self._logprobs(params, self._token_ids_BT, self._segment_ids_BT))
        rows = zip(logprobs_BT, self._token_ids, strict=True)
        return Probe(self._token_ids, tuple(logprobs_T[1 : len(ids)] for logprobs_T, ids in rows))

    def _logprobs_of(self, params: nnx.State, token_ids_BT: jax.Array, segment_ids_BT: jax.Array) -> Any:
        positions_BT = jnp.broadcast_to(jnp.arange(token_ids_BT.shape[1]), token_ids_BT.shape)
        model = nnx.merge(self._graphdef, params)
        return token_logprobs(
            model, token_ids_BT, positions_BT, segment_ids_BT, temperature=1.0, chunk_tokens=self._chunk_tokens
        ).logprobs_BT
