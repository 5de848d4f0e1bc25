"""Intervals over seeds, and the difference of two methods by a paired bootstrap. Pure: arrays in, numbers out."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy import stats

_BLOCK = 1000  # resamples at a time, which bounds memory


@dataclass(frozen=True, slots=True)
class SeedInterval:
    """A mean over seeds; half_width of its 95% interval, None for a single seed."""

    mean: float
    half_width: float | None


@dataclass(frozen=True, slots=True)
class Difference:
    """mean: the first method's accuracy less the second's; low, high: its 95% interval; p: two-sided."""

    mean: float
    low: float
    high: float
    p: float


def seed_interval(values: Sequence[float]) -> SeedInterval:
    """By Student's t with len(values) - 1 degrees of freedom: seeds are few, and a percentile bootstrap of few values
    is too narrow.
    """
    n = len(values)
    if n == 1:
        return SeedInterval(float(values[0]), None)
    half_width = stats.t.ppf(0.975, n - 1) * np.std(values, ddof=1) / np.sqrt(n)
    return SeedInterval(float(np.mean(values)), float(half_width))


def paired_bootstrap(
    first_SQ: np.ndarray, second_SQ: np.ndarray, *, seed: int = 0, num_resamples: int = 10_000
) -> Difference:
    """The difference of mean accuracies, resampling questions and seeds.

    first_SQ, second_SQ: float, accuracy by seed and question, columns of the same questions. A resample draws the
    questions once for both methods (paired: a hard question is hard for both), and seeds for each method by itself:
    equal seeds of two methods share nothing, and their numbers may differ. The interval is of percentiles; p is twice
    the smaller share of resamples on one side of 0, counting the data themselves as one.
    """
    rng = np.random.default_rng(seed)
    blocks = [min(_BLOCK, num_resamples - begin) for begin in range(0, num_resamples, _BLOCK)]
    means_R = np.concatenate([_resampled(rng, first_SQ, second_SQ, count) for count in blocks])
    low, high = np.quantile(means_R, [0.025, 0.975])
    one_side = min(np.count_nonzero(means_R <= 0), np.count_nonzero(means_R >= 0))
    p = min(1.0, 2 * (one_side + 1) / (num_resamples + 1))
    return Difference(float(first_SQ.mean() - second_SQ.mean()), float(low), float(high), float(p))


def _resampled(rng: np.random.Generator, first_SQ: np.ndarray, second_SQ: np.ndarray, count: int) -> np.ndarray:
    """Differences of `count` resamples, [count]."""
    difference_RQ = _over_seeds(rng, first_SQ, count) - _over_seeds(rng, second_SQ, count)
    questions_RQ = rng.integers(first_SQ.shape[1], size=difference_RQ.shape)
    return np.take_along_axis(difference_RQ, questions_RQ, axis=1).mean(axis=1)


def _over_seeds(rng: np.random.Generator, accuracy_SQ: np.ndarray, count: int) -> np.ndarray:
    """The mean over resampled seeds of each question, [count, Q]."""
    n = len(accuracy_SQ)
    shares_RS = rng.multinomial(n, np.full(n, 1 / n), size=count) / n
    return shares_RS @ accuracy_SQ
