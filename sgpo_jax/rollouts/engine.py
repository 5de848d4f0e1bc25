"""What an engine is, and where a sample's randomness comes from."""

import hashlib
from collections.abc import Iterator, Sequence
from typing import Any, Protocol

from sgpo_jax.types import CompletionGroup, GroupRequest, SamplingParams


class Engine(Protocol):
    """Draws completions. They come unjudged, as groups finish, in any order."""

    def generate(self, requests: Sequence[GroupRequest], sampling: SamplingParams) -> Iterator[CompletionGroup]: ...

    def update_weights(self, params: Any, version: int) -> None:
        """Sample from `params` from now on; `version` (optimizer updates) is stamped on every completion."""
        ...

    def close(self) -> None: ...


def sample_seed(run_seed: int, request: GroupRequest, sample_index: int) -> int:
    """63 bits that decide one completion: a hash of run seed, purpose, query, visit and sample index.

    Neighbours in the batch, the order of requests and restarts have no part in it; no two purposes or visits share
    noise.
    """
    fields = (run_seed, request.purpose, request.query.query_id, request.visit, sample_index)
    digest = hashlib.blake2b("\x1f".join(map(str, fields)).encode(), digest_size=8).digest()
    return int.from_bytes(digest) >> 1
