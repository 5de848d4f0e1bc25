"""The row formats of publishers, recognised by their keys, each turned into a question with its gold answer."""

import json
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from sgpo_jax.data.sources import LocatedRow
from sgpo_jax.types import UserError

ROW_KINDS = (
    "math",
    "exact",
    "choice",
    "numeric",
)  # a row names no code: `module:function` comes from the configuration


@dataclass(frozen=True, slots=True)
class Example:
    """A question with a verifiable answer, before any template.

    kind and metadata as in types.Query: a `choice` has metadata["choices"], the options' texts, and a letter as gold; a
    `reasoning_gym` question has metadata["task"] and metadata["entry"], what the task's scorer takes.
    """

    question: str
    gold: str
    kind: str
    where: str
    metadata: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Refusal:
    """A well-formed row that is no question with a verifiable answer; `reason` is what it is counted under."""

    reason: str
    where: str


@dataclass(frozen=True, slots=True)
class RowFormat:
    name: str
    matches: Callable[[Mapping[str, Any]], bool]
    convert: Callable[[LocatedRow, str], Example | Refusal]


def to_example(row: LocatedRow, kind: str = "auto") -> Example | Refusal:
    """Turn a row into an example. `kind` other than "auto" replaces the format's own.

    A row whose question or answer is empty is refused, and so counted: a published set with a gap can still be used.
    Raises UserError naming the row: unknown keys, a field of a wrong type, an answer that does not fit its kind.
    """
    found = next((known for known in FORMATS if known.matches(row.values)), None)
    if found is None:
        keys = ", ".join(sorted(repr(key) for key in row.values if isinstance(key, str)))
        raise UserError(
            f"{row.where}: unknown row format with the keys {keys[:200]}; "
            f"known are {'; '.join(known.name for known in FORMATS)}"
        )
    example = found.convert(row, kind)
    if isinstance(example, Refusal):
        return example
    if not example.question or not (example.gold or example.kind == "reasoning_gym"):
        return Refusal("empty question or answer", row.where)
    if kind != "auto":
        example = replace(example, kind=kind)
    _check_metadata(example)
    return example


def _check_metadata(example: Example) -> None:
    try:
        json.dumps(example.metadata, allow_nan=False, ensure_ascii=False).encode()
    except (TypeError, ValueError, RecursionError) as error:
        raise UserError(f"{example.where}: metadata is not JSON: {str(error)[:200]}") from None
    if example.kind == "choice":
        _check_choice(example)
    if example.kind == "reasoning_gym" and not {"task", "entry"} <= example.metadata.keys():
        raise UserError(
            f"{example.where}: kind reasoning_gym needs an entry, as the source `reasoning_gym:TASK` gives it"
        )


def _check_choice(example: Example) -> None:
    choices: Any = example.metadata.get("choices")
    is_list = isinstance(choices, list | tuple) and all(isinstance(text, str) for text in choices)
    if not is_list or not 2 <= len(choices) <= 10:
        raise UserError(f"{example.where}: kind choice needs metadata.choices, a list of 2 to 10 texts")
    if example.gold not in map(choice_letter, range(len(choices))):
        raise UserError(
            f"{example.where}: answer {example.gold[:40]!r} is no letter from A to {choice_letter(len(choices) - 1)}"
        )


def choice_letter(index: int) -> str:
    """The letter of a choice: A for the first."""
    return chr(ord("A") + index)


# Fields.


def _text(row: LocatedRow, key: str, values: Mapping[str, Any] | None = None) -> str:
    """A field as text without white space around it; a missing one is empty, a number is written out."""
    value = (row.values if values is None else values).get(key)
    if value is None:
        return ""
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        raise UserError(f"{row.where}: {key} is of type {type(value).__name__}, allowed is text or a number")
    if isinstance(value, float):
        if not math.isfinite(value):
            raise UserError(f"{row.where}: {key}={value} is no finite number")
        value = int(value) if value.is_integer() else value
    try:
        text = str(value)
        text.encode()
    except ValueError as error:  # half of a surrogate pair; an integer of thousands of digits
        raise UserError(f"{row.where}: {key} cannot be written as text: {str(error)[:200]}") from None
    return text.strip()


def _mapping(row: LocatedRow, key: str) -> Mapping[str, Any]:
    value = row.values.get(key)
    if not isinstance(value, Mapping):
        raise UserError(f"{row.where}: {key} is of type {type(value).__name__}, allowed is an object")
    return value


# verl, DAPO.

# Instructions about the answer's form that publishers wrote around the question. Our own template gives its own.
_LEADING_INSTRUCTION = re.compile(r"\A\s*Solve the following math problem step by step\.[^\n]*\bAnswer\b[^\n]*\n\s*")
_TRAILING_INSTRUCTION = re.compile(
    r"""\s*(?:
        \n\s*Remember\ to\ put\ your\ answer\ on\ its\ own\ line\ after\ "?Answer:"?
      | (?:Let's|Please)\ (?:think|reason)\ step\ by\ step,?[^\n]*\banswer\b[^\n]*(?:\\boxed|\#\#\#\#)[^\n]{0,4}
    )\.?\s*\Z""",
    re.VERBOSE,
)


def bare_question(text: str) -> str:
    """A question without the instructions about the answer's form around it (DAPO's, verl's examples', Qwen-Math's)."""
    text = _LEADING_INSTRUCTION.sub("", text, count=1)
    return _TRAILING_INSTRUCTION.sub("", text, count=1).strip()


