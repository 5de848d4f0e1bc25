import itertools
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sgpo_jax.algorithms.allocation import Excluded, ProfileRow, allocate, bucket_of, draw_unsolved, plan_phases
from sgpo_jax.config import SGPOConfig
from sgpo_jax.types import UserError

CONFIG = SGPOConfig()


def row(query_id, num_correct, num_samples=8):
    return ProfileRow(query_id, num_samples, num_correct, num_tokens=100, num_truncated=0, num_errors=8 - num_samples)


def profile(counts):
    """`counts`: num_correct -> number of queries."""
    return [row(f"q{k}-{index:04d}", k) for k, count in counts.items() for index in range(count)]


@pytest.mark.parametrize(
    ("rounding", "expected"),
    [
        ("floor", ["unsolved", 8, 4, 2, 2, 2, 2, "trivial", "trivial"]),
        ("ceil", ["unsolved", 8, 4, 4, 2, 2, 2, "trivial", "trivial"]),
    ],
)
def test_buckets_of_the_paper(rounding, expected):
    config = SGPOConfig(rounding=rounding)
    assert [bucket_of(k, 8, config) for k in range(9)] == expected


@given(
    num_judged=st.integers(1, 40),
    correct=st.integers(0, 40),
    sizes=st.sets(st.integers(2, 40), min_size=1, max_size=5),
    rounding=st.sampled_from(["floor", "ceil"]),
    threshold=st.sampled_from(["0", "0.3", "0.5", "0.7", "0.75", "1"]),
)
def test_buckets_equal_the_definition(num_judged, correct, sizes, rounding, threshold):
    num_correct = min(correct, num_judged)
    config = SGPOConfig(
        group_sizes=tuple(sorted(sizes)), rounding=rounding, max_success_rate=float(threshold), unsolved_frac=0.1
    )
    bucket = bucket_of(num_correct, num_judged, config)
    rate = Fraction(num_correct, num_judged)
    if rate == 0:
        assert bucket is Excluded.UNSOLVED
    elif rate > Fraction(threshold):
        assert bucket is Excluded.TRIVIAL
    elif rounding == "floor":
        assert bucket == max([size for size in sizes if size <= 1 / rate] or [min(sizes)])
    else:
        assert bucket == min([size for size in sizes if size >= 1 / rate] or [max(sizes)])


def test_thresholds_are_decimal():
    """7 of 10 is not above 0.7, although the binary number nearest to 0.7 is smaller."""
    assert bucket_of(7, 10, SGPOConfig(max_success_rate=0.7)) == 2
    assert bucket_of(8, 10, SGPOConfig(max_success_rate=0.7)) is Excluded.TRIVIAL


def test_unjudged_is_not_unsolved():
    assert bucket_of(0, 0, CONFIG) is Excluded.UNJUDGED
    assert bucket_of(3, 4, CONFIG) == 2  # 3 of 4 judged, whatever the number of errors


def test_allocation_holds_every_query_once():
    rows = [*profile({0: 3, 1: 2, 2: 1, 3: 1, 6: 1, 7: 1, 8: 2}), row("zz", 0, num_samples=0)]
    allocation = allocate(rows, CONFIG)
    assert list(allocation.learnable) == [2, 4, 8]
    assert allocation.learnable == {2: ("q3-0000", "q6-0000"), 4: ("q2-0000",), 8: ("q1-0000", "q1-0001")}
    assert allocation.trivial == ("q7-0000", "q8-0000", "q8-0001")
    assert allocation.unsolved == ("q0-0000", "q0-0001", "q0-0002")
    assert allocation.unjudged == ("zz",)


COUNTS = {0: 50, 1: 6, 2: 5, 3: 4, 4: 3, 7: 2, 8: 2}


