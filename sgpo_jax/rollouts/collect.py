"""From requests to judged groups: completions are judged while others are still being generated."""

import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass

from sgpo_jax.config import RewardsConfig
from sgpo_jax.rewards import VerifierPool
from sgpo_jax.rewards.shaping import reward_of
from sgpo_jax.rollouts.engine import Engine
from sgpo_jax.types import (
    Completion,
    CompletionGroup,
    GroupRequest,
    Judgement,
    Rollout,
    RolloutGroup,
    SamplingParams,
    Verdict,
)

Decode = Callable[[Sequence[int]], str]
"""Token ids -> text, special tokens left out."""


@dataclass(frozen=True, slots=True)
class _Pending:
    group: CompletionGroup
    texts: tuple[str, ...]
    judgements: tuple[Future[Judgement], ...]

    def is_judged(self) -> bool:
        return all(future.done() for future in self.judgements)


class Collector:
    """An engine and a verifier as one source of judged groups, for profiling, training and evaluation alike.

    waited_s: seconds of the newest collection in which nothing was left to do but to wait for judgements.
    """

    def __init__(self, engine: Engine, verifiers: VerifierPool, decode: Decode, rewards: RewardsConfig) -> None:
        self.engine = engine
        self._verifiers = verifiers
        self._decode = decode
        self._rewards = rewards
        self.waited_s = 0.0

    def collect(self, requests: Sequence[GroupRequest], sampling: SamplingParams) -> Iterator[RolloutGroup]:
        """Every request's group, judged, in the order in which they finish.

        A completion that the engine could not give counts as an error verdict with no tokens.
        """
        pending: deque[_Pending] = deque()
        for found in self.engine.generate(requests, sampling):
            pending.append(self._submit(found))
            while pending and pending[0].is_judged():
                yield self._judged(pending.popleft())
        self.waited_s = 0.0
        while pending:
            begun = time.monotonic()
            group = self._judged(pending.popleft())
            self.waited_s += time.monotonic() - begun
            yield group

    def _submit(self, group: CompletionGroup) -> _Pending:
        texts = tuple(self._decode(c.token_ids_C.tolist()) for c in group.completions)
        judgements = tuple(
            self._verdict(group.request, completion, text)
            for completion, text in zip(group.completions, texts, strict=True)
        )
        return _Pending(group, texts, judgements)

    def _verdict(self, request: GroupRequest, completion: Completion, text: str) -> Future[Judgement]:
        if completion.error is None:
            return self._verifiers.submit(request.query, text)
        future: Future[Judgement] = Future()
        future.set_result(Judgement(Verdict.ERROR, detail=completion.error))
        return future

    def _judged(self, pending: _Pending) -> RolloutGroup:
        rollouts = []
        for completion, text, future in zip(pending.group.completions, pending.texts, pending.judgements, strict=True):
            judgement = future.result()  # the pool bounds the wait: every judgement has a time limit
            reward = reward_of(judgement, len(completion.token_ids_C), self._rewards)
            rollouts.append(Rollout(completion, text, judgement, reward))
        return RolloutGroup(pending.group.request, tuple(rollouts))