def _convert_verl(row: LocatedRow, kind: str) -> Example | Refusal:
    reward_model = _mapping(row, "reward_model")
    style = _text(row, "style", reward_model) or "rule"
    ability = _text(row, "ability") or "math"
    if not style.startswith("rule"):
        return Refusal(f"verl reward style {style[:40]!r}", row.where)
    if kind == "auto" and "math" not in ability.casefold():
        return Refusal(f"verl ability {ability[:40]!r} (name the source's kind to use it)", row.where)
    return Example(bare_question(_verl_prompt(row)), _text(row, "ground_truth", reward_model), "math", row.where)


def _verl_prompt(row: LocatedRow) -> str:
    """The user's one message; a system message is an instruction, and our template has its own."""
    prompt = row.values["prompt"]
    if isinstance(prompt, str):
        return _text(row, "prompt")
    if not isinstance(prompt, list | tuple) or not all(isinstance(message, Mapping) for message in prompt):
        raise UserError(f"{row.where}: prompt is no list of messages {{role, content}}")
    messages = [message for message in prompt if message.get("role") != "system"]
    if len(messages) != 1 or messages[0].get("role") != "user":
        raise UserError(f"{row.where}: prompt is a dialogue of {len(messages)} messages, allowed is one of the user's")
    return _text(row, "content", messages[0])


# SciKnowEval.

_TRUE, _FALSE = ("yes", "true"), ("no", "false")


def _convert_sciknoweval(row: LocatedRow, kind: str) -> Example | Refusal:
    question_type = _text(row, "type")
    question = _text(row, "question")
    if question_type in ("mcq-4-choices", "mcq-2-choices"):
        return _convert_options(row, question)
    if question_type == "true_or_false":
        return _convert_true_or_false(row, question)
    if question_type == "filling":
        return _convert_filling(row, question)
    return Refusal(f"SciKnowEval type {question_type[:40]!r}", row.where)


def _convert_options(row: LocatedRow, question: str) -> Example | Refusal:
    choices = _mapping(row, "choices")
    labels, texts = choices.get("label"), choices.get("text")
    if not isinstance(labels, list) or not isinstance(texts, list):
        raise UserError(f"{row.where}: choices has no lists `label` and `text`")
    answer = _text(row, "answerKey")
    if len(labels) != len(texts) or answer not in labels:
        return Refusal("SciKnowEval choices that do not fit their labels or answerKey", row.where)
    options = [_text(row, "text", {"text": text}) for text in texts]
    return Example(question, choice_letter(labels.index(answer)), "choice", row.where, {"choices": options})


def _convert_true_or_false(row: LocatedRow, question: str) -> Example | Refusal:
    answer = _text(row, "answer").casefold()
    if answer not in _TRUE + _FALSE:
        return Refusal("SciKnowEval true_or_false whose answer is neither", row.where)
    return Example(question, "A" if answer in _TRUE else "B", "choice", row.where, {"choices": ["Yes", "No"]})


def _convert_filling(row: LocatedRow, question: str) -> Example:
    """A number, or a text such as a balanced equation, which is written in one way only: to be boxed, at the end."""
    answer = _text(row, "answer")
    if _is_number(answer):
        return Example(question, answer, "numeric", row.where)
    return Example(question, answer, "exact", row.where, {"boxed": True})


def _is_number(text: str) -> bool:
    try:
        return math.isfinite(float(text))
    except ValueError:
        return False


# reasoning-gym.


def _is_reasoning_gym(values: Mapping[str, Any]) -> bool:
    metadata = values.get("metadata")
    return "question" in values and isinstance(metadata, Mapping) and "source_dataset" in metadata


def _convert_reasoning_gym(row: LocatedRow, kind: str) -> Example:
    """The answer is one of possibly many; the task's own scorer decides. The entry stays as it is, tuples included:
    some scorers compare with them."""
    task = _text(row, "source_dataset", _mapping(row, "metadata"))
    metadata = {"task": task, "entry": dict(row.values)}
    return Example(_text(row, "question"), _text(row, "answer"), "reasoning_gym", row.where, metadata)


# Question and answer, GSM8K.

_THOUSANDS = re.compile(r"(?<=\d),(?=\d{3}(?!\d))")


def _convert_question_answer(row: LocatedRow, kind: str) -> Example:
    question = _text(row, "question" if "question" in row.values else "problem")
    gold = _text(row, "gold" if "gold" in row.values else "answer")
    if "gold" not in row.values and "####" in gold:  # GSM8K: the solution, then the answer
        gold = _THOUSANDS.sub("", gold.rpartition("####")[2].strip())
    row_kind = _text(row, "kind") or "math"
    if row_kind not in ROW_KINDS:
        raise UserError(f"{row.where}: kind={row_kind[:40]!r}, allowed in a row is {', '.join(ROW_KINDS)}")
    metadata = _mapping(row, "metadata") if row.values.get("metadata") is not None else {}
    return Example(question, gold, row_kind, row.where, metadata)


FORMATS = (
    RowFormat("verl/DAPO {prompt, reward_model}", lambda row: {"prompt", "reward_model"} <= row.keys(), _convert_verl),
    RowFormat(
        "SciKnowEval {question, type, choices, answerKey, answer}",
        lambda row: {"question", "type", "answerKey"} <= row.keys(),
        _convert_sciknoweval,
    ),
    RowFormat("reasoning-gym {question, answer, metadata.source_dataset}", _is_reasoning_gym, _convert_reasoning_gym),
    RowFormat(
        "GSM8K and others {question or problem, answer or gold[, kind, metadata]}",
        lambda row: ("question" in row or "problem" in row) and ("answer" in row or "gold" in row),
        _convert_question_answer,
    ),
)
