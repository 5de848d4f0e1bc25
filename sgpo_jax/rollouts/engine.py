"""What an engine is, and where a sample's randomness comes from."""

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from sgpo_jax.types import CompletionGroup, GroupRequest, Purpose, Query, SamplingParams


@dataclass(frozen=True, slots=True)
class Probe:
    """A few sequences with the trainer's log-probs: what an engine must find too once it has the trainer's weights.

    token_ids: sequences of two tokens or more. logprobs: float32, of every token but the first, at temperature 1.
    """

    token_ids: tuple[tuple[int, ...], ...]
    logprobs: tuple[np.ndarray, ...]


class Engine(Protocol):
    """Draws completions. They come unjudged, as groups finish, in any order."""

    def generate(self, requests: Sequence[GroupRequest], sampling: SamplingParams) -> Iterator[CompletionGroup]: ...

    def update_weights(self, params: Any, version: int, probe: Probe | None) -> Mapping[str, float]:
        """Sample from `params` from now on; `version` (optimizer updates) is stamped on every completion.

        probe: of `params`, compared after the update by an engine that has its weights from a copy. None for one that
        shares the trainer's arrays: there is no copy that could differ. Returns what there is to log.
        Raises MachineError where the engine cannot be brought to these weights; the trainer may still save its state.
        """
        ...

    def close(self) -> None: ...


def to_values(requests: Sequence[GroupRequest]) -> list[list[Any]]:
    """What of requests decides their completions, as JSON values; `from_values` makes such requests of it again."""
    return [
        [r.query.query_id, list(map(int, r.query.prompt_ids)), r.num_samples, r.purpose, r.visit, r.first_sample]
        for r in requests
    ]


def from_values(values: Sequence[Sequence[Any]]) -> list[GroupRequest]:
    """Requests for the same completions; of the queries they have identity and prompt alone."""
    return [
        GroupRequest(Query(query_id, "", "", "", "", "", tuple(prompt_ids)), num, Purpose(purpose), visit, first)
        for query_id, prompt_ids, num, purpose, visit, first in values
    ]


def sample_seed(run_seed: int, request: GroupRequest, sample_index: int) -> int:
    """63 bits that decide one completion: a hash of run seed, purpose, query, visit and sample index.

    Neighbours in the batch, the order of requests and restarts have no part in it; no two purposes or visits share
    noise.
    """
    fields = (run_seed, request.purpose, request.query.query_id, request.visit, sample_index)
    digest = hashlib.blake2b("\x1f".join(map(str, fields)).encode(), digest_size=8).digest()
    return int.from_bytes(digest) >> 1
