"""DAPO's refill: what is rolled out, what is kept, and that it ends."""

from collections import Counter

import pytest
from driving import all_steps, answer, make_queries, one_step, requests_of
from helpers import make_group

from sgpo_jax.config import RefillConfig
from sgpo_jax.schedulers import UniformScheduler
from sgpo_jax.types import UserError

QUERIES = make_queries(37)


def make_scheduler(queries=QUERIES, *, epochs=2, seed=0, oversample=1.0, prompts_per_step=4, **refill):
    return UniformScheduler(
        queries,
        group_size=8,
        epochs=epochs,
        prompts_per_step=prompts_per_step,
        refill=RefillConfig(**refill),
        seed=seed,
        oversample=oversample,
    )


def rate_of(query_id):
    """A third hopeless, a third trivial, a third in between."""
    return (0.0, 1.0, 0.4)[int(query_id[1:]) % 3]


@pytest.mark.parametrize("oversample", [1.0, 2.5])
def test_an_epoch_rolls_every_query_out_once(oversample):
    steps = all_steps(make_scheduler(oversample=oversample), rate_of)
    for epoch in (1, 2):
        requests = requests_of([step for step in steps if step[1].phase == f"e{epoch}"])
        assert Counter(r.query.query_id for r in requests) == Counter(list(QUERIES))
        assert {(r.num_samples, r.visit) for r in requests} == {(8, epoch - 1)}
    assert [d.phase for _, d in steps if d.ends_phase] == ["e1", "e2"]
    assert [d.phase for _, d in steps] == sorted(d.phase for _, d in steps)


@pytest.mark.parametrize("oversample", [1.0, 2.5])
def test_a_step_trains_the_first_informative_groups_and_accounts_for_all_others(oversample):
    num_surplus = 0
    for rounds, decision in all_steps(make_scheduler(oversample=oversample), rate_of):
        groups = [answer(r, rate_of(r.query.query_id)) for requests in rounds for r in requests]
        informative = [g.query.query_id for g in groups if 0 < g.num_correct < 8]
        assert [g.query.query_id for g in decision.train] == informative[:4]
        assert len(decision.train) == 4 or decision.ends_phase
        expected = {
            "all_correct": sum(g.num_correct == 8 for g in groups),
            "all_wrong": sum(g.num_correct == 0 for g in groups),
            "surplus": len(informative[4:]),
        }
        assert decision.dropped == {reason: count for reason, count in expected.items() if count}
        num_surplus += expected["surplus"]
    assert (num_surplus > 0) == (oversample > 1)


def test_a_round_asks_for_what_is_missing():
    rounds, decision = one_step(make_scheduler(), rate_of)
    missing = 4
    for requests in rounds:
        assert len(requests) == missing
        missing -= sum(0 < answer(r, rate_of(r.query.query_id)).num_correct < 8 for r in requests)
    assert missing == 0
    assert len(decision.train) == 4
    assert len(one_step(make_scheduler(oversample=2.5), rate_of)[0][0]) == 10


def test_order_depends_on_seed_and_epoch():
    def order(seed):
        return [r.query.query_id for r in requests_of(all_steps(make_scheduler(seed=seed), rate_of))]

    assert order(0) == order(0)
    assert order(0) != order(1)
    assert order(0)[:37] != order(0)[37:]


@pytest.mark.parametrize(("rate", "what"), [(0.0, "0 all correct, 12 all wrong"), (1.0, "12 all correct, 0 all wrong")])
def test_too_hard_or_too_easy_is_an_error_that_gives_the_share(rate, what):
    message = rf"refill\.max_rounds=3 rounds, 0 of 4 .* 0\.0% of 12 judged groups \({what}\)"
    with pytest.raises(UserError, match=message):
        one_step(make_scheduler(max_rounds=3), lambda _: rate)


def test_the_measured_share_counts_informative_groups():
    first = make_scheduler(oversample=2.0).propose()[0].query.query_id
    scheduler = make_scheduler(oversample=2.0, max_rounds=1)
    with pytest.raises(UserError, match=r"1 of 4 groups of the step are informative: 12\.5% of 8 judged"):
        one_step(scheduler, lambda query_id: 0.5 if query_id == first else 0.0)


@pytest.mark.parametrize("rate", [0.0, 1.0])
def test_training_on_what_there_is_ends_too(rate):
    steps = all_steps(make_scheduler(max_rounds=3, when_short="train"), lambda _: rate)
    assert all(decision.train == () and len(rounds) <= 3 for rounds, decision in steps)
    assert len(steps) == 2 * 4  # 12 queries a step, of 37
    assert len(requests_of(steps)) == 2 * 37


def test_a_short_step_in_the_middle_of_an_epoch():
    steps = all_steps(make_scheduler(max_rounds=1, when_short="train"), rate_of)
    sizes = [len(decision.train) for _, decision in steps]
    assert all(len(rounds) == 1 for rounds, _ in steps)
    assert 0 < sum(sizes) < 4 * len(steps)
    assert len(requests_of(steps)) == 2 * 37


def test_the_end_of_an_epoch_needs_no_informative_group():
    """The last of the data give nothing: a step without groups, neither an error nor queries of the next epoch."""
    steps = all_steps(make_scheduler(make_queries(3), max_rounds=1), lambda _: 0.0)
    assert [(d.train, d.phase, d.ends_phase, d.done) for _, d in steps] == [
        ((), "e1", True, False),
        ((), "e2", True, True),
    ]


def test_groups_without_rollouts_or_verdicts_are_dropped_and_refilled():
    scheduler = make_scheduler(prompts_per_step=3)
    requests = scheduler.propose()
    groups = [make_group(r.query, [True, False] * 4) for r in requests]
    object.__setattr__(groups[0].rollouts[3].completion, "error", "the server is gone")
    groups[1] = make_group(requests[1].query, [None] * 8)
    assert not scheduler.accept(groups).ready
    requests = scheduler.propose()
    assert len(requests) == 2
    decision = scheduler.accept([make_group(r.query, [True, None, None, False, *[None] * 4]) for r in requests])
    assert len(decision.train) == 3
    assert decision.dropped == {"incomplete": 1, "unjudged": 1}
