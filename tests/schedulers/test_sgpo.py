"""The order of what is trained: a shuffle across phases, or a lost or repeated query, must fail here."""

import json
from collections import Counter

import pytest
from helpers import make_group, make_query

from sgpo_jax.algorithms.allocation import Phase
from sgpo_jax.schedulers import SGPOScheduler
from sgpo_jax.types import Purpose

PHASES = (
    Phase("e1-g2", 1, 2, tuple(f"a{i}" for i in range(7))),
    Phase("e1-g4", 1, 4, ("a1", *(f"b{i}" for i in range(4)))),
    Phase("e1-g8", 1, 8, ("a1", "c0")),
    Phase("e2-g2", 2, 2, tuple(f"a{i}" for i in range(7))),
    Phase("e2-g4", 2, 4, ("a1", *(f"b{i}" for i in range(4)))),
)
QUERIES = {query_id: make_query(query_id) for phase in PHASES for query_id in phase.query_ids}


def make_scheduler(seed=0, prompts_per_step=3, phases=PHASES):
    return SGPOScheduler(phases, QUERIES, prompts_of_step=lambda size: prompts_per_step, seed=seed)


def one_step(scheduler):
    requests = scheduler.propose()
    groups = [make_group(r.query, [True] * r.num_samples, visit=r.visit) for r in reversed(requests)]
    return requests, scheduler.accept(groups)


def all_steps(scheduler):
    steps = []
    while not steps or not steps[-1][1].done:
        steps.append(one_step(scheduler))
    return steps


def test_phases_follow_each_other_and_visit_every_query_once():
    steps = all_steps(make_scheduler())
    assert len(steps) == make_scheduler().num_steps == 3 + 2 + 1 + 3 + 2
    order = [decision.phase for _, decision in steps]
    assert order == ["e1-g2"] * 3 + ["e1-g4"] * 2 + ["e1-g8"] + ["e2-g2"] * 3 + ["e2-g4"] * 2
    for phase in PHASES:
        of_phase = [requests for requests, decision in steps if decision.phase == phase.name]
        assert Counter(r.query.query_id for requests in of_phase for r in requests) == Counter(phase.query_ids)
        assert {r.num_samples for requests in of_phase for r in requests} == {phase.group_size}
        assert [len(requests) for requests in of_phase[:-1]] == [3] * (len(of_phase) - 1)
    ends = [decision.phase for _, decision in steps if decision.ends_phase]
    assert ends == [phase.name for phase in PHASES]
    assert all(decision.ready for _, decision in steps)


def test_trained_groups_are_in_the_proposed_order():
    for requests, decision in all_steps(make_scheduler()):
        assert [g.query.query_id for g in decision.train] == [r.query.query_id for r in requests]


def test_order_inside_a_phase_depends_on_seed_and_epoch():
    def order(seed):
        return [tuple(r.query.query_id for r in requests) for requests, _ in all_steps(make_scheduler(seed))]

    assert order(0) == order(0)
    assert order(0) != order(1)
    assert order(0)[:3] != order(0)[6:9], "epoch 2 shuffles anew"


def test_visits_count_earlier_trainings_of_the_query():
    visits = Counter()
    for requests, _ in all_steps(make_scheduler()):
        for request in requests:
            assert request.purpose is Purpose.TRAIN
            assert request.visit == visits[request.query.query_id]
            visits[request.query.query_id] += 1
    assert visits["a1"] == 5


@pytest.mark.parametrize("stop", range(1, 11))
def test_resumes_exactly_anywhere(stop):
    whole = all_steps(make_scheduler())
    first = make_scheduler()
    for _ in range(stop):
        one_step(first)
    state = json.loads(json.dumps(first.state_dict()))
    second = make_scheduler()
    second.load_state_dict(state)
    for expected_requests, expected in whole[stop:]:
        requests, decision = one_step(second)
        assert requests == expected_requests
        assert (decision.phase, decision.ends_phase, decision.done) == (
            expected.phase,
            expected.ends_phase,
            expected.done,
        )


def test_incomplete_group_is_dropped_and_counted():
    scheduler = make_scheduler()
    requests = scheduler.propose()
    groups = [make_group(r.query, [True] * r.num_samples) for r in requests]
    broken = groups[1].rollouts[0]
    object.__setattr__(broken.completion, "error", "the server is gone")
    decision = scheduler.accept(groups)
    assert [g.query.query_id for g in decision.train] == [requests[0].query.query_id, requests[2].query.query_id]
    assert decision.dropped == {"incomplete": 1}
    assert decision.ready


def test_empty_phases_are_left_out():
    scheduler = make_scheduler(phases=(Phase("e1-g2", 1, 2, ()), *PHASES[1:3]))
    assert [decision.phase for _, decision in all_steps(scheduler)] == ["e1-g4", "e1-g4", "e1-g8"]
