"""The paper's evaluation sets by name (sGPO, section 5), and two more that are common.

A source's path `math_500` reads the set from the hub, `math_500@DIR` (or `@FILE`) from a local copy.
SciKnowEval has one public collection, so each domain of its L3 (knowledge reasoning) is split here, 90 % to 10 %, by a
seed that is fixed: what is held out is the same in every run, whatever the run's own seed.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from sgpo_jax.data.draw import draw

_HELD_OUT_FRAC = 0.1
_SPLIT_SEED = 0


@dataclass(frozen=True, slots=True)
class SciKnowEvalPart:
    """One side of the 90/10 split of a domain's L3 questions. Copies of a question are always on the same side."""

    domain: str
    part: Literal["train", "test"]

    def select(self, rows: Sequence[Mapping[str, Any]]) -> list[int]:
        """Indices of the rows that belong to this part, in their order."""
        keys = {index: _question_key(row) for index, row in enumerate(rows) if self._is_in_domain(row)}
        distinct = set(keys.values())
        held_out = draw(distinct, round(_HELD_OUT_FRAC * len(distinct)), _SPLIT_SEED)
        return [index for index, key in keys.items() if (key in held_out) == (self.part == "test")]

    def _is_in_domain(self, row: Mapping[str, Any]) -> bool:
        details = row.get("details")
        return row.get("domain") == self.domain and isinstance(details, Mapping) and details.get("level") == "L3"


def _question_key(row: Mapping[str, Any]) -> str:
    """The same for a question whose options come in another order."""
    choices = row.get("choices")
    options = choices.get("text") if isinstance(choices, Mapping) else None
    return json.dumps([row.get("question"), sorted(map(str, options or ()))], default=str)


@dataclass(frozen=True, slots=True)
class EvaluationSet:
    """A named set: where the hub has it, in which row format (formats.py), and under which licence."""

    hub_name: str
    hub_config: str | None
    split: str
    row_format: str
    licence: str
    sciknoweval: SciKnowEvalPart | None = None


@dataclass(frozen=True, slots=True)
class Located:
    """A set that a path names, and the local copy if the path names one."""

    evaluation_set: EvaluationSet
    local_path: str | None


def _math_arena(name: str) -> EvaluationSet:
    return EvaluationSet(f"MathArena/{name}", None, "train", "problem/answer", "CC-BY-NC-SA-4.0")


def _sciknoweval(domain: str, part: Literal["train", "test"]) -> EvaluationSet:
    return EvaluationSet("hicai-zju/SciKnowEval", "v2", "test", "SciKnowEval", "MIT", SciKnowEvalPart(domain, part))


EVALUATION_SETS: dict[str, EvaluationSet] = {
    "aime_2024": EvaluationSet(
        "HuggingFaceH4/aime_2024", None, "train", "problem/answer", "none stated by the card; problems by the MAA"
    ),
    "aime_2025": _math_arena("aime_2025"),
    "aime_2026": _math_arena("aime_2026"),
    "hmmt_feb_2025": _math_arena("hmmt_feb_2025"),
    "hmmt_feb_2026": _math_arena("hmmt_feb_2026"),
    "math_500": EvaluationSet("HuggingFaceH4/MATH-500", None, "test", "problem/answer", "MIT (the MATH data set)"),
    "gsm8k": EvaluationSet("openai/gsm8k", "main", "test", "GSM8K", "MIT"),
    **{
        f"sciknoweval_l3_{domain.lower()}_{part}": _sciknoweval(domain, part)
        for domain in ("Biology", "Chemistry", "Material", "Physics")
        for part in ("train", "test")
    },
}


def find(path: str) -> Located | None:
    """The set that `NAME` or `NAME@PATH` names, None where it names none."""
    name, at, local_path = path.partition("@")
    evaluation_set = EVALUATION_SETS.get(name)
    return Located(evaluation_set, local_path if at else None) if evaluation_set else None
