"""Calculated numbers, right within a tolerance (SciKnowEval's calculation questions)."""

import re
from collections.abc import Mapping
from typing import Any

from sgpo_jax.rewards.extract import final_answer, has_box
from sgpo_jax.rewards.judgements import NO_ANSWER, binary
from sgpo_jax.types import Judgement, UserError

DEFAULT_RELATIVE_TOLERANCE = 0.01
MAX_LAST_CHARS = 1000
_PLAIN = r"[-+]?(?:(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d*)?|\.\d+)"
_POWER = r"\s*(?:\^|\*\*)?\s*[{(]?\s*([-+]?\d{1,4})"
_TIMES = r"\s*(?:\\times|\\cdot|[x×*·])\s*"
_NUMBER = re.compile(
    rf"(?P<mantissa>{_PLAIN})(?:{_TIMES}10{_POWER}|[eE]([-+]?\d{{1,4}}))"  # 1.5e-3, 1.5 × 10^-3, 1.5 × 10⁻³
    rf"|10(?:\^|\*\*)\s*[{{(]?\s*([-+]?\d{{1,4}})"
    rf"|(?P<plain>{_PLAIN})"
)
_SUPERSCRIPTS = str.maketrans("⁰¹²³⁴⁵⁶⁷⁸⁹⁻⁺−–", "0123456789-+--")


def judge(gold: str, completion: str, metadata: Mapping[str, Any]) -> Judgement:
    """The number answered is within a tolerance of gold's.

    The answer stands in the last box, else in a stated answer, else it is the completion's last number. Units are
    ignored. metadata `relative_tolerance` (a share of gold, 0.01 by default) and `absolute_tolerance` (0): the larger
    of the two bounds counts. Raises UserError where gold holds no number.
    """
    target = first_number(gold)
    if target is None:
        raise UserError(f"the gold answer {gold!r} holds no number: verifier `numeric` cannot judge it")
    statement = final_answer(completion, accept_stated=True)
    if statement is not None:
        answer = first_number(statement)
    else:
        answer = None if has_box(completion) else next(iter(_numbers(completion[-MAX_LAST_CHARS:])[::-1]), None)
    if answer is None:
        return NO_ANSWER
    bound = max(
        abs(target) * metadata.get("relative_tolerance", DEFAULT_RELATIVE_TOLERANCE),
        metadata.get("absolute_tolerance", 0.0),
    )
    return binary(abs(answer - target) <= bound, f"{answer:g}")


def first_number(text: str) -> float | None:
    """The first number of a short text: plain, with thousands separators, 1.5e-3 or 1.5 \\times 10^{-3}."""
    return next(iter(_numbers(text[:1000])), None)


def _numbers(text: str) -> list[float]:
    text = text.translate(_SUPERSCRIPTS).replace("{,}", ",").replace("\\,", "").replace("\\!", "")
    return [_value(match) for match in _NUMBER.finditer(text)]


def _value(match: re.Match[str]) -> float:
    power = next(filter(None, match.groups()[1:-1]), "0")
    mantissa = match["plain"] or match["mantissa"] or "1"
    return float(f"{mantissa.replace(',', '')}e{int(power)}")
