from collections import Counter

from driving import all_steps, answer, make_queries, one_step
from helpers import make_group

from sgpo_jax.algorithms.knapsack import QueryHistory, allocate_rollouts
from sgpo_jax.schedulers import KnapsackScheduler

QUERIES = make_queries(21)


def make_scheduler(queries=QUERIES, *, epochs=3, mean_group_size=8, prompts_per_step=8, seed=0):
    return KnapsackScheduler(
        queries, mean_group_size=mean_group_size, epochs=epochs, prompts_per_step=prompts_per_step, seed=seed
    )


def rate_of(query_id):
    return (0.0, 1.0, 0.1, 0.5, 0.8)[int(query_id[1:]) % 5]


def test_every_step_spends_its_budget_exactly():
    steps = all_steps(make_scheduler(), rate_of)
    assert [decision.phase for _, decision in steps] == ["e1"] * 3 + ["e2"] * 3 + ["e3"] * 3
    for rounds, decision in steps:
        (requests,) = rounds
        assert sum(r.num_samples for r in requests) == 8 * len(requests)
        assert [g.query.query_id for g in decision.train] == [r.query.query_id for r in requests]
        assert len(requests) == (5 if decision.ends_phase else 8)
        assert all(2 <= r.num_samples <= 128 for r in requests)


def test_the_first_epoch_is_uniform_and_later_ones_go_by_the_epoch_before():
    history = {}
    for rounds, decision in all_steps(make_scheduler(), rate_of):
        known = [history.get(r.query.query_id, QueryHistory(r.query.query_id, 0, 0)) for r in rounds[0]]
        sizes = {r.query.query_id: r.num_samples for r in rounds[0]}
        assert sizes == allocate_rollouts(known, 8)
        assert (set(sizes.values()) == {8}) == (decision.phase == "e1")
        assert {r.visit for r in rounds[0]} == {int(decision.phase[1]) - 1}
        for request in rounds[0]:
            group = answer(request, rate_of(request.query.query_id))
            history[request.query.query_id] = QueryHistory(request.query.query_id, group.num_correct, group.num_judged)


def test_an_epoch_visits_every_query_once():
    for epoch in (1, 2, 3):
        steps = [step for step in all_steps(make_scheduler(), rate_of) if step[1].phase == f"e{epoch}"]
        assert Counter(r.query.query_id for rounds, _ in steps for r in rounds[0]) == Counter(list(QUERIES))


def test_extremes_one_query_and_all_unsolved():
    for rate in (0.0, 1.0):
        steps = all_steps(make_scheduler(make_queries(1)), lambda _, rate=rate: rate)
        assert [r.num_samples for rounds, _ in steps for r in rounds[0]] == [8, 8, 8]
    steps = all_steps(make_scheduler(), lambda _: 0.0)
    assert {r.num_samples for rounds, _ in steps for r in rounds[0]} == {8}


def test_a_query_without_verdicts_keeps_its_history():
    scheduler = make_scheduler(make_queries(2), prompts_per_step=2)
    one_step(scheduler, lambda query_id: {"q0000": 0.5, "q0001": 1.0}[query_id])
    before = scheduler.state_dict()["history"]
    requests = scheduler.propose()
    scheduler.accept([make_group(r.query, [None] * r.num_samples, visit=r.visit) for r in requests])
    assert scheduler.state_dict()["history"] == before
    assert before["q0001"] == [8, 8]
