"""A seeded draw that depends on what is drawn from, never on its order."""

import hashlib
import heapq
from collections.abc import Iterable


def draw(keys: Iterable[str], count: int, seed: int) -> frozenset[str]:
    """`count` of the distinct keys (all of them, where there are fewer).

    The same keys and seed give the same draw in any order, and a smaller draw is part of a larger one.
    """

    def rank(key: str) -> bytes:
        return hashlib.sha256(f"{seed}\0{key}".encode()).digest()

    return frozenset(heapq.nsmallest(count, set(keys), key=rank))
