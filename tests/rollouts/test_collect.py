"""Judging overlaps generating, and nothing is lost between the two."""

import threading
import time
from concurrent.futures import Future

import numpy as np
from helpers import make_config, make_query

from sgpo_jax.rollouts.collect import Collector
from sgpo_jax.types import (
    Completion,
    CompletionGroup,
    FinishReason,
    GroupRequest,
    Judgement,
    Purpose,
    SamplingParams,
    Verdict,
)

SAMPLING = SamplingParams(4)


class FakeEngine:
    """Gives groups one by one, and notes how many the caller had taken when each was given."""

    def __init__(self, error_in=()):
        self.error_in = error_in
        self.given = []

    def generate(self, requests, sampling):
        for request in requests:
            self.given.append(request.query.query_id)
            completions = []
            for index in range(request.num_samples):
                is_broken = (request.query.query_id, index) in self.error_in
                ids = np.array([] if is_broken else [5, index], np.int32)
                error = "the server is gone" if is_broken else None
                completions.append(Completion(index, ids, np.zeros(len(ids), np.float32), FinishReason.STOP, 0, error))
            yield CompletionGroup(request, tuple(completions))


class FakeVerifiers:
    """Judges when told to."""

    def __init__(self):
        self.waiting: list[tuple[str, str, Future]] = []

    def submit(self, query, text):
        future: Future[Judgement] = Future()
        self.waiting.append((query.query_id, text, future))
        return future

    def judge_all(self):
        for _, text, future in self.waiting:
            future.set_result(
                Judgement(Verdict.CORRECT if text == "5 0" else Verdict.WRONG, reward=float(text == "5 0"))
            )
        self.waiting.clear()


def collector(engine, verifiers):
    return Collector(engine, verifiers, lambda ids: " ".join(map(str, ids)), make_config().rewards)


def requests(*names):
    return [GroupRequest(make_query(name), 2, Purpose.TRAIN) for name in names]


def test_generating_does_not_wait_for_verdicts():
    engine, verifiers = FakeEngine(), FakeVerifiers()
    groups = []
    thread = threading.Thread(
        target=lambda: groups.extend(collector(engine, verifiers).collect(requests("a", "b", "c"), SAMPLING))
    )
    thread.start()
    deadline = threading.Event()
    for _ in range(200):
        if len(verifiers.waiting) == 6:
            break
        deadline.wait(0.02)
    assert engine.given == ["a", "b", "c"], "all generated while nothing was judged"
    verifiers.judge_all()
    thread.join(10)
    assert [group.query.query_id for group in groups] == ["a", "b", "c"]


def test_verdict_reward_and_text_belong_to_their_completion():
    verifiers = FakeVerifiers()
    stream = collector(FakeEngine(), verifiers).collect(requests("a"), SAMPLING)
    thread = threading.Timer(0.2, verifiers.judge_all)
    thread.start()
    [group] = stream
    assert [(r.text, r.is_correct, r.reward) for r in group.rollouts] == [("5 0", True, 1.0), ("5 1", False, 0.0)]
    assert (group.num_judged, group.num_correct, group.num_tokens) == (2, 1, 4)


def test_a_completion_that_did_not_come_is_an_error_not_a_wrong_answer():
    verifiers = FakeVerifiers()
    stream = collector(FakeEngine(error_in={("a", 1)}), verifiers).collect(requests("a"), SAMPLING)
    threading.Timer(0.2, verifiers.judge_all).start()
    [group] = stream
    assert group.rollouts[1].judgement == Judgement(Verdict.ERROR, detail="the server is gone")
    assert (group.num_judged, group.num_correct, group.num_tokens) == (1, 1, 2)


def test_only_waiting_for_judgements_alone_is_timed():
    verifiers = FakeVerifiers()
    source = collector(FakeEngine(), verifiers)
    groups = source.collect(requests("a"), SAMPLING)
    threading.Timer(0.2, verifiers.judge_all).start()
    begun = time.monotonic()
    next(groups)
    waited = source.waited_s
    assert 0.1 < waited <= time.monotonic() - begun
    time.sleep(0.1)
    assert not list(groups), "what the consumer does meanwhile is no waiting"
    assert source.waited_s == waited
