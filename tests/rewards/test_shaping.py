import pytest
from hypothesis import given
from hypothesis import strategies as st

from sgpo_jax.config import OverlongConfig, RewardsConfig
from sgpo_jax.rewards import overlong_penalty, reward_of
from sgpo_jax.types import Judgement, Verdict


@given(st.integers(1, 2000), st.integers(0, 2000), st.integers(0, 5000))
def test_overlong_penalty_follows_the_formula(cache: int, rest: int, length: int):
    """Against the cases of DAPO's equation 13, written out."""
    longest = cache + rest
    if length <= longest - cache:
        expected = 0.0
    elif length <= longest:
        expected = ((longest - cache) - length) / cache
    else:
        expected = -1.0
    assert overlong_penalty(length, longest, cache) == expected


def test_values_of_correct_and_wrong():
    config = RewardsConfig(correct=1.0, wrong=-1.0)
    assert reward_of(Judgement(Verdict.CORRECT, 1.0), 10, config) == 1.0
    assert reward_of(Judgement(Verdict.WRONG, 0.0), 10, config) == -1.0
    assert reward_of(Judgement(Verdict.WRONG, 0.25), 10, config) == pytest.approx(-0.5)
    assert reward_of(Judgement(Verdict.ERROR), 10, config) == 0.0


def test_the_penalty_is_added_to_the_reward_but_not_to_errors():
    config = RewardsConfig(overlong=OverlongConfig(max_tokens=3072, cache_tokens=512))
    assert reward_of(Judgement(Verdict.CORRECT, 1.0), 2560, config) == 1.0
    assert reward_of(Judgement(Verdict.CORRECT, 1.0), 2816, config) == 0.5
    assert reward_of(Judgement(Verdict.WRONG, 0.0), 4000, config) == -1.0
    assert reward_of(Judgement(Verdict.ERROR), 4000, config) == 0.0
