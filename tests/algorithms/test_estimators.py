import itertools
from statistics import fmean

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from sgpo_jax.algorithms.estimators import Interval, avg_at_k, bootstrap_interval, majority_at_k, pass_at_k

SAMPLES = st.lists(st.booleans(), min_size=1, max_size=8)


def test_avg_is_a_share():
    assert avg_at_k(4, 16) == 0.25
    with pytest.raises(ValueError, match="no score"):
        avg_at_k(0, 0)


@given(is_correct=SAMPLES, data=st.data())
def test_pass_is_the_mean_over_all_subsets(is_correct, data):
    k = data.draw(st.integers(1, len(is_correct)))
    expected = fmean(any(subset) for subset in itertools.combinations(is_correct, k))
    assert pass_at_k(sum(is_correct), len(is_correct), k) == pytest.approx(expected)


@pytest.mark.parametrize("k", [0, 5])
def test_pass_needs_enough_samples(k):
    with pytest.raises(ValueError, match=r"k must be in 1 \.\. 4"):
        pass_at_k(2, 4, k)


@pytest.mark.parametrize(
    ("answers", "is_correct", "expected"),
    [
        (["2", "2", "3"], [True, True, False], 1.0),
        (["2", "3", "3"], [True, False, False], 0.0),
        (["2", "3", "4"], [True, False, False], 1 / 3),
        (["2", "3", "3", "2", "9"], [True, False, False, True, False], 0.5),
        ([None, None, None, "2"], [False, False, False, True], 1.0),
        ([None, None], [False, False], 0.0),
        (["2", "2"], [True, False], 0.5),
        ([], [], 0.0),
    ],
    ids=["right", "wrong", "tie of all", "tie of two", "no vote", "none at all", "judged both ways", "no samples"],
)
def test_majority_by_hand(answers, is_correct, expected):
    assert majority_at_k(answers, is_correct) == pytest.approx(expected)


@given(answers=st.lists(st.sampled_from(["1", "2", "3", None]), max_size=9), order=st.randoms())
def test_majority_is_what_breaking_ties_by_lot_gives(answers, order):
    is_correct = [answer == "1" for answer in answers]
    voted = [answer for answer in answers if answer is not None]
    winners = [answer for answer in set(voted) if all(voted.count(answer) >= voted.count(other) for other in voted)]
    expected = fmean(winner == "1" for winner in winners) if winners else 0.0
    assert majority_at_k(answers, is_correct) == pytest.approx(expected)
    order.shuffle(answers)
    assert majority_at_k(answers, [answer == "1" for answer in answers]) == pytest.approx(expected)


def test_bootstrap_equals_another_implementation():
    scores = np.random.default_rng(0).beta(0.5, 1.0, size=40)
    interval = bootstrap_interval(scores, seed=1)
    peer = stats.bootstrap((scores,), np.mean, n_resamples=20_000, method="percentile", rng=2).confidence_interval
    assert interval.mean == scores.mean()
    assert (interval.low, interval.high) == pytest.approx((peer.low, peer.high), abs=0.004)
    narrower = bootstrap_interval(scores, seed=1, confidence=0.5)
    assert interval.low < narrower.low < interval.mean < narrower.high < interval.high


def test_bootstrap_covers_the_truth():
    rng = np.random.default_rng(3)
    covered = 0
    for trial in range(300):
        scores = rng.binomial(16, 0.3, size=50) / 16
        interval = bootstrap_interval(scores, seed=trial, num_resamples=400)
        covered += interval.low <= 0.3 <= interval.high
    assert 0.90 < covered / 300 < 0.99


def test_bootstrap_depends_on_the_seed_only():
    scores = np.array([0.0, 0.25, 1.0, 0.5])
    assert bootstrap_interval(scores, seed=5) == bootstrap_interval(scores, seed=5)
    assert bootstrap_interval(scores, seed=5, num_resamples=30) != bootstrap_interval(scores, seed=6, num_resamples=30)
    assert bootstrap_interval(np.ones(3), seed=0) == Interval(1.0, 1.0, 1.0)
    with pytest.raises(ValueError, match="no questions"):
        bootstrap_interval(np.array([]), seed=0)
