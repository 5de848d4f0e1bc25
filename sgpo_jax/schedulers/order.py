"""The order of a schedule as a Grain iterator: the only record of where training stands."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import grain
import numpy as np

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Portion(Generic[T]):
    """Some items of one stretch. index: of the portion in the whole order, from 0."""

    index: int
    stretch: int
    items: tuple[T, ...]
    ends_stretch: bool


class ShuffledOrder(Generic[T]):
    """Stretches of items one after another, each shuffled in a way of its own, given out in portions.

    A portion never mixes two stretches, so that the last one of a stretch may be short. No stretch may be empty.
    """

    def __init__(self, stretches: Sequence[Sequence[T]], portion_sizes: Sequence[int], seed: int) -> None:
        """portion_sizes: one for each stretch."""
        sized = zip(stretches, portion_sizes, strict=True)
        parts = [_portions(i, stretch, size, seed) for i, (stretch, size) in enumerate(sized)]
        numbered = grain.MapDataset.concatenate(parts).map_with_index(
            lambda index, part: Portion(index, part[0], part[1], part[2])
        )
        self._len = len(numbered)
        options = grain.ReadOptions(num_threads=0, prefetch_buffer_size=0)
        self._portions = iter(numbered.to_iter_dataset(options))

    def __len__(self) -> int:
        """Portions of the whole order."""
        return self._len

    def __next__(self) -> Portion[T]:
        return next(self._portions)

    def state_dict(self) -> dict[str, Any]:
        """JSON values only."""
        return self._portions.get_state()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._portions.set_state(dict(state))


def _portions(index: int, stretch: Sequence[T], size: int, seed: int) -> grain.MapDataset:
    shuffle_seed = int(np.random.SeedSequence((seed, index)).generate_state(1)[0])
    portions = grain.MapDataset.source(stretch).shuffle(seed=shuffle_seed).batch(size, batch_fn=tuple)
    last = len(portions) - 1
    return portions.map_with_index(lambda i, items: (index, tuple(items), i == last))
