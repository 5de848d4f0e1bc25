"""What an evaluation reports: avg@k, pass@k, majority@k, each by question, and an interval over questions."""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import chex
import numpy as np


@dataclass(frozen=True, slots=True)
class Interval:
    """A mean over questions with the bounds of its confidence interval."""

    mean: float
    low: float
    high: float


def avg_at_k(num_correct: int, num_judged: int) -> float:
    """Share of a question's judged samples that are correct (sGPO, arXiv 2606.08854, section 5: avg@16).

    Raises ValueError without judged samples: such a question has no score, the caller reports it apart.
    """
    if num_judged == 0:
        raise ValueError("a question without judged samples has no score")
    return num_correct / num_judged


def pass_at_k(num_correct: int, num_judged: int, k: int) -> float:
    """Chance that one of k samples is correct, unbiased: 1 - C(n-c, k) / C(n, k) (arXiv 2107.03374, equation 1).

    Raises ValueError where k is not in 1 .. num_judged.
    """
    if not 1 <= k <= num_judged:
        raise ValueError(f"pass@{k} of {num_judged} judged samples: k must be in 1 .. {num_judged}")
    return 1 - math.comb(num_judged - num_correct, k) / math.comb(num_judged, k)


def majority_at_k(answers: Sequence[str | None], is_correct: Sequence[bool]) -> float:
    """Correctness of the most frequent answer among all of a question's judged samples (arXiv 2203.11171).

    answers: extracted answers, compared as strings; None (nothing extracted) has no vote. A tie counts by expectation:
    the mean over the tied answers, so that no order of samples matters. An answer that was judged both ways counts by
    its share of correct verdicts. Without any vote: 0.
    """
    votes = Counter(answer for answer in answers if answer is not None)
    right = Counter(answer for answer, correct in zip(answers, is_correct, strict=True) if correct)
    winners = [answer for answer, count in votes.items() if count == max(votes.values())]
    return sum(right[answer] / votes[answer] for answer in winners) / len(winners) if winners else 0.0


def bootstrap_interval(
    scores: np.ndarray, *, seed: int, confidence: float = 0.95, num_resamples: int = 10_000
) -> Interval:
    """The mean of per-question scores with a percentile bootstrap over questions.

    scores: float, one for each question. The samples of a question stay together: its score is one draw.
    Raises ValueError without questions.
    """
    chex.assert_rank(scores, 1)
    if not len(scores):
        raise ValueError("no questions, no interval")
    rng = np.random.default_rng(seed)
    means = [scores[rng.integers(len(scores), size=len(scores))].mean() for _ in range(num_resamples)]
    tail = (1 - confidence) / 2
    low, high = np.quantile(means, [tail, 1 - tail])
    return Interval(float(scores.mean()), float(low), float(high))
