import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sgpo_jax.algorithms.greso import (
    ExplorationRates,
    Outcome,
    next_round_size,
    outcome_of,
    skip_probability,
    updated_rates,
)

EASY, HARD, MIXED = Outcome.ALL_CORRECT, Outcome.ALL_WRONG, Outcome.MIXED
RATES = ExplorationRates(easy=0.4, hard=0.7)


@pytest.mark.parametrize(
    ("num_correct", "num_judged", "outcome"), [(0, 8, HARD), (8, 8, EASY), (1, 8, MIXED), (7, 8, MIXED), (1, 1, EASY)]
)
def test_outcomes(num_correct, num_judged, outcome):
    assert outcome_of(num_correct, num_judged) is outcome


def test_a_group_without_verdicts_has_no_outcome():
    with pytest.raises(ValueError, match="no outcome"):
        outcome_of(0, 0)


@pytest.mark.parametrize(
    ("trace", "kept"),
    [
        ([], 1.0),
        ([HARD, HARD, MIXED], 1.0),
        ([EASY], 0.4),
        ([HARD], 0.7),
        ([MIXED, EASY, EASY], 0.4**2),
        ([EASY, HARD, HARD, HARD], 0.7**3),
        ([HARD, MIXED, HARD], 0.7),
        ([EASY] * 50, 0.01),
    ],
)
def test_skip_probability(trace, kept):
    assert skip_probability(trace, RATES) == pytest.approx(1 - kept)


def test_simulated_hopeless_query_is_revisited_as_often_as_computed():
    """A query that always fails is rolled out again at every visit with probability max(p^z, 0.01)."""
    rng = np.random.default_rng(0)
    num_runs, num_visits = 4000, 6
    rolled_out = np.zeros(num_visits)
    for _ in range(num_runs):
        trace = []
        for visit in range(num_visits):
            if rng.random() >= skip_probability(trace, RATES):
                trace.append(HARD)
                rolled_out[visit] += 1
    # The distribution of z, visit by visit, from the transition probabilities.
    of_run = np.eye(1, num_visits + 1)[0]
    keep = np.maximum(0.7 ** np.arange(num_visits + 1), 0.01)
    for visit in range(num_visits):
        expected = of_run @ keep
        assert rolled_out[visit] / num_runs == pytest.approx(expected, abs=0.03)
        of_run = of_run * (1 - keep) + np.roll(of_run * keep, 1)


@pytest.mark.parametrize(
    ("all_correct", "all_wrong", "easy", "hard"),
    [
        (0, 0, 0.51, 0.51),
        (1, 2, 0.49, 0.49),  # of 12: a twelfth and a sixth, exactly the targets
        (0, 2, 0.51, 0.49),
        (1, 1, 0.49, 0.51),
    ],
)
def test_controller_step(all_correct, all_wrong, easy, hard):
    rates = updated_rates(ExplorationRates(), 12, all_correct, all_wrong)
    assert (rates.easy, rates.hard) == pytest.approx((easy, hard))


def test_controller_stays_within_bounds():
    low = high = ExplorationRates()
    for _ in range(200):
        low, high = updated_rates(low, 10, 5, 5), updated_rates(high, 10, 0, 0)
    assert low == ExplorationRates(0.05, 0.05)
    assert high == ExplorationRates(0.95, 0.95)
    assert updated_rates(RATES, 0, 0, 0) is RATES


def test_simulated_controller_holds_the_target():
    """Queries: 60% hopeless, 40% mixed. The share of all-wrong groups settles near its target of a sixth."""
    rng = np.random.default_rng(1)
    rates = ExplorationRates()
    shares = []
    for _ in range(300):
        trace = [HARD]  # as seen once before
        keep = 1 - skip_probability(trace, rates)
        num_wrong, num_mixed = rng.binomial(600, keep), 400
        rates = updated_rates(rates, num_wrong + num_mixed, 0, num_wrong)
        shares.append(num_wrong / (num_wrong + num_mixed))
    assert np.mean(shares[100:]) == pytest.approx(1 / 6, abs=0.02)


@pytest.mark.parametrize(
    ("needed", "num_groups", "num_zero", "batch", "expected"),
    [
        (64, 100, 50, 256, 160),
        (64, 100, 90, 256, 384),  # 800 in excess of the maximum
        (200, 10, 0, 256, 250),
        (1, 100, 0, 256, 64),
        (100, 10, 10, 256, 384),
        (10, 0, 0, 256, 384),  # all were skipped
        (16, 100, 50, 64, 40),
        (1, 100, 0, 64, 16),
        (64, 10, 10, 64, 96),
        (1, 10, 0, 1, 2),
        (3, 3, 1, 32, 8),
        (10, 3, 1, 32, 19),  # 18.75
    ],
)
def test_size_of_the_next_round(needed, num_groups, num_zero, batch, expected):
    assert next_round_size(needed, num_groups, num_zero, batch) == expected


@given(num_needed=st.integers(1, 256), num_groups=st.integers(1, 384), share=st.floats(0, 1))
def test_next_round_is_enough_on_average_or_the_maximum(num_needed, num_groups, share):
    num_zero = int(share * num_groups)
    size = next_round_size(num_needed, num_groups, num_zero, 256)
    assert 64 <= size <= 384
    assert size == 384 or size * (num_groups - num_zero) >= num_needed * num_groups
