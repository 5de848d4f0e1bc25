"""Just-in-time profiling: what is probed, kept, carried over, filled up and reused, and that it ends."""

import json
from collections import Counter

import numpy as np
import pytest
from driving import all_steps, answer, make_queries, one_step, requests_of
from helpers import make_group

from sgpo_jax.config import JustInTimeConfig, RefillConfig
from sgpo_jax.schedulers import JustInTimeScheduler, reused
from sgpo_jax.schedulers.carried import group_from_json, group_to_json
from sgpo_jax.types import Purpose, UserError

QUERIES = make_queries(50)


def make_scheduler(queries=QUERIES, *, epochs=2, prompts_per_step=3, seed=0, chunk=16, samples=2, size=2, **refill):
    return JustInTimeScheduler(
        queries,
        JustInTimeConfig(chunk_queries=chunk, num_samples=samples, group_size=size),
        epochs=epochs,
        prompts_per_step=prompts_per_step,
        refill=RefillConfig(**refill),
        seed=seed,
    )


def rate_of(query_id):
    """A third hopeless, a third trivial, a third in between."""
    return (0.0, 1.0, 0.4)[int(query_id[1:]) % 3]


def probes_of(steps):
    return requests_of(steps, Purpose.PROFILE)


@pytest.mark.parametrize("size", [2, 5])
def test_an_epoch_probes_every_query_once_in_chunks(size):
    steps = all_steps(make_scheduler(size=size), rate_of)
    assert Counter((r.query.query_id, r.visit) for r in probes_of(steps)) == Counter(
        (q, visit) for q in QUERIES for visit in (0, 1)
    )
    assert {(r.num_samples, r.first_sample) for r in probes_of(steps)} == {(2, 0)}
    chunks = [rs for rounds, _ in steps for rs in rounds if rs and rs[0].purpose is Purpose.PROFILE]
    assert [len(chunk) for chunk in chunks] == [16, 16, 16, 2] * 2
    assert [d.phase for _, d in steps] == sorted(d.phase for _, d in steps)
    assert [d.phase for _, d in steps if d.ends_phase] == ["e1", "e2"]


@pytest.mark.parametrize(("samples", "size"), [(2, 2), (3, 3), (2, 5), (3, 4)])
def test_trained_are_the_informative_probes_in_the_order_of_probing(samples, size):
    steps = all_steps(make_scheduler(samples=samples, size=size), rate_of)
    probes = {(r.query.query_id, r.visit): answer(r, rate_of(r.query.query_id)) for r in probes_of(steps)}
    expected = [key for key, probe in probes.items() if 0 < probe.num_correct < samples]
    trained = [(g.query.query_id, g.request.visit) for _, d in steps for g in d.train]
    assert trained == expected
    for rounds, decision in steps:
        assert len(decision.train) == 3 or decision.ends_phase
        fills = [r for requests in rounds for r in requests if r.purpose is Purpose.TRAIN]
        wanted = [(g.query.query_id, size - samples, samples, g.request.visit) for g in decision.train]
        assert [(r.query.query_id, r.num_samples, r.first_sample, r.visit) for r in fills] == (
            wanted if size > samples else []
        )
        for group in decision.train:
            assert len(group.rollouts) == size
            probe = probes[group.query.query_id, group.request.visit]
            assert [r.is_correct for r in reused(group)] == [r.is_correct for r in probe.rollouts]


def test_every_probe_is_trained_or_counted_as_dropped():
    steps = all_steps(make_scheduler(), rate_of)
    dropped = Counter()
    for _, decision in steps:
        dropped.update(decision.dropped)
    outcomes = Counter(answer(r, rate_of(r.query.query_id)).num_correct for r in probes_of(steps))
    assert dropped == {"all_correct": outcomes[2], "all_wrong": outcomes[0]}
    assert sum(len(d.train) for _, d in steps) == outcomes[1]


def test_a_chunk_is_probed_only_where_too_few_are_left():
    scheduler = make_scheduler(prompts_per_step=2, chunk=10)
    waiting = 0
    for rounds, decision in all_steps(scheduler, rate_of):
        for requests in rounds:
            if requests:
                assert waiting < 2
                waiting += sum(answer(r, rate_of(r.query.query_id)).num_correct == 1 for r in requests)
            else:
                assert waiting >= 2 or decision.ends_phase
        waiting -= len(decision.train)
    assert waiting == 0


