"""Mathematical answers: extraction, then comparison by structure, by value, and last by math-verify."""

import re
from collections.abc import Mapping
from typing import Any

from sgpo_jax.rewards import choice, latex
from sgpo_jax.rewards.answers import parse
from sgpo_jax.rewards.compare import same
from sgpo_jax.rewards.extract import final_answer, first_math, has_box
from sgpo_jax.rewards.formulas import math_verify_agrees
from sgpo_jax.rewards.judgements import NO_ANSWER, binary
from sgpo_jax.types import Judgement

_COMMA = re.compile(r"\d,\d{3}")
_LEADING_ZERO = re.compile(r"\d,0\d\d")
_INEQUALITY = re.compile(r"[<>]|\\[lg]e(?![A-Za-z])")
MAX_ANSWER_CHARS = 1000
"""Longer answers are right only if they equal gold character by character."""


def judge(gold: str, completion: str, metadata: Mapping[str, Any], *, accept_stated: bool = False) -> Judgement:
    """The completion's last box, or if allowed its stated answer, means the same as gold (which has no box)."""
    answer = final_answer(completion, accept_stated=accept_stated)
    if not answer:
        return NO_ANSWER
    candidates = [answer]
    if not has_box(completion) and (formula := first_math(answer)):
        candidates.append(formula)  # `The answer is $5$ for all of them`
    return binary(any(same_answer(gold, candidate) for candidate in candidates), answer)


def same_answer(gold: str, answer: str) -> bool:
    r"""Whether an answer means the same as gold, both LaTeX or plain text without a box.

    Not symmetric: gold says whether a name, a unit or an order belongs to the answer.
    """
    if gold.strip() == answer.strip():
        return True
    if max(len(gold), len(answer)) > MAX_ANSWER_CHARS:
        return False
    is_same_letter = choice.same_letter(gold, answer)
    if is_same_letter is not None:
        return is_same_letter
    gold, answer = latex.clean(gold), latex.clean(answer)
    if not gold or not answer:
        return False
    if gold == answer:
        return True
    if same(parse(gold), parse(answer)):
        return True
    # A comma between digits may also separate two answers, but none that starts with 0. Both sides are read alike.
    if _COMMA.search(gold + answer) and not _LEADING_ZERO.search(gold + answer):
        return same(parse(gold, join_thousands=False), parse(answer, join_thousands=False))
    return bool(_INEQUALITY.search(gold + answer)) and math_verify_agrees(gold, answer)
