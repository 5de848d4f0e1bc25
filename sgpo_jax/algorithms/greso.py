"""GRESO (arXiv 2506.02177): skip, before rollout, the queries whose last groups taught nothing."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from fractions import Fraction

MIN_ROLLOUT_PROBABILITY = 0.01  # no query is skipped for ever
RATE_STEP = 0.01
RATE_BOUNDS = (0.05, 0.95)
# A quarter of the groups may be without signal; a third of those all-correct, the rest all-wrong.
TARGET_ALL_WRONG = Fraction(1, 4) * Fraction(2, 3)
TARGET_ALL_CORRECT = Fraction(1, 4) * Fraction(1, 3)
ROUND_SAFETY = Fraction(5, 4)
REFERENCE_BATCH = 256  # queries of a step for which the paper states the bounds of a round
ROUND_BOUNDS = (64, 384)


class Outcome(StrEnum):
    """How the judged rollouts of a group went."""

    ALL_CORRECT = "all_correct"
    ALL_WRONG = "all_wrong"
    MIXED = "mixed"


@dataclass(frozen=True, slots=True)
class ExplorationRates:
    """Base probabilities of rolling a query out again after one all-correct (easy) or all-wrong (hard) group."""

    easy: float = 0.5
    hard: float = 0.5


def outcome_of(num_correct: int, num_judged: int) -> Outcome:
    """Raises ValueError for a group without judged rollouts: it has no outcome, and leaves no trace."""
    if num_judged == 0:
        raise ValueError("a group without judged rollouts has no outcome")
    if num_correct == num_judged:
        return Outcome.ALL_CORRECT
    return Outcome.MIXED if num_correct else Outcome.ALL_WRONG


def skip_probability(trace: Sequence[Outcome], rates: ExplorationRates) -> float:
    """1 - max(p^z, 0.01), with z the trailing run of all-correct or all-wrong groups; 0 after a mixed or no group.

    trace: the query's groups, oldest first.
    """
    if not trace or trace[-1] is Outcome.MIXED:
        return 0.0
    run = next((back for back, outcome in enumerate(reversed(trace)) if outcome is not trace[-1]), len(trace))
    rate = rates.easy if trace[-1] is Outcome.ALL_CORRECT else rates.hard
    return 1 - max(rate**run, MIN_ROLLOUT_PROBABILITY)


def updated_rates(
    rates: ExplorationRates, num_groups: int, num_all_correct: int, num_all_wrong: int
) -> ExplorationRates:
    """One step of the controller, from the groups rolled out since the last one: fewer revisits where the share of
    groups without signal reached its target, more where it did not. *Reading*: no groups, no change.
    """
    if num_groups == 0:
        return rates
    return ExplorationRates(
        easy=_moved(rates.easy, num_all_correct >= TARGET_ALL_CORRECT * num_groups),
        hard=_moved(rates.hard, num_all_wrong >= TARGET_ALL_WRONG * num_groups),
    )


def next_round_size(num_needed: int, num_groups: int, num_zero_variance: int, prompts_per_step: int) -> int:
    """Queries to roll out next when num_needed informative groups are missing.

    num_needed / (1 - zero-variance share of this round's groups) · 1.25, rounded up, within [64, 384] at 256 prompts a
    step, the bounds scaled with the batch. A round without any informative group asks for the maximum.
    """
    low, high = (round(bound * prompts_per_step / REFERENCE_BATCH) for bound in ROUND_BOUNDS)
    if num_zero_variance == num_groups:
        return high
    informative_frac = Fraction(num_groups - num_zero_variance, num_groups)
    return min(high, max(low, math.ceil(num_needed / informative_frac * ROUND_SAFETY)))


def _moved(rate: float, too_many: bool) -> float:
    low, high = RATE_BOUNDS
    return min(high, max(low, rate - RATE_STEP if too_many else rate + RATE_STEP))
