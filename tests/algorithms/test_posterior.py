"""Later epochs by the posterior: sizes by the mean, triviality by numerical integration, what is left out."""

from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sgpo_jax.algorithms.allocation import ProfileRow
from sgpo_jax.algorithms.posterior import is_trivial, posterior_phases
from sgpo_jax.config import SGPOConfig


def config_of(**knobs):
    return SGPOConfig(later_epochs="posterior", **knobs)


def row(num_correct, num_samples, name="q"):
    return ProfileRow(name, num_samples, num_correct, 0, 0, 0)


def rows_of(counts):
    """`counts`: (num_correct, num_samples) -> number of queries."""
    return [row(k, n, f"q{k}of{n}-{i:02}") for (k, n), count in counts.items() for i in range(count)]


COUNTS = {(0, 8): 20, (0, 16): 20, (1, 10): 3, (4, 10): 3, (9, 10): 3, (30, 30): 3, (0, 0): 2}


@given(
    rows=st.lists(st.tuples(st.integers(0, 20), st.integers(0, 20)), min_size=1),
    sizes=st.sampled_from([(2, 4, 8), (4, 8), (3,)]),
    rounding=st.sampled_from(["floor", "ceil"]),
)
def test_every_query_is_trained_once_by_its_mean_rate(rows, sizes, rounding):
    rows = [row(min(k, n), n, f"q{i}") for i, (k, n) in enumerate(rows)]
    phases = posterior_phases(rows, config_of(later_group_sizes=sizes, rounding=rounding), 2, seed=0)
    assert [phase.group_size for phase in phases] == sorted({phase.group_size for phase in phases})
    assert sorted(q for phase in phases for q in phase.query_ids) == sorted(r.query_id for r in rows)
    by_id = {r.query_id: r for r in rows}
    for phase in phases:
        assert phase.name == f"e2-g{phase.group_size}"
        for query_id in phase.query_ids:
            inverse = 1 / Fraction(by_id[query_id].num_correct + 1, by_id[query_id].num_samples + 2)
            if rounding == "floor":
                assert phase.group_size == max([s for s in sizes if s <= inverse] or [sizes[0]])
            else:
                assert phase.group_size == min([s for s in sizes if s >= inverse] or [sizes[-1]])


def test_group_sizes_are_those_of_the_first_epoch_by_default():
    phases = posterior_phases(rows_of(COUNTS), config_of(), 3, seed=0)
    sizes = {q.split("-")[0]: phase.group_size for phase in phases for q in phase.query_ids}
    assert sizes == {"q0of8": 8, "q0of16": 8, "q1of10": 4, "q4of10": 2, "q9of10": 2, "q30of30": 2, "q0of0": 2}
    assert {phase.epoch for phase in phases} == {3}


@pytest.mark.parametrize(
    ("k", "n"), [(0, 0), (3, 3), (8, 8), (9, 10), (10, 10), (15, 20), (19, 20), (20, 20), (58, 60)]
)
@pytest.mark.parametrize("threshold", [0.5, 0.75])
def test_trivial_is_what_the_posterior_says(k, n, threshold):
    grid = (np.arange(200_000) + 0.5) / 200_000
    density = grid**k * (1 - grid) ** (n - k)
    probability = density[grid > threshold].sum() / density.sum()
    for certainty in (0.3, 0.6, 0.9, 0.95):
        config = config_of(drop_trivial_later=certainty, max_success_rate=threshold)
        assert abs(probability - certainty) > 1e-3
        assert is_trivial(row(k, n), config) == (probability >= certainty)
        assert not is_trivial(row(k, n), config_of(max_success_rate=threshold))


def test_only_what_is_trivial_for_certain_is_left_out():
    config = config_of(drop_trivial_later=0.95)
    trained = {q for phase in posterior_phases(rows_of(COUNTS), config, 2, seed=0) for q in phase.query_ids}
    assert {r.query_id for r in rows_of(COUNTS)} - trained == {f"q30of30-{i:02}" for i in range(3)}


def test_a_share_of_what_was_never_solved_is_drawn_anew_for_each_epoch():
    def unsolved(rows, epoch=2, seed=0):
        phases = posterior_phases(rows, config_of(later_unsolved_frac=0.3), epoch, seed)
        others = [q for phase in phases for q in phase.query_ids if not q.startswith(("q0of8", "q0of16"))]
        assert len(others) == sum(count for (k, n), count in COUNTS.items() if k or not n)
        return {q for phase in phases for q in phase.query_ids} - set(others)

    rows = rows_of(COUNTS)
    drawn = unsolved(rows)
    assert len(drawn) == 12  # of 40
    assert drawn == unsolved(rows[::-1])
    assert len({frozenset(drawn), frozenset(unsolved(rows, epoch=3)), frozenset(unsolved(rows, seed=1))}) == 3
