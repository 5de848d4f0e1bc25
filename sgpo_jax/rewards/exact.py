"""Answers that must equal the gold answer character by character."""

from collections.abc import Mapping
from typing import Any

from sgpo_jax.rewards.extract import last_boxed
from sgpo_jax.rewards.judgements import NO_ANSWER, binary
from sgpo_jax.types import Judgement


def judge(gold: str, completion: str, metadata: Mapping[str, Any]) -> Judgement:
    """The whole completion, stripped, equals gold.

    metadata `boxed`: true where the answer is the last box's content, compared without white space.
    metadata `answer_after`: only what follows the last such marker counts; without it there is no answer.
    metadata `answer_end`: the answer must end with this marker, which is not part of it.
    """
    if metadata.get("boxed"):
        boxed = last_boxed(completion)
        return NO_ANSWER if boxed is None else binary("".join(boxed.split()) == "".join(gold.split()), boxed)
    answer = completion
    if marker := metadata.get("answer_after"):
        _, found, answer = completion.rpartition(marker)
        if not found:
            return NO_ANSWER
    if end := metadata.get("answer_end"):
        answer = answer.rstrip()
        if not answer.endswith(end):
            return NO_ANSWER
        answer = answer.removesuffix(end)
    answer = answer.strip()
    return binary(answer == gold.strip(), answer)
