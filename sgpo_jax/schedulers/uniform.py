"""Uniform group sizes with dynamic sampling: DAPO (arXiv 2503.14476, section 3.2)."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from sgpo_jax.algorithms.greso import Outcome, outcome_of
from sgpo_jax.config import RefillConfig
from sgpo_jax.schedulers.base import Decision, in_order, split_incomplete
from sgpo_jax.schedulers.order import Portion, ShuffledOrder
from sgpo_jax.schedulers.shortage import shortage
from sgpo_jax.types import GroupRequest, Purpose, Query, RolloutGroup


@dataclass
class RefillStep:
    """What the rounds of one step have brought so far.

    last: the last query that was drawn, rolled out or not. outcomes: of all its judged groups; round_outcomes: of the
    last round's.
    """

    last: Portion[str] | None = None
    num_rounds: int = 0
    kept: list[RolloutGroup] = field(default_factory=list)
    outcomes: Counter[Outcome] = field(default_factory=Counter)
    round_outcomes: Counter[Outcome] = field(default_factory=Counter)
    dropped: Counter[str] = field(default_factory=Counter)

    @property
    def ends_epoch(self) -> bool:
        return self.last is not None and self.last.ends_stretch


class UniformScheduler:
    """Rolls out groups of one size, round after round, until a step has enough whose outcomes differ.

    An epoch draws every query once in a shuffled order and is one phase, named e1, e2; its last step may be short, or
    without any group to train on. Groups all correct or all wrong are dropped, and so are informative groups beyond
    the step's number; all were generated, and are charged. *Reading*: a round asks for `oversample` queries for each
    group that is still missing, where DAPO's own code asks for whole batches, of which more is dropped.
    """

    def __init__(
        self,
        queries: Mapping[str, Query],
        *,
        group_size: int,
        epochs: int,
        prompts_per_step: int,
        refill: RefillConfig,
        seed: int,
        oversample: float = 1.0,
    ) -> None:
        self._queries = queries
        self._group_size = group_size
        self._epochs = epochs
        self._prompts_per_step = prompts_per_step
        self._refill = refill
        self._oversample = oversample
        self._order = ShuffledOrder([sorted(queries)] * epochs, [1] * epochs, seed)
        self._step = RefillStep()
        self._round: list[GroupRequest] = []

    @property
    def num_steps(self) -> None:
        """It depends on how many groups are informative."""
        return None

    def propose(self) -> list[GroupRequest]:
        count = self._round_size(self._prompts_per_step - len(self._step.kept))
        self._round = []
        while len(self._round) < count and not self._step.ends_epoch:
            drawn = self._step.last = next(self._order)
            if self._rolls_out(drawn):
                query = self._queries[drawn.items[0]]
                self._round.append(GroupRequest(query, self._group_size, Purpose.TRAIN, visit=drawn.stretch))
            else:
                self._step.dropped["skipped"] += 1
        return self._round

    def accept(self, groups: Sequence[RolloutGroup]) -> Decision:
        step = self._step
        step.num_rounds += 1
        step.round_outcomes = Counter()
        complete, num_incomplete = split_incomplete(groups)
        step.dropped["incomplete"] += num_incomplete
        for group in in_order(complete, self._round):
            self._take(group)
        missing = self._prompts_per_step - len(step.kept)
        is_over = step.num_rounds == self._refill.max_rounds
        if missing and is_over and not step.ends_epoch and self._refill.when_short == "error":
            raise shortage(
                self._refill,
                step.outcomes,
                len(step.kept),
                self._prompts_per_step,
                tried=("rounds", "groups"),
                more="larger groups",
            )
        ready = not missing or is_over or step.ends_epoch
        if ready:
            self._end_step(step)
            self._step = RefillStep()
        return self._decision(step, ready)

    def state_dict(self) -> dict[str, Any]:
        return {"order": self._order.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._order.load_state_dict(state["order"])
        self._step = RefillStep()

    def _round_size(self, num_missing: int) -> int:
        """Queries to roll out next."""
        return round(num_missing * self._oversample)

    def _rolls_out(self, drawn: Portion[str]) -> bool:
        return True

    def _observe(self, group: RolloutGroup, outcome: Outcome) -> None:
        """Every judged group, trained or dropped."""

    def _end_step(self, step: RefillStep) -> None:
        """The step is complete."""

    def _take(self, group: RolloutGroup) -> None:
        step = self._step
        if not group.num_judged:
            step.dropped["unjudged"] += 1
            return
        outcome = outcome_of(group.num_correct, group.num_judged)
        step.outcomes[outcome] += 1
        step.round_outcomes[outcome] += 1
        self._observe(group, outcome)
        if outcome is not Outcome.MIXED:
            step.dropped[outcome] += 1
        elif len(step.kept) == self._prompts_per_step:
            step.dropped["surplus"] += 1
        else:
            step.kept.append(group)

    def _decision(self, step: RefillStep, ready: bool) -> Decision:
        assert step.last is not None, "accept follows propose"
        num_drawn = step.last.index + 1
        return Decision(
            train=tuple(step.kept) if ready else (),
            ready=ready,
            phase=f"e{step.last.stretch + 1}",
            ends_phase=ready and step.ends_epoch,
            done=ready and num_drawn == len(self._order),
            progress=num_drawn / len(self._order),
            dropped={str(reason): count for reason, count in step.dropped.items() if count},
        )
