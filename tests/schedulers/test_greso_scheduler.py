"""GRESO's choices before rollout, by simulation against its formulas."""

from collections import Counter

import pytest
from driving import all_steps, answer, make_queries, one_step, requests_of

from sgpo_jax.algorithms.greso import next_round_size
from sgpo_jax.config import RefillConfig
from sgpo_jax.schedulers import GRESOScheduler


def make_scheduler(queries, *, epochs=3, prompts_per_step=16, seed=0, **refill):
    options = {"max_rounds": 50, "when_short": "train", **refill}
    return GRESOScheduler(
        queries,
        group_size=8,
        epochs=epochs,
        prompts_per_step=prompts_per_step,
        refill=RefillConfig(**options),
        seed=seed,
    )


@pytest.mark.parametrize("rate", [0.0, 1.0])
def test_hopeless_and_trivial_queries_are_skipped_as_often_as_computed(rate):
    """One step an epoch, so that the rates stand still within it: 0.5 in the second epoch, 0.49 in the third."""
    count = 3000
    steps = all_steps(make_scheduler(make_queries(count), prompts_per_step=count), lambda _: rate)
    assert len(steps) == 3
    rolled_out = [len(requests_of([step])) for step in steps]
    assert rolled_out[0] == count
    # In the third epoch, z is 1 where the second one skipped the query, else 2.
    expected = [0.5, 0.5 * 0.49 + 0.5 * 0.49**2]
    for measured, share in zip(rolled_out[1:], expected, strict=True):
        assert measured / count == pytest.approx(share, abs=4 * (share * (1 - share) / count) ** 0.5)
    assert [d.dropped.get("skipped", 0) for _, d in steps] == [count - n for n in rolled_out]


def test_mixed_queries_are_never_skipped_and_every_visit_counts():
    queries = make_queries(60)
    rates = {query_id: 0.5 if i % 2 else 0.0 for i, query_id in enumerate(queries)}
    scheduler = make_scheduler(queries, prompts_per_step=8)
    steps = all_steps(scheduler, rates.__getitem__)
    seen = Counter(r.query.query_id for r in requests_of(steps))
    always = [q for q in queries if rates[q] and all(0 < answer(r, 0.5).num_correct < 8 for r in requests_of(steps))]
    assert all(seen[query_id] == 3 for query_id in always)
    for epoch in (1, 2, 3):
        own = [step for step in steps if step[1].phase == f"e{epoch}"]
        num_skipped = sum(decision.dropped.get("skipped", 0) for _, decision in own)
        assert len(requests_of(own)) + num_skipped == len(queries)
        assert num_skipped > 0 or epoch == 1
        assert max(Counter(r.query.query_id for r in requests_of(own)).values()) == 1


def test_rounds_are_sized_by_the_informative_share_of_the_round_before():
    scheduler = make_scheduler(make_queries(400), prompts_per_step=16)
    rates = {query_id: 0.5 if i % 4 == 0 else 0.0 for i, query_id in enumerate(make_queries(400))}
    rounds, decision = one_step(scheduler, rates.__getitem__)
    assert len(rounds) > 1
    kept, size = 0, 24  # the most a round may ask for, at 16 prompts a step
    for requests in rounds:
        assert len(requests) == size
        num_informative = sum(0 < answer(r, rates[r.query.query_id]).num_correct < 8 for r in requests)
        kept += num_informative
        if kept < 16:
            size = next_round_size(16 - kept, len(requests), len(requests) - num_informative, 16)
    assert decision.dropped.get("surplus", 0) == kept - 16


def test_rates_move_with_each_step_from_the_second_epoch_on():
    scheduler = make_scheduler(make_queries(200), epochs=2)
    for _, decision in iter(lambda: one_step(scheduler, lambda _: 0.5), None):
        assert scheduler.state_dict()["rates"] == [0.5, 0.5]
        if decision.ends_phase:
            break
    one_step(scheduler, lambda _: 0.5)  # all informative: exploration pays
    assert scheduler.state_dict()["rates"] == pytest.approx([0.51, 0.51])
    one_step(scheduler, lambda _: 0.0)
    assert scheduler.state_dict()["rates"] == pytest.approx([0.52, 0.50])


def test_an_epoch_of_which_everything_is_skipped_ends():
    scheduler = make_scheduler(make_queries(2), epochs=40, prompts_per_step=2)
    steps = all_steps(scheduler, lambda _: 0.0)
    assert len(steps) == 40
    assert any(rounds == [[]] for rounds, _ in steps)
