"""reasoning-gym's tasks, judged by their own scorers (an optional dependency)."""

from collections.abc import Mapping
from functools import lru_cache
from typing import Any

from sgpo_jax.rewards.extract import final_answer, has_box
from sgpo_jax.types import UserError


def score(gold: str, completion: str, metadata: Mapping[str, Any]) -> float:
    """The task's own score in [0, 1].

    metadata `task`: the data set's name there; `entry`: the row as reasoning-gym gave it. The answer is an `<answer>`
    tag's, a box's or a stated one, else the whole completion. Raises UserError where the package or task is missing.
    """
    answer = final_answer(completion, accept_stated=True)
    if answer is None and not has_box(completion):
        answer = completion.strip()
    return float(_scorer(metadata["task"])(answer, metadata["entry"]))


@lru_cache(maxsize=64)
def _scorer(task: str) -> Any:
    try:
        from reasoning_gym import get_score_answer_fn
    except ImportError:
        raise UserError("verifier `reasoning_gym` needs the package reasoning-gym: pip install reasoning-gym") from None
    try:
        return get_score_answer_fn(task)
    except ValueError:
        raise UserError(f"reasoning-gym has no task {task!r}") from None