def test_phases_are_the_curriculum():
    plan = plan_phases(profile(COUNTS), CONFIG, epochs=2, seed=0)
    assert [phase.name for phase in plan.phases] == ["e1-g2", "e1-g4", "e1-g8", "e2-g2", "e2-g4", "e2-g8"]
    assert [(phase.epoch, phase.group_size) for phase in plan.phases] == list(itertools.product([1, 2], [2, 4, 8]))
    learnable = allocate(profile(COUNTS), CONFIG).learnable
    for phase in plan.phases:
        unsolved = [query_id for query_id in phase.query_ids if query_id.startswith("q0")]
        assert len(unsolved) == len(set(unsolved)) == 5  # a tenth of 50
        assert sorted(unsolved + list(learnable[phase.group_size])) == list(phase.query_ids)


@given(
    counts=st.dictionaries(st.integers(0, 8), st.integers(0, 30)),
    frac=st.sampled_from([0.0, 0.1, 0.25, 1.0]),
    subset=st.sampled_from(["fixed", "per_epoch"]),
    epochs=st.integers(1, 3),
    order=st.randoms(),
)
def test_a_plan_accounts_for_every_query(counts, frac, subset, epochs, order):
    config = SGPOConfig(unsolved_frac=frac, unsolved_subset=subset)
    rows = [*profile(counts), row("unjudged", 0, num_samples=0)]
    plan = plan_phases(rows, config, epochs, seed=7)
    trained = {query_id for phase in plan.phases for query_id in phase.query_ids}
    dropped = plan.dropped.trivial + plan.dropped.unsolved + plan.dropped.unjudged
    assert sorted([*trained, *dropped]) == sorted(row.query_id for row in rows)
    shuffled = list(rows)
    order.shuffle(shuffled)
    assert plan_phases(shuffled, config, epochs, seed=7) == plan


def drawn(phase):
    return {query_id for query_id in phase.query_ids if query_id.startswith("q0")}


def test_unsolved_queries_are_drawn_for_each_phase():
    fixed = plan_phases(profile(COUNTS), CONFIG, epochs=2, seed=0).phases
    assert [drawn(phase) for phase in fixed[:3]] == [drawn(phase) for phase in fixed[3:]]
    assert len({frozenset(drawn(phase)) for phase in fixed[:3]}) == 3
    anew = plan_phases(profile(COUNTS), SGPOConfig(unsolved_subset="per_epoch"), epochs=2, seed=0).phases
    assert len({frozenset(drawn(phase)) for phase in anew}) == 6
    other_seed = plan_phases(profile(COUNTS), CONFIG, epochs=1, seed=1).phases
    assert drawn(other_seed[0]) != drawn(fixed[0])


def test_draws_are_uniform():
    unsolved = tuple("abcdefghij")
    config = SGPOConfig(unsolved_frac=0.3)
    draws = [draw_unsolved(unsolved, config, 1, 2, seed) for seed in range(3000)]
    assert all(len(set(draw)) == 3 for draw in draws)
    for query_id in unsolved:  # 900 ± 25 expected of each
        assert 775 < sum(query_id in draw for draw in draws) < 1025


@pytest.mark.parametrize(("num_unsolved", "num_drawn"), [(0, 0), (4, 0), (5, 0), (6, 1), (14, 1), (15, 2), (5060, 506)])
def test_how_many_are_drawn(num_unsolved, num_drawn):
    unsolved = tuple(map(str, range(num_unsolved)))
    assert len(draw_unsolved(unsolved, CONFIG, 1, 2, seed=0)) == num_drawn


def test_a_size_without_learnable_queries_has_no_phase():
    plan = plan_phases(profile({0: 10, 2: 1, 7: 1}), CONFIG, epochs=1, seed=0)
    assert [phase.name for phase in plan.phases] == ["e1-g4"]
    nothing = plan_phases(profile({0: 10}), CONFIG, epochs=1, seed=0)
    assert nothing.phases == ()
    assert len(nothing.dropped.unsolved) == 10


def test_bad_profiles_are_refused():
    with pytest.raises(UserError, match="query a has more than one line"):
        allocate([row("a", 1), row("b", 1), row("a", 2)], CONFIG)
    for num_correct in (-1, 9):
        with pytest.raises(UserError, match=f"query a: num_correct={num_correct} is not in 0 .. num_samples=8"):
            row("a", num_correct)
