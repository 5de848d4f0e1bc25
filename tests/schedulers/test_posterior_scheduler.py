"""Later epochs planned from the profile and everything that training brought."""

import json
from collections import Counter

import numpy as np
from driving import all_steps, answer, make_queries, one_step, requests_of
from helpers import make_config, make_group

from sgpo_jax.algorithms.allocation import ProfileRow, plan_phases
from sgpo_jax.algorithms.posterior import posterior_phases
from sgpo_jax.schedulers import PosteriorScheduler, make_scheduler
from sgpo_jax.types import Purpose

QUERIES = make_queries(40)
ROWS = [ProfileRow(q, 8, k % 9, 8, 0, 0) for k, q in enumerate(QUERIES)]


def rate_of(query_id):
    return (0.0, 0.05, 0.2, 0.5, 1.0)[int(query_id[1:]) % 5]


def config_of(**knobs):
    knobs = {"later_epochs": "posterior", "later_group_sizes": [4, 8], "unsolved_from_epoch": 2, **knobs}
    return make_config(sgpo=knobs, train={"prompts_per_step": 4, "epochs": 3})


def fresh(config=None):
    config = config or config_of()
    return make_scheduler(config, plan_phases(ROWS, config.sgpo, 1, config.seed), QUERIES, ROWS)


def test_each_later_epoch_follows_all_that_was_seen_before_it():
    assert isinstance(fresh(), PosteriorScheduler)
    steps, config = all_steps(fresh(), rate_of), config_of()
    known = {row.query_id: np.array([row.num_correct, row.num_samples]) for row in ROWS}
    for epoch in (1, 2, 3):
        own = [step for step in steps if step[1].phase.startswith(f"e{epoch}-")]
        rows = [ProfileRow(q, int(n), int(k), 0, 0, 0) for q, (k, n) in known.items()]
        first = plan_phases(ROWS, config.sgpo, 1, config.seed).phases
        phases = first if epoch == 1 else posterior_phases(rows, config.sgpo, epoch, config.seed)
        assert list(dict.fromkeys(d.phase for _, d in own)) == [phase.name for phase in phases]
        for phase in phases:
            trained = [g for _, d in own if d.phase == phase.name for g in d.train]
            assert Counter(g.query.query_id for g in trained) == Counter(phase.query_ids)
            assert {len(g.rollouts) for g in trained} == {phase.group_size}
        for request in requests_of(own):
            group = answer(request, rate_of(request.query.query_id))
            known[request.query.query_id] += [group.num_correct, group.num_judged]
        if epoch > 1:
            assert {q for phase in phases for q in phase.query_ids} == set(QUERIES), "nothing is dropped"
    assert {int(d.phase[-1]) for _, d in steps if d.phase[1] != "1"} == {4, 8}
    assert requests_of(steps, Purpose.PROFILE) == []


def test_no_unsolved_query_before_its_epoch():
    late = config_of(unsolved_frac=1.0)
    first = [d for _, d in all_steps(fresh(late), rate_of) if d.phase.startswith("e1")]
    unsolved = {row.query_id for row in ROWS if not row.num_correct}
    assert not {g.query.query_id for d in first for g in d.train} & unsolved
    early = config_of(unsolved_frac=1.0, unsolved_from_epoch=1)
    with_them = [d for _, d in all_steps(fresh(early), rate_of)]
    assert {g.query.query_id for d in with_them if d.phase == "e1-g2" for g in d.train} >= unsolved


def test_rollouts_without_verdict_say_nothing():
    scheduler = fresh()
    requests = scheduler.propose()
    before = {row["query_id"]: row for row in scheduler.state_dict()["rows"]}
    scheduler.accept([make_group(r.query, [True, *[None] * (r.num_samples - 1)]) for r in requests])
    after = {row["query_id"]: row for row in scheduler.state_dict()["rows"]}
    for request in requests:
        old, new = before[request.query.query_id], after[request.query.query_id]
        assert (new["num_samples"], new["num_correct"]) == (old["num_samples"] + 1, old["num_correct"] + 1)


def test_nothing_left_to_train_on_ends_training():
    scheduler = fresh(config_of(drop_trivial_later=0.0, later_unsolved_frac=0.0))
    steps = all_steps(scheduler, rate_of)
    assert {d.phase[:2] for _, d in steps} == {"e1"}
    assert (steps[-1][1].done, steps[-1][1].progress) == (True, 1.0)
    assert steps[-1][1].train


def test_what_is_known_survives_a_restart():
    first = fresh()
    while not one_step(first, rate_of)[1].phase.startswith("e3"):
        pass
    second = fresh()
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    assert second.state_dict() == first.state_dict()
    assert [d.phase for _, d in all_steps(second, rate_of)] == [d.phase for _, d in all_steps(first, rate_of)]
