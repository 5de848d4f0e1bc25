"""Judging a file of answers: what `launch verify` does."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sgpo_jax.config import RewardsConfig
from sgpo_jax.files import read_jsonl, write_jsonl
from sgpo_jax.rewards.pool import VerifierPool, judge_all
from sgpo_jax.rewards.verifiers import resolve_verifier
from sgpo_jax.types import Judgement, Query, UserError, Verdict

_MAX_SHOWN_CHARS = 100


@dataclass(frozen=True, slots=True)
class Disagreement:
    """A verdict other than the row's `expected`. line: in the file, from 1."""

    line: int
    gold: str
    expected: bool
    judgement: Judgement


@dataclass(frozen=True, slots=True)
class VerifySummary:
    """What became of a file. num_expected: rows that say what they expect; an error verdict is not `correct`."""

    num_rows: int
    num_correct: int
    num_wrong: int
    num_errors: int
    num_expected: int
    disagreements: tuple[Disagreement, ...]

    @property
    def agreement(self) -> float | None:
        """The share of rows judged as expected; None where no row says."""
        return 1 - len(self.disagreements) / self.num_expected if self.num_expected else None

    def lines(self) -> list[str]:
        """The summary as printed: counts, agreement, and each disagreement."""
        shown = [f"{self.num_rows} rows: {self.num_correct} correct, {self.num_wrong} wrong, {self.num_errors} errors"]
        if self.num_expected:
            num_agreed = self.num_expected - len(self.disagreements)
            shown.append(f"agreement with `expected`: {num_agreed} of {self.num_expected} ({self.agreement:.2%})")
        return shown + [_show(disagreement) for disagreement in self.disagreements]


def verify_file(path: Path, kind: str, out: Path | None, config: RewardsConfig) -> VerifySummary:
    """Judge the rows {"gold", "completion"[, "expected", "metadata"]} of a JSON-lines file.

    Writes the rows to `out`, in their order and each with its "verdict". Raises UserError naming file and line where a
    row is broken, and where `kind` is unknown.
    """
    resolve_verifier(kind, config)
    if not path.is_file():
        raise UserError(f"{path}: no such file")
    rows = read_jsonl(path)
    queries = [_query(path, line, row, kind) for line, row in enumerate(rows, start=1)]
    with VerifierPool(config) as pool:
        judgements = judge_all(pool, [(query, row["completion"]) for query, row in zip(queries, rows, strict=True)])
    if out:
        write_jsonl(
            out, ({**row, "verdict": judged.verdict.value} for row, judged in zip(rows, judgements, strict=True))
        )
    return _summary(rows, judgements)


def _query(path: Path, line: int, row: Any, kind: str) -> Query:
    if not isinstance(row, dict):
        raise UserError(f"{path}:{line}: not an object with the keys gold and completion")
    for key in ("gold", "completion"):
        if not isinstance(row.get(key), str):
            raise UserError(f"{path}:{line}: {key}={str(row.get(key))[:80]!r}: must be a string")
    if not isinstance(row.get("expected", True), bool):
        raise UserError(f"{path}:{line}: expected={str(row['expected'])[:80]!r}: must be true or false")
    metadata = row.get("metadata", {})
    if not isinstance(metadata, Mapping):
        raise UserError(f"{path}:{line}: metadata={str(metadata)[:80]!r}: must be an object")
    return Query(str(line), "", row["gold"], kind, path.name, "", (), metadata)


def _summary(rows: list[dict[str, Any]], judgements: list[Judgement]) -> VerifySummary:
    counts = Counter(judgement.verdict for judgement in judgements)
    disagreements = [
        Disagreement(line, row["gold"], row["expected"], judgement)
        for line, (row, judgement) in enumerate(zip(rows, judgements, strict=True), start=1)
        if "expected" in row and row["expected"] != (judgement.verdict is Verdict.CORRECT)
    ]
    return VerifySummary(
        num_rows=len(rows),
        num_correct=counts[Verdict.CORRECT],
        num_wrong=counts[Verdict.WRONG],
        num_errors=counts[Verdict.ERROR],
        num_expected=sum("expected" in row for row in rows),
        disagreements=tuple(disagreements),
    )


def _show(disagreement: Disagreement) -> str:
    judgement = disagreement.judgement
    expected = "correct" if disagreement.expected else "not correct"
    detail = f" ({judgement.detail})" if judgement.detail else ""
    return (
        f"line {disagreement.line}: expected {expected}, judged {judgement.verdict.value}{detail}: "
        f"gold {disagreement.gold[:_MAX_SHOWN_CHARS]!r}, answer {(judgement.extracted or '')[:_MAX_SHOWN_CHARS]!r}"
    )
