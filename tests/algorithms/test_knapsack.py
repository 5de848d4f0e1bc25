import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sgpo_jax.algorithms.knapsack import (
    QueryHistory,
    allocate_rollouts,
    marginal_value,
    rollout_value,
    useful_rollouts,
)

RATES = st.floats(0.01, 0.99)


def histories(counts, num_judged=16):
    return [QueryHistory(f"q{index}", count, num_judged) for index, count in enumerate(counts)]


@given(num_rollouts=st.integers(2, 127), rate=RATES)
def test_marginal_is_the_difference_of_values_and_falls(num_rollouts, rate):
    difference = rollout_value(num_rollouts + 1, rate) - rollout_value(num_rollouts, rate)
    assert marginal_value(num_rollouts, rate) == pytest.approx(difference, abs=1e-12)
    assert marginal_value(num_rollouts + 1, rate) < marginal_value(num_rollouts, rate)


def test_value_by_hand():
    assert rollout_value(2, 0.5) == pytest.approx(0.5 * 0.125)
    assert rollout_value(3, 0.25) == pytest.approx((1 - 1 / 64 - 27 / 64) * 0.25 * 9 / 16)
    assert rollout_value(8, 0.0) == rollout_value(8, 1.0) == 0


@pytest.mark.parametrize(("rate", "expected"), [(0.5, 3), (0.25, 8), (0.75, 8), (0.0625, 35), (0.001, 128)])
def test_useful_rollouts(rate, expected):
    assert useful_rollouts(rate) == expected
    if expected < 128:
        assert max(rate, 1 - rate) ** expected >= 0.1 > max(rate, 1 - rate) ** (expected + 1)


@settings(max_examples=40, deadline=None)
@given(counts=st.lists(st.integers(1, 15), min_size=1, max_size=4), mean=st.integers(2, 6))
def test_mixed_queries_equal_brute_force(counts, mean):
    """All rates between 0 and 1: the best of all allocations of the budget."""
    queries = histories(counts)
    sizes = allocate_rollouts(queries, mean)
    budget = mean * len(counts)
    assert sum(sizes.values()) == budget

    def total(allocation):
        return sum(rollout_value(n, count / 16) for n, count in zip(allocation, counts, strict=True))

    every = itertools.product(range(2, budget + 1), repeat=len(counts))
    best = max(total(allocation) for allocation in every if sum(allocation) == budget)
    assert total([sizes[query.query_id] for query in queries]) == pytest.approx(best, rel=1e-12)


@settings(deadline=None)
@given(
    counts=st.lists(st.integers(0, 16), min_size=1, max_size=24),
    unknown=st.integers(0, 5),
    mean=st.integers(1, 140),
    order=st.randoms(),
)
def test_budget_bounds_and_order(counts, unknown, mean, order):
    queries = histories(counts) + [QueryHistory(f"new{index}", 0, 0) for index in range(unknown)]
    sizes = allocate_rollouts(queries, mean)
    assert sum(sizes.values()) == mean * len(queries)
    assert set(sizes) == {query.query_id for query in queries}
    assert all(sizes[query.query_id] == mean for query in queries if query.num_judged == 0)
    if 2 <= mean <= 128:
        assert all(2 <= size <= 128 for size in sizes.values())
    else:
        assert set(sizes.values()) == {mean}
    order.shuffle(queries)
    assert allocate_rollouts(queries, mean) == sizes


def test_extremes_get_the_minimum_while_others_have_use():
    sizes = allocate_rollouts(histories([0, 16, 1, 1]), mean_group_size=8)
    assert sizes == {"q0": 2, "q1": 2, "q2": 14, "q3": 14}


def test_surplus_goes_to_the_always_wrong():
    """Half-solved queries have use for 3: 8 · 5 - 2 · 3 - 2 · 3 = 28 over, on top of the minimum of 2."""
    sizes = allocate_rollouts(histories([0, 0, 16, 8, 8]), mean_group_size=8)
    assert sizes == {"q0": 16, "q1": 16, "q2": 2, "q3": 3, "q4": 3}


def test_surplus_goes_to_the_always_right_if_none_is_always_wrong():
    sizes = allocate_rollouts(histories([16, 16, 8]), mean_group_size=8)
    assert sizes == {"q0": 11, "q1": 10, "q2": 3}


def test_surplus_beyond_the_maximum_flows_on():
    sizes = allocate_rollouts(histories([0, 16, 8, 8]), mean_group_size=100)
    assert sizes == {"q0": 128, "q1": 128, "q2": 72, "q3": 72}


def test_without_extremes_all_is_solved_greedily():
    assert allocate_rollouts(histories([8, 8, 8]), mean_group_size=8) == {"q0": 8, "q1": 8, "q2": 8}


def test_ties_go_by_id():
    queries = [QueryHistory(name, 1, 8) for name in ("c", "a", "b")] + [QueryHistory("z", 0, 8)]
    sizes = allocate_rollouts(queries, mean_group_size=3)
    assert sizes == {"a": 4, "b": 3, "c": 3, "z": 2}


def test_first_epoch_is_uniform():
    queries = [QueryHistory(f"q{index}", 0, 0) for index in range(5)]
    assert set(allocate_rollouts(queries, 8).values()) == {8}
