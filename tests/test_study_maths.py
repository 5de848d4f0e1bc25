"""What is read off curves, against brute force; the bootstrap against every resample there is."""

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sgpo_jax.study.curves import Curve, accuracies, mean_curve
from sgpo_jax.study.statistics import paired_bootstrap, seed_interval


def curve(flops, accuracy):
    return Curve(np.array(flops, np.float64), np.array(accuracy, np.float64))


def test_a_curve_is_linear_between_evaluations_and_flat_outside():
    c = curve([10, 20, 40], [0.2, 0.4, 0.3])
    assert [c.at(x) for x in (0, 10, 15, 20, 30, 40, 99)] == pytest.approx([0.2, 0.2, 0.3, 0.4, 0.35, 0.3, 0.3])


@pytest.mark.parametrize(
    ("accuracy", "target", "expected"),
    [
        ([0.2, 0.4, 0.6], 0.5, 15.0),
        ([0.2, 0.6, 0.4, 0.6], 0.5, 25.0),  # the first crossing does not stay
        ([0.2, 0.6, 0.4], 0.5, None),  # ends below
        ([0.5, 0.5, 0.6], 0.5, 0.0),  # never below
        ([0.2, 0.5, 0.5], 0.5, 10.0),  # equal is above
    ],
)
def test_stays_above_is_the_last_crossing(accuracy, target, expected):
    found = curve(np.arange(len(accuracy)) * 10, accuracy).stays_above(target)
    assert found == (expected if expected is None else pytest.approx(expected))


@given(
    st.lists(st.tuples(st.integers(1, 50), st.integers(0, 20)), min_size=1, max_size=12),
    st.integers(0, 20),
)
def test_stays_above_agrees_with_a_search(points, target):
    c = curve(np.cumsum([gap for gap, _ in points]), [accuracy for _, accuracy in points])
    grid = np.linspace(c.flops_N[0], c.flops_N[-1], 5001)
    is_below = np.array([c.at(x) for x in grid]) < target - 1e-9
    found = c.stays_above(target)
    if found is None:
        assert is_below[-1]
        return
    spacing = (grid[-1] - grid[0]) / 5000
    expected = grid[np.flatnonzero(is_below)[-1]] if is_below.any() else grid[0]
    assert expected - 1e-6 <= found <= expected + spacing + 1e-6


def test_the_mean_curve_is_the_mean_at_every_evaluation():
    a, b = curve([0, 10], [0.0, 1.0]), curve([5, 20], [0.5, 0.8])
    mean = mean_curve([a, b])
    assert mean.flops_N.tolist() == [0, 5, 10, 20]
    assert mean.accuracy_N == pytest.approx([(a.at(x) + b.at(x)) / 2 for x in (0, 5, 10, 20)])
    assert accuracies([a, b], np.array([7.0])).tolist() == [[pytest.approx(a.at(7))], [pytest.approx(b.at(7))]]


def test_the_interval_over_seeds_is_students():
    values = [0.61, 0.64, 0.62, 0.66, 0.63]
    found = seed_interval(values)
    assert found.mean == pytest.approx(0.632)
    assert found.half_width == pytest.approx(2.7764 * np.std(values, ddof=1) / np.sqrt(5), rel=1e-4)  # t, 4 degrees
    assert seed_interval([0.5]).half_width is None


def all_resamples(first_SQ, second_SQ):
    """Every resample there is, each as likely as any other."""
    num_questions = first_SQ.shape[1]
    draws = [itertools.product(range(n), repeat=n) for n in (len(first_SQ), len(second_SQ), num_questions)]
    for a, b, q in itertools.product(*map(list, draws)):
        yield first_SQ[np.ix_(a, q)].mean() - second_SQ[np.ix_(b, q)].mean()


def test_the_bootstrap_agrees_with_all_resamples():
    rng = np.random.default_rng(1)
    first_SQ, second_SQ = rng.uniform(0.3, 1, (2, 4)), rng.uniform(0, 0.8, (3, 4))
    exact = np.array(list(all_resamples(first_SQ, second_SQ)))
    found = paired_bootstrap(first_SQ, second_SQ, num_resamples=40_000)
    assert found.mean == pytest.approx(first_SQ.mean() - second_SQ.mean())
    assert (found.low, found.high) == pytest.approx(np.quantile(exact, [0.025, 0.975]), abs=0.01)
    assert found.p == pytest.approx(2 * min((exact <= 0).mean(), (exact >= 0).mean()), abs=0.01)


def test_pairing_by_question_takes_out_what_is_hard_for_both():
    rng = np.random.default_rng(2)
    difficulty_Q = rng.uniform(0, 1, 400)
    first_SQ = np.clip(difficulty_Q + 0.02 + rng.normal(0, 0.01, (3, 400)), 0, 1)
    second_SQ = np.clip(difficulty_Q + rng.normal(0, 0.01, (3, 400)), 0, 1)
    paired = paired_bootstrap(first_SQ, second_SQ)
    assert paired.p < 0.01
    shuffled = paired_bootstrap(first_SQ, rng.permutation(second_SQ, axis=1))
    assert shuffled.p > 0.1
    assert shuffled.high - shuffled.low > 5 * (paired.high - paired.low)


def test_the_bootstrap_has_no_side():
    rng = np.random.default_rng(3)
    a_SQ, b_SQ = rng.uniform(0, 1, (5, 60)), rng.uniform(0, 1, (3, 60))
    there, back = paired_bootstrap(a_SQ, b_SQ), paired_bootstrap(b_SQ, a_SQ)
    assert there.mean == pytest.approx(-back.mean)
    assert (there.low, there.high) == pytest.approx((-back.high, -back.low), abs=0.01)
    same = paired_bootstrap(a_SQ, a_SQ)
    assert same.low < 0 < same.high
    assert same.p > 0.9
