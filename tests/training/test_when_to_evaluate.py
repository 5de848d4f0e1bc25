from itertools import pairwise

import numpy as np
import pytest
from helpers import make_config
from hypothesis import given
from hypothesis import strategies as st

from sgpo_jax.config import EvaluateConfig
from sgpo_jax.training.loop import _is_evaluation_due
from sgpo_jax.types import UserError


def evaluated(config: EvaluateConfig, shares: list[float]) -> list[int]:
    steps = enumerate(pairwise([0.0, *shares]), start=1)
    return [
        step
        for step, (before, after) in steps
        if step < len(shares) and _is_evaluation_due(config, step, before, after)
    ]


def test_every_counts_steps():
    shares = [0.1, 0.2, 0.3, 0.9, 0.95, 1.0]
    assert evaluated(EvaluateConfig(every=2), shares) == [2, 4]
    assert evaluated(EvaluateConfig(), shares) == []


@given(times=st.integers(1, 20), num_steps=st.integers(25, 200), seed=st.integers(0, 99))
def test_times_is_their_number_whatever_the_steps(times, num_steps, seed):
    weights = np.random.default_rng(seed).uniform(0.8, 1.2, num_steps)  # no step is over a 21st of the schedule
    shares = [*(np.cumsum(weights) / weights.sum())[:-1].tolist(), 1.0]
    steps = evaluated(EvaluateConfig(times=times), shares)
    assert len(steps) == times
    for i, step in enumerate(steps, start=1):
        assert shares[step - 2] < i / (times + 1) <= shares[step - 1] or step == 1


def test_both_are_refused():
    with pytest.raises(UserError, match="every=2 and times=3 both say when"):
        make_config(evaluate={"every": 2, "times": 3})
