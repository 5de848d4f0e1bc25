"""From the profile to the plan: which queries are trained, in groups of which size, in which order.

sGPO (arXiv 2606.08854), sections 4.2 and 4.3. All comparisons of success rates are between integers or exact fractions.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from enum import StrEnum
from fractions import Fraction

import numpy as np

from sgpo_jax.config import SGPOConfig, TrainConfig
from sgpo_jax.types import FinishReason, RolloutGroup, UserError


@dataclass(frozen=True, slots=True)
class ProfileRow:
    """What profiling found out about one query.

    num_samples: completions that were judged; num_correct of them were correct, so num_correct / num_samples is the
        success rate. num_errors: those that could not be judged or are missing, not in num_samples.
    num_tokens: completion tokens generated; num_truncated: completions cut at the length limit.
    Raises UserError where num_correct is not in 0 .. num_samples.
    """

    query_id: str
    num_samples: int
    num_correct: int
    num_tokens: int
    num_truncated: int
    num_errors: int

    def __post_init__(self) -> None:
        if not 0 <= self.num_correct <= self.num_samples:
            allowed = f"0 .. num_samples={self.num_samples}"
            raise UserError(f"profile: query {self.query_id}: num_correct={self.num_correct} is not in {allowed}")

    @property
    def num_drawn(self) -> int:
        """Completions that were asked for, judged or not."""
        return self.num_samples + self.num_errors

    def __add__(self, later: "ProfileRow") -> "ProfileRow":
        """Of this query, with the completions that were drawn later."""
        counts = asdict(self).keys() - {"query_id"}
        return replace(self, **{name: getattr(self, name) + getattr(later, name) for name in counts})


def profile_row(group: RolloutGroup) -> ProfileRow:
    """num_samples counts judged completions only: one that could not be judged is not a failure."""
    return ProfileRow(
        query_id=group.query.query_id,
        num_samples=group.num_judged,
        num_correct=group.num_correct,
        num_tokens=group.num_tokens,
        num_truncated=sum(r.completion.finish_reason is FinishReason.LENGTH for r in group.rollouts),
        num_errors=len(group.rollouts) - group.num_judged,
    )


class Excluded(StrEnum):
    """Why a query has no group size of its own."""

    TRIVIAL = "trivial"  # success rate above the threshold
    UNSOLVED = "unsolved"  # judged, never correct; a share of them is mixed into each phase
    UNJUDGED = "unjudged"  # no completion could be judged


@dataclass(frozen=True, slots=True)
class Allocation:
    """Every profiled query id exactly once, each tuple sorted.

    learnable: by group size, in the order of the curriculum; a size without queries has an empty tuple.
    """

    learnable: dict[int, tuple[str, ...]]
    trivial: tuple[str, ...]
    unsolved: tuple[str, ...]
    unjudged: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Phase:
    """Queries that are trained together, each with a group of group_size rollouts.

    name: "e1-g2" is group size 2 in epoch 1. query_ids: sorted; the scheduler shuffles.
    """

    name: str
    epoch: int
    group_size: int
    query_ids: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Dropped:
    """The queries of no phase, sorted. `unsolved`: those unsolved ones that were drawn into no phase of any epoch."""

    trivial: tuple[str, ...]
    unsolved: tuple[str, ...]
    unjudged: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Plan:
    """Phases in the order of training. A profiled query is in at least one phase, or else in one list of `dropped`."""

    phases: tuple[Phase, ...]
    dropped: Dropped


def plan_phases(rows: Sequence[ProfileRow], config: SGPOConfig, epochs: int, seed: int) -> Plan:
    """The curriculum: in each of `epochs` (named from 1) a phase for each group size, smallest first (section 4.3.3).

    Phase g holds its learnable queries and a random share of the unsolved ones, all with group size g (section 4.3.1).
    Later epochs use the same profile. *Reading*: a group size without learnable queries has no phase, since unsolved
    queries alone teach nothing; so the plan of a profile without learnable queries is empty.
    Depends on the set of rows and `seed` only, not on the order of the rows. Raises UserError: a query id occurs twice.
    """
    allocation = allocate(rows, config)
    phases = tuple(
        Phase(
            name=f"e{epoch}-g{group_size}",
            epoch=epoch,
            group_size=group_size,
            query_ids=tuple(sorted(learnable + draw_unsolved(allocation.unsolved, config, epoch, group_size, seed))),
        )
        for epoch in range(1, epochs + 1)
        for group_size, learnable in allocation.learnable.items()
        if learnable
    )
    trained = {query_id for phase in phases for query_id in phase.query_ids}
    never_drawn = tuple(query_id for query_id in allocation.unsolved if query_id not in trained)
    return Plan(phases, Dropped(allocation.trivial, never_drawn, allocation.unjudged))


def allocate(rows: Sequence[ProfileRow], config: SGPOConfig) -> Allocation:
    """Sort queries into buckets, see `bucket_of`. Raises UserError: a query id occurs twice."""
    buckets: dict[int | Excluded, list[str]] = {key: [] for key in (*config.group_sizes, *Excluded)}
    previous = None
    for row in sorted(rows, key=lambda row: row.query_id):
        if row.query_id == previous:
            raise UserError(f"profile: query {row.query_id} has more than one line; keep one")
        previous = row.query_id
        buckets[bucket_of(row.num_correct, row.num_samples, config)].append(row.query_id)
    return Allocation(
        learnable={group_size: tuple(buckets[group_size]) for group_size in config.group_sizes},
        trivial=tuple(buckets[Excluded.TRIVIAL]),
        unsolved=tuple(buckets[Excluded.UNSOLVED]),
        unjudged=tuple(buckets[Excluded.UNJUDGED]),
    )


def bucket_of(num_correct: int, num_judged: int, config: SGPOConfig) -> int | Excluded:
    """The group size of a query that succeeded num_correct times out of num_judged, or why it has none.

    The size is 1/p for the success rate p, so that one success is expected in a group (section 4.2). *Reading* of the
    rounding: the largest of config.group_sizes <= 1/p (floor) or the smallest >= 1/p (ceil), else the nearest end.
    """
    if num_judged == 0:
        return Excluded.UNJUDGED
    if num_correct == 0:
        return Excluded.UNSOLVED
    if num_correct > exact(config.max_success_rate) * num_judged:
        return Excluded.TRIVIAL
    return group_size_of(num_correct, num_judged, config.group_sizes, config.rounding)


def group_size_of(num_correct: int, num_judged: int, sizes: Sequence[int], rounding: str) -> int:
    """The size for a success rate of num_correct / num_judged, above 0; sizes: increasing. See `bucket_of`."""
    if rounding == "floor":
        return max((size for size in sizes if size * num_correct <= num_judged), default=sizes[0])
    return min((size for size in sizes if size * num_correct >= num_judged), default=sizes[-1])


def draw_unsolved(
    unsolved: tuple[str, ...], config: SGPOConfig, epoch: int, group_size: int, seed: int
) -> tuple[str, ...]:
    """The unsolved queries of a phase: round(alpha · |unsolved|) of them (half to even), for each group size its own.

    *Reading* (section 4.3.1 leaves it open): drawn once and the same in all epochs, or anew for each epoch
    (config.unsolved_subset). The draw depends on the order of `unsolved`: give it sorted. None before the epoch
    config.unsolved_from_epoch, a departure from the paper.
    """
    if epoch < config.unsolved_from_epoch:
        return ()
    stream = epoch if config.unsolved_subset == "per_epoch" else 0  # epochs count from 1
    rng = np.random.default_rng([seed, stream, group_size])
    size = round(exact(config.unsolved_frac) * len(unsolved))
    return tuple(unsolved[index] for index in rng.choice(len(unsolved), size, replace=False))


def prompts_of_step(config: TrainConfig, group_size: float) -> int:
    """Queries of a step whose groups have `group_size` rollouts, in the mean; at least one."""
    if config.rollouts_per_step is None:
        return config.prompts_per_step
    return max(1, int(config.rollouts_per_step / group_size))


def exact(value: float) -> Fraction:
    """The fraction that a decimal knob stands for: 0.7 is 7/10, not the nearest binary number, which is smaller."""
    return Fraction(str(value))
