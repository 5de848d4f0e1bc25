"""What holds for every method: resuming bit for bit, an end, progress, and the order of what is trained."""

import json
from collections import Counter

import pytest
from driving import all_steps, make_queries, one_step
from helpers import make_config

from sgpo_jax.algorithms.allocation import ProfileRow, plan_phases
from sgpo_jax.schedulers import make_scheduler

QUERIES = make_queries(45)
REFILL = {"refill": {"when_short": "train", "max_rounds": 3}}
SETTINGS = {
    "sgpo": {},
    "no curriculum": {"sgpo": {"curriculum": False}},
    "uniform": {"sgpo": {"curriculum": False, "group_sizes": [8]}},
    "no filter": {"sgpo": {"max_success_rate": 1.0, "unsolved_frac": 1.0, "group_sizes": [8]}},
    "alpha 0": {"sgpo": {"unsolved_frac": 0.0}},
    "redrawn": {"sgpo": {"unsolved_frac": 0.5, "unsolved_subset": "per_epoch"}},
    "reprofiled": {"sgpo": {"later_epochs": "reprofiled"}},
    "posterior": {"sgpo": {"later_epochs": "posterior", "later_group_sizes": [4, 8], "unsolved_from_epoch": 2}},
    "posterior, dropping": {
        "sgpo": {
            "later_epochs": "posterior",
            "later_unsolved_frac": 0.5,
            "drop_trivial_later": 0.9,
            "curriculum": False,
        }
    },
    "equal rollouts": {"train": {"rollouts_per_step": 16}},
    "dapo": {"method": "dapo", **REFILL},
    "dapo, G = 2": {"method": "dapo", "dapo": {"group_size": 2, "oversample": 1.5}, **REFILL},
    "greso": {"method": "greso", **REFILL},
    "knapsack": {"method": "knapsack"},
    "just in time": {"method": "just_in_time", "just_in_time": {"chunk_queries": 20}, **REFILL},
    "just in time, G = 4": {"method": "just_in_time", "just_in_time": {"chunk_queries": 7, "group_size": 4}, **REFILL},
}


def rate_of(query_id):
    return (0.0, 0.05, 0.2, 0.5, 1.0)[int(query_id[1:]) % 5]


def fresh(name, seed=0):
    settings = dict(SETTINGS[name])
    train = {
        "prompts_per_step": 4,
        "epochs": 2,
        "method": settings.pop("method", "sgpo"),
        **settings.pop("train", {}),
    }
    config = make_config(train=train, seed=seed, **settings)
    rows = [ProfileRow(q, 20, round(20 * rate_of(q)), 0, 0, 0) for q in QUERIES]
    epochs = 2 if config.sgpo.later_epochs == "stale" else 1
    return make_scheduler(config, plan_phases(rows, config.sgpo, epochs, seed), QUERIES, rows)


def summary(steps):
    return [
        (rounds, [g.query.query_id for g in d.train], d.phase, d.ends_phase, d.done, d.progress, d.dropped)
        for rounds, d in steps
    ]


@pytest.mark.parametrize("name", SETTINGS)
def test_resumes_bit_for_bit_at_every_step(name):
    whole = summary(all_steps(fresh(name), rate_of))
    running = fresh(name)
    for stop in range(1, len(whole)):
        one_step(running, rate_of)
        state = json.loads(json.dumps(running.state_dict()))
        resumed = fresh(name)
        resumed.load_state_dict(state)
        assert resumed.state_dict() == state
        steps = [one_step(resumed, rate_of) for _ in range(min(3, len(whole) - stop))]
        assert summary(steps) == whole[stop : stop + len(steps)]


@pytest.mark.parametrize("name", SETTINGS)
def test_progress_rises_to_one_and_nothing_is_sampled_twice(name):
    scheduler = fresh(name)
    steps = all_steps(scheduler, rate_of)
    progress = [decision.progress for _, decision in steps]
    assert progress == sorted(progress)
    assert progress[0] > 0
    assert progress[-1] == pytest.approx(1.0)
    assert [d.done for _, d in steps] == [False] * (len(steps) - 1) + [True]
    assert scheduler.num_steps in (None, len(steps))
    asked = Counter((r.query.query_id, r.purpose, r.visit) for rounds, _ in steps for rs in rounds for r in rs)
    assert max(asked.values()) == 1
    assert summary(steps) == summary(all_steps(fresh(name), rate_of))
    assert summary(steps) != summary(all_steps(fresh(name, seed=1), rate_of))


def trained(steps):
    """(epoch, group size) of every trained group, in the order of training."""
    return [(int(d.phase[1]), len(g.rollouts)) for _, d in steps for g in d.train]


def test_order_of_training_of_sgpo_and_its_ablations():
    """A shuffle across phases, or a curriculum where there must be none, fails here."""
    for name in ("sgpo", "alpha 0", "redrawn", "reprofiled", "posterior", "equal rollouts"):
        order = trained(all_steps(fresh(name), rate_of))
        assert order == sorted(order), name
        assert {size for _, size in order} == {2, 4, 8}
    for _, decision in all_steps(fresh("sgpo"), rate_of):
        assert len({len(g.rollouts) for g in decision.train}) == 1
    order = trained(all_steps(fresh("no curriculum"), rate_of))
    assert [epoch for epoch, _ in order] == sorted(epoch for epoch, _ in order)
    assert order != sorted(order)
    assert Counter(order) == Counter(trained(all_steps(fresh("sgpo"), rate_of)))
    mixed = [{len(g.rollouts) for g in d.train} for _, d in all_steps(fresh("no curriculum"), rate_of)]
    assert any(len(sizes) > 1 for sizes in mixed), "a step mixes group sizes"


def test_what_the_ablations_train_on():
    def queries_of(name):
        return Counter(g.query.query_id for _, d in all_steps(fresh(name), rate_of) for g in d.train)

    learnable = {q for q in QUERIES if 0 < rate_of(q) < 1}
    assert queries_of("alpha 0") == Counter(dict.fromkeys(learnable, 2))
    assert queries_of("no filter") == Counter(dict.fromkeys(QUERIES, 2))
    uniform = queries_of("uniform")
    assert uniform.keys() >= learnable
    assert set(uniform.values()) == {2}
    assert len(uniform) == len(learnable) + 1  # a tenth of nine unsolved
    assert {size for _, size in trained(all_steps(fresh("uniform"), rate_of))} == {8}


@pytest.mark.parametrize("name", ["sgpo", "no curriculum", "reprofiled", "dapo", "greso", "knapsack", "just in time"])
def test_steps_of_equal_rollouts(name, monkeypatch):
    """Whatever the group size, or in the mean where a step mixes several; but for the last step of a phase."""
    budget = 4 if name == "just in time" else 16
    monkeypatch.setitem(SETTINGS, "equal", {**SETTINGS[name], "train": {"rollouts_per_step": budget}})
    steps = [d for _, d in all_steps(fresh("equal"), rate_of) if not d.ends_phase]
    sizes = [sum(len(g.rollouts) for g in d.train) for d in steps]
    assert len(sizes) > 2
    if name == "no curriculum":
        assert min(sizes) < 16 < max(sizes)
        assert sum(sizes) / len(sizes) == pytest.approx(16, abs=4)
    else:
        assert set(sizes) <= ({budget} if name not in ("dapo", "greso") else {0, 8, 16})
