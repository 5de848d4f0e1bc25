"""Knapsack RL (arXiv 2509.25849): each step's budget of rollouts goes where a rollout is worth most."""

from collections.abc import Mapping, Sequence
from typing import Any

from sgpo_jax.algorithms.knapsack import QueryHistory, allocate_rollouts
from sgpo_jax.schedulers.base import Decision, in_order, split_incomplete
from sgpo_jax.schedulers.order import Portion, ShuffledOrder
from sgpo_jax.types import GroupRequest, Purpose, Query, RolloutGroup


class KnapsackScheduler:
    """Every query once an epoch, in a shuffled order; a step's group sizes sum to mean_group_size · its queries.

    The first epoch is uniform. From then on a step's budget is shared by the success rates of the epoch before. An
    epoch is one phase, named e1, e2. Nothing is refilled: groups that are all correct or all wrong are trained with
    advantages of zero. *Reading*: where no rollout of a query could be judged in an epoch, the one before counts.
    """

    def __init__(
        self, queries: Mapping[str, Query], *, mean_group_size: int, epochs: int, prompts_per_step: int, seed: int
    ) -> None:
        self._queries = queries
        self._mean_group_size = mean_group_size
        self._order = ShuffledOrder([sorted(queries)] * epochs, [prompts_per_step] * epochs, seed)
        self._history: dict[str, QueryHistory] = {}
        self._current: Portion[str] | None = None
        self._requests: list[GroupRequest] = []

    @property
    def num_steps(self) -> int:
        return len(self._order)

    def propose(self) -> list[GroupRequest]:
        self._current = next(self._order)
        histories = [self._history.get(query_id, QueryHistory(query_id, 0, 0)) for query_id in self._current.items]
        sizes = allocate_rollouts(histories, self._mean_group_size)
        self._requests = [
            GroupRequest(self._queries[query_id], sizes[query_id], Purpose.TRAIN, visit=self._current.stretch)
            for query_id in self._current.items
        ]
        return self._requests

    def accept(self, groups: Sequence[RolloutGroup]) -> Decision:
        assert self._current is not None, "accept follows propose"
        for group in groups:
            if group.num_judged:
                query_id = group.query.query_id
                self._history[query_id] = QueryHistory(query_id, group.num_correct, group.num_judged)
        complete, num_incomplete = split_incomplete(groups)
        num_done = self._current.index + 1
        return Decision(
            train=tuple(in_order(complete, self._requests)),
            ready=True,
            phase=f"e{self._current.stretch + 1}",
            ends_phase=self._current.ends_stretch,
            done=num_done == self.num_steps,
            progress=num_done / self.num_steps,
            dropped={"incomplete": num_incomplete} if num_incomplete else {},
        )

    def state_dict(self) -> dict[str, Any]:
        history = {query_id: [seen.num_correct, seen.num_judged] for query_id, seen in self._history.items()}
        return {"order": self._order.state_dict(), "history": history}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._order.load_state_dict(state["order"])
        self._history = {query_id: QueryHistory(query_id, *counts) for query_id, counts in state["history"].items()}
        self._current = None
