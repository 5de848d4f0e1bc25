"""Sequential profiling: stop sampling a query as soon as its bucket is certain enough.

A departure from sGPO (arXiv 2606.08854, section 4.1), which draws N samples of every query.
"""

from fractions import Fraction
from functools import cache
from math import comb

from sgpo_jax.algorithms.allocation import ProfileRow, bucket_of, exact
from sgpo_jax.config import ProfileConfig, SGPOConfig


def num_samples_wanted(row: ProfileRow | None, profile: ProfileConfig, sgpo: SGPOConfig) -> int:
    """How many more completions to draw of a query that has `row` so far (None: nothing), up to the next look; 0: none.

    profile.stages are the looks; the last one is at profile.num_samples, whatever is certain. A completion without a
    verdict counts as drawn.
    """
    num_drawn = row.num_drawn if row else 0
    looks = [look for look in (*profile.stages, profile.num_samples) if look > num_drawn]
    if not looks:
        return 0
    if row and certainty(row.num_correct, row.num_samples, profile.num_samples - num_drawn, sgpo) >= exact(
        profile.certainty
    ):
        return 0
    return looks[0] - num_drawn


@cache
def certainty(num_correct: int, num_judged: int, num_more: int, sgpo: SGPOConfig) -> Fraction:
    """The probability that num_more further completions leave the query in the bucket that it is in now.

    With a uniform prior on the success rate, the number of further successes x is beta-binomial: C(k + x, x) ·
    C(n - k + m - x, m - x) / C(n + m + 1, m) for k of n so far and m more. 0 for a query without verdicts.
    """
    if num_judged == 0:
        return Fraction(0)
    bucket = bucket_of(num_correct, num_judged, sgpo)
    num_wrong = num_judged - num_correct
    num_ways = sum(
        comb(num_correct + x, x) * comb(num_wrong + num_more - x, num_more - x)
        for x in range(num_more + 1)
        if bucket_of(num_correct + x, num_judged + num_more, sgpo) == bucket
    )
    return Fraction(num_ways, comb(num_judged + num_more + 1, num_more))
