import json
from collections import Counter

from driving import all_steps, answer, make_queries, one_step, requests_of
from helpers import make_config

from sgpo_jax.algorithms.allocation import ProfileRow, plan_phases
from sgpo_jax.schedulers import ReprofiledScheduler, make_scheduler
from sgpo_jax.types import GroupRequest, Purpose

QUERIES = make_queries(40)
CONFIG = make_config(sgpo={"later_epochs": "reprofiled"}, train={"prompts_per_step": 4, "epochs": 3})


def rate_of(query_id):
    return (0.0, 0.05, 0.2, 0.5, 1.0)[int(query_id[1:]) % 5]


def rows_of(visit):
    """The profile that the scheduler will be given on this visit."""
    requests = [GroupRequest(query, 8, Purpose.PROFILE, visit) for query in QUERIES.values()]
    groups = [answer(r, rate_of(r.query.query_id)) for r in requests]
    return [ProfileRow(g.query.query_id, 8, g.num_correct, g.num_tokens, 0, 0) for g in groups]


def fresh():
    return make_scheduler(CONFIG, plan_phases(rows_of(0), CONFIG.sgpo, 1, CONFIG.seed), QUERIES)


def test_each_later_epoch_follows_a_profile_of_its_own():
    assert isinstance(fresh(), ReprofiledScheduler)
    steps = all_steps(fresh(), rate_of)
    for epoch in (1, 2, 3):
        plan = plan_phases(rows_of(epoch - 1), CONFIG.sgpo, epoch, CONFIG.seed)
        phases = [phase for phase in plan.phases if phase.epoch == epoch]
        own = [step for step in steps if step[1].phase.startswith(f"e{epoch}-")]
        assert list(dict.fromkeys(d.phase for _, d in own)) == [phase.name for phase in phases]
        for phase in phases:
            trained = [g.query.query_id for _, d in own if d.phase == phase.name for g in d.train]
            assert Counter(trained) == Counter(phase.query_ids)


def test_profiles_are_asked_for_once_between_epochs_and_never_trained():
    steps = all_steps(fresh(), rate_of)
    profiled = requests_of(steps, Purpose.PROFILE)
    assert Counter((r.query.query_id, r.visit) for r in profiled) == Counter((q, v) for q in QUERIES for v in (1, 2))
    assert {r.num_samples for r in profiled} == {8}
    assert all(g.request.purpose is Purpose.TRAIN for _, d in steps for g in d.train)
    firsts = [i for i, (rounds, _) in enumerate(steps) if rounds[0][0].purpose is Purpose.PROFILE]
    assert [steps[i - 1][1].ends_phase for i in firsts] == [True, True]
    visits = Counter()
    for request in requests_of(steps):
        assert request.visit == visits[request.query.query_id]
        visits[request.query.query_id] += 1


def test_nothing_learnable_any_more_ends_training():
    scheduler = fresh()
    while (requests := scheduler.propose())[0].purpose is Purpose.TRAIN:
        scheduler.accept([answer(r, 1.0) for r in requests])
    decision = scheduler.accept([answer(r, 1.0) for r in requests])
    assert decision.done
    assert (decision.train, decision.ready, decision.progress) == ((), True, 1.0)


def test_a_restored_profile_is_the_same():
    first = fresh()
    while not requests_of([one_step(first, rate_of)], Purpose.PROFILE):
        pass
    second = fresh()
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    assert second.state_dict() == first.state_dict()
    assert second.propose() == first.propose()
