"""sGPO's curriculum: phases of growing group size, easy to hard (arXiv 2606.08854, section 4.3.3)."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import grain
import numpy as np

from sgpo_jax.algorithms.allocation import Phase
from sgpo_jax.schedulers.base import Decision, split_incomplete
from sgpo_jax.types import GroupRequest, Purpose, Query, RolloutGroup


@dataclass(frozen=True, slots=True)
class _Step:
    """One batch of queries of one phase."""

    phase: int
    query_ids: tuple[str, ...]
    ends_phase: bool


class SGPOScheduler:
    """Trains every query of every phase once, with the phase's group size and no refill (section 4.4).

    Inside a phase the order is shuffled with the seed; phases follow each other as planned, and a step never mixes two:
    the last step of a phase may be short. The Grain iterator is the only record of where training stands.
    """

    def __init__(
        self, phases: Sequence[Phase], queries: Mapping[str, Query], *, prompts_per_step: int, seed: int
    ) -> None:
        self._phases = tuple(phase for phase in phases if phase.query_ids)
        self._queries = queries
        self._visits = _visits_before(self._phases)
        steps = grain.MapDataset.concatenate(
            [_steps_of(i, phase, prompts_per_step, seed) for i, phase in enumerate(self._phases)]
        )
        self._num_steps = len(steps)
        options = grain.ReadOptions(num_threads=0, prefetch_buffer_size=0)
        self._order = iter(steps.to_iter_dataset(options))
        self._current: _Step | None = None

    @property
    def num_steps(self) -> int:
        return self._num_steps

    def propose(self) -> list[GroupRequest]:
        self._current = next(self._order)
        phase = self._phases[self._current.phase]
        visits = self._visits[self._current.phase]
        return [
            GroupRequest(self._queries[query_id], phase.group_size, Purpose.TRAIN, visit=visits[query_id])
            for query_id in self._current.query_ids
        ]

    def accept(self, groups: Sequence[RolloutGroup]) -> Decision:
        assert self._current is not None, "accept follows propose"
        place = {query_id: i for i, query_id in enumerate(self._current.query_ids)}
        complete, num_incomplete = split_incomplete(groups)
        is_last_phase = self._current.phase == len(self._phases) - 1
        return Decision(
            train=tuple(sorted(complete, key=lambda group: place[group.query.query_id])),
            ready=True,
            phase=self._phases[self._current.phase].name,
            ends_phase=self._current.ends_phase,
            done=is_last_phase and self._current.ends_phase,
            dropped={"incomplete": num_incomplete} if num_incomplete else {},
        )

    def state_dict(self) -> dict[str, Any]:
        return {"order": self._order.get_state()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._order.set_state(dict(state["order"]))
        self._current = None


def _steps_of(index: int, phase: Phase, prompts_per_step: int, seed: int) -> grain.MapDataset:
    shuffle_seed = int(np.random.SeedSequence((seed, index)).generate_state(1)[0])  # an order of its own for each phase
    ordered = grain.MapDataset.source(phase.query_ids).shuffle(seed=shuffle_seed)
    batches = ordered.batch(prompts_per_step, batch_fn=tuple)
    last = len(batches) - 1
    return batches.map_with_index(lambda i, query_ids: _Step(index, tuple(query_ids), ends_phase=i == last))


def _visits_before(phases: Sequence[Phase]) -> list[dict[str, int]]:
    """For each phase, how often each of its queries was trained in earlier ones: a phase visits a query once."""
    seen: Counter[str] = Counter()
    visits = []
    for phase in phases:
        visits.append({query_id: seen[query_id] for query_id in phase.query_ids})
        seen.update(phase.query_ids)
    return visits
