"""sGPO's curriculum: phases of growing group size, easy to hard (arXiv 2606.08854, section 4.3.3)."""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from itertools import groupby
from statistics import fmean
from typing import Any

from sgpo_jax.algorithms.allocation import Phase
from sgpo_jax.schedulers.base import Decision, in_order, split_incomplete
from sgpo_jax.schedulers.order import Portion, ShuffledOrder
from sgpo_jax.types import GroupRequest, Purpose, Query, RolloutGroup


class SGPOScheduler:
    """Trains every query of every phase once, with the phase's group size and no refill (section 4.4).

    Inside a phase the order is shuffled with the seed; phases follow each other as planned, and a step never mixes two:
    the last step of a phase may be short.
    curriculum False (the paper's ablation, table 4): the phases of an epoch are shuffled into one, named e1, e2; its
    steps mix group sizes, and an unsolved query that is in several phases is still trained once for each.
    """

    def __init__(
        self,
        phases: Sequence[Phase],
        queries: Mapping[str, Query],
        *,
        prompts_of_step: Callable[[float], int],
        seed: int,
        curriculum: bool = True,
    ) -> None:
        """prompts_of_step: queries of a step, by the mean group size of its phase."""
        stretches = _requests(phases, queries, curriculum)
        self._names = list(stretches)
        sizes = [prompts_of_step(fmean(r.num_samples for r in requests)) for requests in stretches.values()]
        self._order = ShuffledOrder(list(stretches.values()), sizes, seed)
        self._current: Portion[GroupRequest] | None = None

    @property
    def num_steps(self) -> int:
        return len(self._order)

    def propose(self) -> list[GroupRequest]:
        self._current = next(self._order)
        return list(self._current.items)

    def accept(self, groups: Sequence[RolloutGroup]) -> Decision:
        assert self._current is not None, "accept follows propose"
        complete, num_incomplete = split_incomplete(groups)
        num_done = self._current.index + 1
        return Decision(
            train=tuple(in_order(complete, self._current.items)),
            ready=True,
            phase=self._names[self._current.stretch],
            ends_phase=self._current.ends_stretch,
            done=num_done == self.num_steps,
            progress=num_done / self.num_steps,
            dropped={"incomplete": num_incomplete} if num_incomplete else {},
        )

    def state_dict(self) -> dict[str, Any]:
        return {"order": self._order.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._order.load_state_dict(state["order"])
        self._current = None


def _requests(
    phases: Sequence[Phase], queries: Mapping[str, Query], curriculum: bool
) -> dict[str, tuple[GroupRequest, ...]]:
    """What is rolled out, by the name of what is shuffled together; phases without queries are left out."""
    visits: Counter[str] = Counter()
    stretches = {}
    for name, members in groupby(phases, key=lambda phase: phase.name if curriculum else f"e{phase.epoch}"):
        requests = []
        for phase in members:
            for query_id in phase.query_ids:
                request = GroupRequest(queries[query_id], phase.group_size, Purpose.TRAIN, visit=visits[query_id])
                requests.append(request)
                visits[query_id] += 1
        if requests:
            stretches[name] = tuple(requests)
    return stretches
