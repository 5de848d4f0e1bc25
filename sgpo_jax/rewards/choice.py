"""Multiple choice: the letter, in all the ways models write it, or the option's own words."""

import re
import unicodedata
from collections.abc import Mapping
from typing import Any

from sgpo_jax.rewards.extract import final_answer, has_box
from sgpo_jax.rewards.judgements import NO_ANSWER, binary
from sgpo_jax.types import Judgement

MAX_ANSWER_CHARS = 2000
_LETTER = r"[A-J]"
_WRAPPED = re.compile(
    rf"(?:(?:the\s+)?(?:correct\s+)?(?:option|choice|answer)s?\s*(?:is|:)?\s*)?"
    rf"[(\[]?\s*(?P<letter>{_LETTER})\s*[)\]]?\s*(?:[.:,;)、-].*)?",
    re.IGNORECASE | re.DOTALL,
)
_CHOSEN = re.compile(
    rf"\b(?:option|choice|choose|select|pick)\b\s*(?:is|:)?\s*[(\[]?(?P<before>{_LETTER})\b"
    rf"|[(\[]?\b(?P<after>{_LETTER})[)\]]?\s+is\s+(?:the\s+)?(?:correct|right|true|best)\b",
    re.IGNORECASE,
)
_BARE = re.compile(rf"[(\[]?(?P<letter>{_LETTER})[)\]]?[.)]?")
_COMMANDS = re.compile(
    r"\\(?:text|mathrm|mathbf|textbf|mathit|textit|boxed|fbox|left|right|displaystyle)\b|\\[()\[\],;!\s]"
)
_LEADING = re.compile(rf"\s*[(\[]?(?P<letter>{_LETTER})(?:[)\].:、\n]|\s*$)")


def judge(gold: str, completion: str, metadata: Mapping[str, Any]) -> Judgement:
    """The option chosen is gold's: a letter, or else a word such as True that is compared without case.

    metadata `choices`: the options' texts in the order of their letters; then an option's text counts as its letter.
    """
    choices = [_plain(text) for text in metadata.get("choices", ())]
    wanted = _letter_of(_plain(gold), choices) or _word(_plain(gold))
    chosen = _chosen(completion, choices)
    return binary(chosen == wanted, chosen) if chosen else NO_ANSWER


def same_letter(gold: str, answer: str) -> bool | None:
    """Whether both name the same option; None where gold is no single capital letter of an option."""
    gold = _plain(gold)
    wanted = _letter_of(gold, []) if len(gold.strip("()[]. ")) == 1 and gold.strip("()[]. ").isupper() else None
    return _letter_of(_plain(answer), []) == wanted if wanted else None


def _chosen(completion: str, choices: list[str]) -> str | None:
    """The letter (or, where options are words, the word) that the completion ends up with."""
    statement = final_answer(completion, accept_stated=True)
    if statement is not None or has_box(completion):
        answer = _plain(statement or "")
        return _letter_of(answer, choices) or _word(answer) or None
    text = _plain(completion)
    if letter := _letter_of(text, choices):
        return letter
    if named := list(_CHOSEN.finditer(text)):
        return (named[-1]["before"] or named[-1]["after"]).upper()
    last_line = next((line for line in reversed(text.split("\n")) if line.strip()), "")
    if letter := _letter_of(last_line, choices):
        return letter
    if found := _LEADING.match(text):
        return found["letter"].upper()
    return _word(text) or None if len(text) < 50 else None


def _letter_of(answer: str, choices: list[str]) -> str | None:
    """`B`, `(B)`, `B. Paris`, `Option B: Paris`, or the text of exactly one option."""
    if bare := _BARE.fullmatch(answer):  # before the texts: an option's text may be a letter, such as a molecule C
        return bare["letter"]
    words = _word(answer)
    matches = [index for index, text in enumerate(choices) if _word(text) == words]
    if len(matches) == 1:
        return chr(ord("A") + matches[0])
    found = _WRAPPED.fullmatch(answer)
    return found["letter"].upper() if found else None


def _word(text: str) -> str:
    return text.casefold().strip(" .")


def _plain(text: str) -> str:
    """Without LaTeX's and markdown's dress, full-width letters made plain."""
    text = unicodedata.normalize("NFKC", text[-MAX_ANSWER_CHARS:])
    return _COMMANDS.sub(" ", text).translate(str.maketrans("", "", "{}$*`_\"'")).strip()
