"""The values that cross module borders. All are frozen; none of this imports JAX (the verifier's workers import it)."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

import numpy as np


class UserError(Exception):
    """The user's input is wrong. The message is one line: what is wrong, where, and what is allowed. Exit code 2."""


class MachineError(Exception):
    """The machine or a server failed (disk full, worker lost). The message names it and the way out. Exit code 1."""


class Purpose(StrEnum):
    """What completions are asked for. Part of every sample's seed, so that no two purposes see the same noise."""

    PROFILE = "profile"
    TRAIN = "train"
    EVALUATE = "evaluate"


class FinishReason(StrEnum):
    STOP = "stop"  # the model ended with a stop token, which is part of the completion
    LENGTH = "length"  # cut at max_completion_tokens


class Verdict(StrEnum):
    CORRECT = "correct"
    WRONG = "wrong"
    ERROR = "error"  # could not be judged: not a wrong answer


@dataclass(frozen=True, slots=True)
class Query:
    """One question with a verifiable answer, ready to be sampled.

    query_id: hash of question and gold answer, stable across files and runs.
    kind: the name of the verifier that judges it ("math", "exact", "choice", ...).
    prompt: the text after the template; prompt_ids: its tokens.
    metadata: what a verifier needs beside gold (choices, tolerance, ...); JSON values only.
    """

    query_id: str
    question: str
    gold: str
    kind: str
    source: str
    prompt: str
    prompt_ids: tuple[int, ...]
    metadata: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How to draw completions. temperature 0 is greedy; top_p 1 keeps the whole distribution."""

    max_completion_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0


@dataclass(frozen=True, slots=True)
class GroupRequest:
    """Ask for num_samples completions of one query.

    visit: how often this query was asked for before with this purpose; a part of every sample's seed.
    first_sample: index of the first sample, when a group is filled up later.
    """

    query: Query
    num_samples: int
    purpose: Purpose
    visit: int = 0
    first_sample: int = 0


@dataclass(frozen=True, slots=True)
class Completion:
    """One sampled completion, unjudged.

    token_ids_C: int32 [C], the stop token included.
    sampler_logprobs_C: float32 [C], log-probabilities at the sampling temperature, before any top-p cut.
    policy_version: number of optimizer updates of the weights that produced it.
    error: why it is missing (then the arrays are empty), else None.
    """

    sample_index: int
    token_ids_C: np.ndarray
    sampler_logprobs_C: np.ndarray
    finish_reason: FinishReason
    policy_version: int
    error: str | None = None


@dataclass(frozen=True, slots=True)
class CompletionGroup:
    request: GroupRequest
    completions: tuple[Completion, ...]


@dataclass(frozen=True, slots=True)
class Judgement:
    """What the verifier says of one completion.

    reward: the verifier's score in [0, 1] (binary verifiers: 0 or 1), before reward values and shaping.
    extracted: the answer that was compared, if one was found.
    detail: the reason of an error verdict.
    """

    verdict: Verdict
    reward: float = 0.0
    extracted: str | None = None
    detail: str | None = None


@dataclass(frozen=True, slots=True)
class Rollout:
    """A judged completion. `reward` is what the advantage is made of; `judgement.verdict` is what accuracy counts."""

    completion: Completion
    text: str
    judgement: Judgement
    reward: float

    @property
    def is_correct(self) -> bool:
        return self.judgement.verdict is Verdict.CORRECT

    @property
    def is_judged(self) -> bool:
        return self.judgement.verdict is not Verdict.ERROR

    @property
    def num_tokens(self) -> int:
        return len(self.completion.token_ids_C)


@dataclass(frozen=True, slots=True)
class RolloutGroup:
    """All judged rollouts of one request."""

    request: GroupRequest
    rollouts: tuple[Rollout, ...]

    @property
    def query(self) -> Query:
        return self.request.query

    @property
    def num_tokens(self) -> int:
        """Completion tokens generated."""
        return sum(r.num_tokens for r in self.rollouts)

    @property
    def num_judged(self) -> int:
        return sum(r.is_judged for r in self.rollouts)

    @property
    def num_correct(self) -> int:
        return sum(r.is_correct for r in self.rollouts)
