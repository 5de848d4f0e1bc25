"""Drive a scheduler without a model: every query has a success rate, and a group's outcomes follow from its request."""

import hashlib

import numpy as np
from helpers import make_group, make_query

from sgpo_jax.types import Purpose


def make_queries(count):
    return {f"q{i:04}": make_query(f"q{i:04}") for i in range(count)}


def answer(request, rate):
    key = f"{request.query.query_id}/{request.visit}/{request.purpose}"
    rng = np.random.default_rng(list(hashlib.sha256(key.encode()).digest()))
    outcomes = [bool(x) for x in rng.random(request.num_samples) < rate]
    return make_group(request.query, outcomes, purpose=request.purpose, visit=request.visit, length=1)


def one_step(scheduler, rate_of):
    """The requests of one step, round by round, and its decision."""
    rounds = []
    while True:
        rounds.append(list(scheduler.propose()))
        decision = scheduler.accept([answer(r, rate_of(r.query.query_id)) for r in reversed(rounds[-1])])
        if decision.ready:
            return rounds, decision
        assert not decision.done
        assert decision.train == ()


def all_steps(scheduler, rate_of):
    steps = []
    while not steps or not steps[-1][1].done:
        steps.append(one_step(scheduler, rate_of))
    return steps


def requests_of(steps, purpose=Purpose.TRAIN):
    return [r for rounds, _ in steps for requests in rounds for r in requests if r.purpose is purpose]