def test_progress_is_that_of_the_trained_queries():
    steps = all_steps(make_scheduler(), rate_of)
    order = [(r.query.query_id, r.visit) for r in probes_of(steps)]
    for _, decision in steps:
        if not decision.ends_phase:
            last = decision.train[-1]
            assert decision.progress == (order.index((last.query.query_id, last.request.visit)) + 1) / 100
    assert [d.progress for _, d in steps if d.ends_phase] == [0.5, 1.0]


def test_no_noise_is_shared_between_a_probe_and_its_fill():
    asked = Counter()
    for request in (r for p in Purpose for r in requests_of(all_steps(make_scheduler(size=4), rate_of), p)):
        for index in range(request.first_sample, request.first_sample + request.num_samples):
            asked[request.query.query_id, request.visit, request.purpose, index] += 1
    assert max(asked.values()) == 1


@pytest.mark.parametrize(("rate", "what"), [(0.0, "0 all correct, 48 all wrong"), (1.0, "48 all correct, 0 all wrong")])
def test_nothing_informative_is_an_error_or_a_step_without_groups(rate, what):
    message = rf"refill\.max_rounds=3 chunks, 0 of 3 .* 0\.0% of 48 judged probes \({what}\)"
    with pytest.raises(UserError, match=message):
        one_step(make_scheduler(max_rounds=3), lambda _: rate)
    steps = all_steps(make_scheduler(max_rounds=3, when_short="train", size=4), lambda _: rate)
    assert [(d.train, d.phase, d.ends_phase, d.progress) for _, d in steps] == [
        ((), "e1", False, 0.48),
        ((), "e1", True, 0.5),
        ((), "e2", False, 0.98),
        ((), "e2", True, 1.0),
    ]


def test_the_end_of_an_epoch_is_no_shortage():
    steps = all_steps(make_scheduler(make_queries(5), max_rounds=1), lambda _: 0.0)
    assert [(d.train, d.ends_phase, d.done) for _, d in steps] == [((), True, False), ((), True, True)]


def test_incomplete_and_unjudged_groups_are_dropped():
    scheduler = make_scheduler(make_queries(4), prompts_per_step=4, epochs=1, size=3)
    probes = [
        make_group(r.query, outcomes, purpose=Purpose.PROFILE)
        for r, outcomes in zip(
            scheduler.propose(), [[True, False], [None, None], [False, True], [True, False]], strict=True
        )
    ]
    object.__setattr__(probes[0].rollouts[1].completion, "error", "the server is gone")
    assert not scheduler.accept(probes).ready
    fills = [make_group(r.query, [None]) for r in scheduler.propose()]
    assert [f.query.query_id for f in fills] == [p.query.query_id for p in probes[2:]]
    object.__setattr__(fills[1].rollouts[0].completion, "error", "the server is gone")
    decision = scheduler.accept(fills)
    assert [g.query.query_id for g in decision.train] == [probes[2].query.query_id]
    assert [r.is_judged for r in decision.train[0].rollouts] == [True, True, False]
    assert decision.dropped == {"incomplete": 2, "unjudged": 1}
    assert decision.done


def assert_same_groups(left, right):
    assert len(left) == len(right)
    for a, b in zip(left, right, strict=True):
        assert a.request == b.request
        for x, y in zip(a.rollouts, b.rollouts, strict=True):
            assert (x.text, x.judgement, x.reward) == (y.text, y.judgement, y.reward)
            for name in ("sample_index", "finish_reason", "policy_version", "error"):
                assert getattr(x.completion, name) == getattr(y.completion, name)
            for name in ("token_ids_C", "sampler_logprobs_C"):
                one, other = getattr(x.completion, name), getattr(y.completion, name)
                assert one.dtype == other.dtype
                np.testing.assert_array_equal(one, other)


def test_groups_survive_json_bit_for_bit():
    group = make_group(QUERIES["q0003"], [True, None, False], purpose=Purpose.PROFILE, visit=4, length=40)
    tree = json.loads(json.dumps(group_to_json(group), allow_nan=False))
    assert_same_groups([group_from_json(tree, QUERIES)], [group])


@pytest.mark.parametrize("size", [2, 4])
def test_carried_groups_are_the_same_after_a_restart(size):
    whole = all_steps(make_scheduler(size=size, chunk=25), rate_of)
    running, num_carried = make_scheduler(size=size, chunk=25), 0
    for expected in whole:
        state = json.loads(json.dumps(running.state_dict()))
        num_carried += len(state["kept"])
        running = make_scheduler(size=size, chunk=25)
        running.load_state_dict(state)
        rounds, decision = one_step(running, rate_of)
        assert rounds == expected[0]
        assert_same_groups(decision.train, expected[1].train)
    assert num_carried > 5
