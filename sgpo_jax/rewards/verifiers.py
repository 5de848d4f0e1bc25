"""The table of verifiers: what a query's `kind` names, and custom ones given as `module:function`."""

import difflib
import importlib
import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Protocol

from sgpo_jax.config import RewardsConfig
from sgpo_jax.rewards import choice, exact, math_answers, numeric, reasoning_gym
from sgpo_jax.types import Judgement, UserError, Verdict


class Verifier(Protocol):
    """Judges one completion. `metadata` is the query's: JSON values that this kind of verifier needs beside `gold`."""

    def __call__(self, gold: str, completion: str, metadata: Mapping[str, Any]) -> Judgement: ...


class CustomReward(Protocol):
    """What `module:function` names: a Judgement, a bool, or a score in [0, 1] that correct_threshold cuts."""

    def __call__(self, gold: str, completion: str, metadata: Mapping[str, Any]) -> Judgement | bool | float: ...


_BUILT_IN: dict[str, Callable[[RewardsConfig], Verifier]] = {
    "math": lambda config: partial(math_answers.judge, accept_stated=config.accept_stated_answer),
    "exact": lambda config: exact.judge,
    "choice": lambda config: choice.judge,
    "numeric": lambda config: numeric.judge,
    "reasoning_gym": lambda config: _graded(reasoning_gym.score, config.correct_threshold),
}


def resolve_verifier(kind: str, config: RewardsConfig | None = None) -> Verifier:
    """The verifier that `kind` names.

    Raises UserError naming the nearest known kind, or saying why a custom one cannot be imported.
    """
    config = config or RewardsConfig()
    if kind in _BUILT_IN:
        return _BUILT_IN[kind](config)
    if ":" in kind:
        return _graded(_import_function(kind), config.correct_threshold)
    nearest = difflib.get_close_matches(kind, _BUILT_IN, n=1)
    hint = f"did you mean {nearest[0]}?" if nearest else f"known are {', '.join(_BUILT_IN)}, or module:function"
    raise UserError(f"no verifier is called {kind!r}: {hint}")


def _import_function(kind: str) -> CustomReward:
    module_name, _, function_name = kind.partition(":")
    try:
        function = getattr(importlib.import_module(module_name), function_name)
    except (ImportError, AttributeError, ValueError) as error:
        raise UserError(f"the verifier {kind!r} cannot be imported: {error}") from None
    if not callable(function):
        raise UserError(f"the verifier {kind!r} is no function")
    return function


def _graded(function: CustomReward, threshold: float) -> Verifier:
    """Make a Verifier of a function that may return a Judgement, a bool or a score."""

    def judge(gold: str, completion: str, metadata: Mapping[str, Any]) -> Judgement:
        result = function(gold, completion, metadata)
        if isinstance(result, Judgement):
            return result
        if not isinstance(result, (bool, int, float)) or not 0 <= result <= 1:  # NaN fails the comparison too
            raise ValueError(f"a reward function must return a Judgement, a bool or a score in [0, 1], not {result!r}")
        score = float(result)
        is_correct = score >= threshold or math.isclose(score, threshold)
        return Judgement(Verdict.CORRECT if is_correct else Verdict.WRONG, reward=score)

    return judge
