"""When a query's sampling stops: the probability by enumeration, and the rule it makes."""

import itertools
from fractions import Fraction
from math import comb

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sgpo_jax.algorithms.allocation import ProfileRow, bucket_of
from sgpo_jax.algorithms.sequential import certainty, num_samples_wanted
from sgpo_jax.config import ProfileConfig, SGPOConfig

SGPO = SGPOConfig()


def probability_of_sequence(num_correct, num_wrong):
    """Of one sequence of outcomes, its success rate being uniform: the integral of p^k (1 - p)^(n - k)."""
    return Fraction(1, (num_correct + num_wrong + 1) * comb(num_correct + num_wrong, num_correct))


@given(
    judged=st.integers(1, 5),
    correct=st.integers(0, 5),
    more=st.integers(0, 5),
    sgpo=st.sampled_from([SGPO, SGPOConfig(rounding="ceil", max_success_rate=0.5), SGPOConfig(group_sizes=(3,))]),
)
def test_certainty_is_the_share_of_all_continuations(judged, correct, more, sgpo):
    correct = min(correct, judged)
    stays = everything = Fraction(0)
    for outcomes in itertools.product([0, 1], repeat=more):
        k, n = correct + sum(outcomes), judged + more
        probability = probability_of_sequence(k, n - k)
        everything += probability
        stays += probability * (bucket_of(k, n, sgpo) == bucket_of(correct, judged, sgpo))
    assert certainty(correct, judged, more, sgpo) == stays / everything


def row(num_correct, num_samples, num_errors=0):
    return ProfileRow("q", num_samples, num_correct, 0, 0, num_errors)


def test_where_the_default_stops():
    """After 2: a success and a failure. After 4: all but one success, and none. As the configuration says."""
    profile = ProfileConfig(stages=(2, 4))
    assert num_samples_wanted(None, profile, SGPO) == 2
    wanted = {(k, n): num_samples_wanted(row(k, n), profile, SGPO) for n in (2, 4, 8) for k in range(n + 1)}
    stops = {key for key, count in wanted.items() if count == 0}
    assert stops == {(1, 2), (2, 4), (3, 4), (4, 4), *((k, 8) for k in range(9))}
    assert {wanted[0, 2], wanted[2, 2]} == {2}
    assert {wanted[0, 4], wanted[1, 4]} == {4}


def test_completions_without_verdict_are_drawn_but_say_nothing():
    profile = ProfileConfig(stages=(2, 4))
    assert num_samples_wanted(row(0, 0, num_errors=2), profile, SGPO) == 2
    assert num_samples_wanted(row(0, 0, num_errors=8), profile, SGPO) == 0
    assert num_samples_wanted(row(1, 2, num_errors=2), profile, SGPO) == 0


@pytest.mark.parametrize("errors", [0, 3])
def test_without_stages_all_are_drawn_at_once(errors):
    assert num_samples_wanted(None, ProfileConfig(), SGPO) == 8
    assert num_samples_wanted(row(0, 8 - errors, errors), ProfileConfig(), SGPO) == 0


@given(st.integers(0, 4))
def test_full_certainty_needs_everything_that_could_change_the_bucket(correct):
    profile = ProfileConfig(num_samples=16, stages=(4, 15), certainty=1.0)
    assert num_samples_wanted(row(correct, 4), profile, SGPO) == 11
    assert num_samples_wanted(row(15, 15), profile, SGPO) == 0, "15 or 16 of 16 are trivial"
