import math
from statistics import fmean, pstdev, stdev

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sgpo_jax.algorithms.advantages import dr_grpo_advantages, group_advantages, k1_reward_penalty, rloo_advantages

REWARDS = st.sampled_from([0.0, 1.0, -1.0, 0.5, 0.1]) | st.floats(-100, 100)
ROWS = st.lists(st.tuples(REWARDS, st.integers(0, 4), st.booleans()), min_size=1, max_size=40)


def arrays(rows):
    rewards, ids, judged = zip(*rows, strict=True)
    return np.array(rewards), np.array(ids), np.array(judged)


def oracle(rows, formula):
    """One row after the other, by the definition; `formula` gets a reward and all judged rewards of its group."""
    result = []
    for reward, group, is_judged in rows:
        peers = [r for r, g, j in rows if g == group and j]
        has_signal = is_judged and len(peers) >= 2 and max(peers) - min(peers) > 1e-6
        result.append(formula(reward, peers) if has_signal else 0.0)
    return result


FORMULAS = {
    group_advantages: lambda r, peers: (r - fmean(peers)) / (pstdev(peers) + 1e-6),
    dr_grpo_advantages: lambda r, peers: r - fmean(peers),
    rloo_advantages: lambda r, peers: r - (math.fsum(peers) - r) / (len(peers) - 1),
}


@pytest.mark.parametrize("estimator", FORMULAS)
@given(rows=ROWS)
def test_equals_the_definition(estimator, rows):
    advantages = estimator(*arrays(rows))
    assert advantages.dtype == np.float32
    np.testing.assert_allclose(advantages, oracle(rows, FORMULAS[estimator]), rtol=1e-5, atol=1e-5)


@given(rows=ROWS)
def test_sample_deviation(rows):
    expected = oracle(rows, lambda r, peers: (r - fmean(peers)) / (stdev(peers) + 1e-6))
    np.testing.assert_allclose(group_advantages(*arrays(rows), ddof=1), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("estimator", FORMULAS)
@given(reward=REWARDS, noise=st.floats(0, 9e-7), size=st.integers(1, 17))
def test_equal_rewards_give_exact_zeros(estimator, reward, noise, size):
    rewards = np.full(size, reward)
    rewards[0] += noise
    assert (estimator(rewards, np.zeros(size, int), np.ones(size, bool)) == 0.0).all()


@pytest.mark.parametrize("size", range(2, 9))
@pytest.mark.parametrize("wrong", [0.0, -1.0])
def test_lone_success(size, wrong):
    rewards = np.full(size, wrong)
    rewards[size - 1] = 1.0
    advantages = group_advantages(rewards, np.zeros(size, int), np.ones(size, bool))
    assert advantages[-1] == pytest.approx(math.sqrt(size - 1), abs=1e-5)
    if size == 2:
        np.testing.assert_allclose(advantages, [-1, 1], atol=1e-5)


def test_pair_with_sample_deviation():
    advantages = group_advantages(np.array([0.0, 1.0]), np.zeros(2, int), np.ones(2, bool), ddof=1)
    np.testing.assert_allclose(advantages, [-math.sqrt(0.5), math.sqrt(0.5)], atol=1e-5)


@pytest.mark.parametrize("estimator", FORMULAS)
@given(rows=ROWS, seed=st.integers(0, 99))
def test_rows_may_come_in_any_order(estimator, rows, seed):
    order = np.random.default_rng(seed).permutation(len(rows))
    inputs = arrays(rows)
    shuffled = estimator(*(column[order] for column in inputs))
    np.testing.assert_allclose(shuffled, estimator(*inputs)[order], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("estimator", FORMULAS)
def test_errors_stay_out_of_the_statistics(estimator):
    rewards, judged = np.array([1.0, np.nan, 0.0, 0.0]), np.array([True, False, True, True])
    advantages = estimator(rewards, np.zeros(4, int), judged)
    assert advantages[1] == 0.0
    np.testing.assert_array_equal(advantages[judged], estimator(rewards[judged], np.zeros(3, int), np.ones(3, bool)))
    only_one_judged = estimator(np.array([1.0, 0.0]), np.zeros(2, int), np.array([True, False]))
    assert (only_one_judged == 0.0).all()


@pytest.mark.parametrize("reward", [np.nan, np.inf])
def test_rewards_must_be_finite(reward):
    with pytest.raises(ValueError, match="not finite"):
        group_advantages(np.array([0.0, reward]), np.zeros(2, int), np.ones(2, bool))


@pytest.mark.parametrize(
    ("rewards", "ids", "judged"),
    [
        (np.zeros(3), np.zeros(2, int), np.ones(3, bool)),
        (np.zeros((3, 1)), np.zeros((3, 1), int), np.ones((3, 1), bool)),
        (np.zeros(3), np.zeros(3, int), np.ones(3)),
    ],
    ids=["lengths", "rank", "judged is no bool"],
)
def test_malformed_inputs_are_refused(rewards, ids, judged):
    with pytest.raises(AssertionError):
        group_advantages(rewards, ids, judged)


def test_group_ids_may_be_names():
    advantages = group_advantages(np.array([0.0, 1.0, 1.0]), np.array(["a", "b", "a"]), np.ones(3, bool))
    np.testing.assert_allclose(advantages, [-1, 0, 1], atol=1e-5)


def test_k1_penalty_is_the_sequence_log_ratio():
    logprobs, ref_logprobs = np.array([-0.5, -1.0], np.float32), np.array([-1.0, -0.75], np.float32)
    assert k1_reward_penalty(logprobs, ref_logprobs, kl_coef=0.1) == pytest.approx(0.1 * 0.25)
