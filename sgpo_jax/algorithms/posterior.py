"""Group sizes of later epochs by all that is known by then: the profile and every rollout of training so far.

A departure from sGPO (arXiv 2606.08854, section 4.3.3), whose later epochs go by the first profile alone.
"""

from collections.abc import Sequence
from fractions import Fraction
from math import comb

import numpy as np

from sgpo_jax.algorithms.allocation import Phase, ProfileRow, exact, group_size_of
from sgpo_jax.config import SGPOConfig


def posterior_phases(rows: Sequence[ProfileRow], config: SGPOConfig, epoch: int, seed: int) -> tuple[Phase, ...]:
    """The phases of a later epoch, smallest group size first; each query once, none dropped but by the two knobs.

    rows: what every query's completions came to so far, those of training included. The group size is that of the mean
    success rate under a uniform prior, (k + 1) / (n + 2), by the rule of section 4.2 (`group_size_of`).
    config.later_unsolved_frac: the share of the queries without any success that is trained, drawn for this epoch, so
    that others take the place of those that have been solved since. config.drop_trivial_later: see `is_trivial`.
    Depends on the set of rows and `seed` only.
    """
    sizes = config.later_group_sizes or config.group_sizes
    left_out = _unsolved_left_out(rows, config, epoch, seed)
    members: dict[int, list[str]] = {size: [] for size in sizes}
    for row in sorted(rows, key=lambda row: row.query_id):
        if row.query_id not in left_out and not is_trivial(row, config):
            size = group_size_of(row.num_correct + 1, row.num_samples + 2, sizes, config.rounding)
            members[size].append(row.query_id)
    return tuple(Phase(f"e{epoch}-g{size}", epoch, size, tuple(ids)) for size, ids in members.items() if ids)


def is_trivial(row: ProfileRow, config: SGPOConfig) -> bool:
    """Whether the success rate is above max_success_rate with probability config.drop_trivial_later; never where empty.

    With a uniform prior, the rate after k of n successes is above t with the probability that n + 1 draws of
    probability t have at most k successes.
    """
    if config.drop_trivial_later is None:
        return False
    rate, num_draws = exact(config.max_success_rate), row.num_samples + 1
    probability = sum(
        (comb(num_draws, i) * rate**i * (1 - rate) ** (num_draws - i) for i in range(row.num_correct + 1)), Fraction(0)
    )
    return probability >= exact(config.drop_trivial_later)


def _unsolved_left_out(rows: Sequence[ProfileRow], config: SGPOConfig, epoch: int, seed: int) -> set[str]:
    unsolved = sorted(row.query_id for row in rows if row.num_samples and not row.num_correct)
    num_left_out = len(unsolved) - round(exact(config.later_unsolved_frac) * len(unsolved))
    chosen = np.random.default_rng([seed, epoch]).choice(len(unsolved), num_left_out, replace=False)
    return {unsolved[index] for index in chosen}
