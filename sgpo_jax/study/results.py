"""What a finished run of a study left behind, as values, and the tidy tables that are made of them."""

import hashlib
import io
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, astuple, dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet

from sgpo_jax.algorithms.compute import CHARGED, Ledger, Stage, TokenCounts
from sgpo_jax.files import read_json, read_jsonl, write_bytes
from sgpo_jax.run import FINAL, INITIAL
from sgpo_jax.study.cells import Cell, own_settings
from sgpo_jax.study.config import Settings, flatten
from sgpo_jax.study.curves import Curve
from sgpo_jax.study.records import Record
from sgpo_jax.types import UserError


class LedgerKind(StrEnum):
    PAPER = "paper"
    ITEMISED = "itemised"


@dataclass(frozen=True, slots=True)
class Point:
    """An evaluation: after how many steps, in which phase ("" before training), FLOPs by both ledgers."""

    step: int
    phase: str
    paper_flops: int
    itemised_flops: int
    accuracy: float


@dataclass(frozen=True, slots=True, eq=False)
class Questions:
    """The final evaluation by question, in the set's order.

    digest: of the questions. num_correct_Q, num_judged_Q: int, samples that the verifier found right, and could judge.
    """

    digest: str
    num_correct_Q: np.ndarray
    num_judged_Q: np.ndarray

    def accuracies(self) -> np.ndarray:
        """[Q], float64; NaN where no sample could be judged."""
        with np.errstate(invalid="ignore"):
            return self.num_correct_Q / self.num_judged_Q


@dataclass(frozen=True, slots=True, eq=False)  # each is one run: equal to itself alone
class RunResult:
    """A finished run.

    points: the initial evaluation, at the cost of the profile where the method goes by one; those during training; the
    final one. phase_ends: paper FLOPs at the end of each phase. zero_variance_frac: share of the groups generated for
    training whose outcomes are all equal; of just_in_time, which trains what it profiles, of its probes. seconds: of
    training, evaluations left out.
    """

    cell: Cell
    points: tuple[Point, ...]
    questions: Questions
    ledger: Ledger
    num_steps: int
    phase_ends: Mapping[str, int]
    zero_variance_frac: float
    seconds: float

    @property
    def final_accuracy(self) -> float:
        return self.points[-1].accuracy

    def curve(self, kind: LedgerKind) -> Curve:
        flops = [p.paper_flops if kind is LedgerKind.PAPER else p.itemised_flops for p in self.points]
        return Curve(np.array(flops, np.float64), np.array([point.accuracy for point in self.points], np.float64))


def read_result(cell: Cell, evaluation_set: str) -> RunResult:
    """Raises UserError for a file that is missing or broken."""
    rows = read_jsonl(cell.run_dir / "metrics.jsonl", torn_tail=True)
    ledger = Ledger.from_dict(read_json(cell.run_dir / "compute.json"))
    initial, final = (_read_score(cell.run_dir / "eval" / f"{name}.json", evaluation_set) for name in (INITIAL, FINAL))
    key = f"eval/{evaluation_set}/avg"
    begun = Ledger(ledger.num_params).add(Stage.PROFILING, ledger.tokens[Stage.PROFILING] - _profiled_in_training(rows))
    points = (
        Point(0, "", begun.paper_flops, begun.itemised_flops, initial["avg"]["mean"]),
        *(
            Point(row["step"], row["phase"], row["compute/paper_flops"], row["compute/itemised_flops"], row[key])
            for row in rows
            if key in row
        ),
        Point(len(rows), rows[-1]["phase"], ledger.paper_flops, ledger.itemised_flops, final["avg"]["mean"]),
    )
    return RunResult(
        cell=cell,
        points=points,
        questions=_questions(final["questions"]),
        ledger=ledger,
        num_steps=len(rows),
        phase_ends={row["phase"]: row["compute/paper_flops"] for row in rows},
        zero_variance_frac=_zero_variance(
            rows, "profile" if cell.config.train.method == "just_in_time" else "rollouts"
        ),
        seconds=sum(row["seconds/total"] - row.get("seconds/evaluate", 0.0) for row in rows),
    )


def to_record(result: RunResult) -> Record:
    """All of a result, as a line of JSON; `from_record` is its inverse."""
    questions = result.questions
    return {
        "name": result.cell.name,
        "config": own_settings(result.cell.config),
        "points": [list(astuple(point)) for point in result.points],
        "phase_ends": dict(result.phase_ends),
        "num_params": result.ledger.num_params,
        "tokens": {
            stage.value: {key: count for key, count in asdict(tokens).items() if count}
            for stage, tokens in result.ledger.tokens.items()
        },
        "num_steps": result.num_steps,
        "zero_variance_frac": result.zero_variance_frac,
        "seconds": round(result.seconds, 1),
        "questions": questions.digest,
        "num_correct": questions.num_correct_Q.tolist(),
        "num_judged": _one_if_equal(questions.num_judged_Q.tolist()),
    }


def from_record(cell: Cell, record: Record, where: str) -> RunResult:
    """Raises UserError for a record that is not whole; `where` names it."""
    try:
        tokens = {stage: TokenCounts(**record["tokens"][stage]) for stage in Stage}
        return RunResult(
            cell=cell,
            points=tuple(Point(*point) for point in record["points"]),
            questions=Questions(
                record["questions"],
                num_correct_Q=(num_correct_Q := np.array(record["num_correct"], np.int64)),
                num_judged_Q=np.broadcast_to(np.array(record["num_judged"], np.int64), num_correct_Q.shape),
            ),
            ledger=Ledger(record["num_params"], tokens),
            num_steps=record["num_steps"],
            phase_ends=record["phase_ends"],
            zero_variance_frac=record["zero_variance_frac"],
            seconds=record["seconds"],
        )
    except (KeyError, TypeError, ValueError) as error:
        raise UserError(f"{where}: not the record of a run: {error!r}; remove its line, and it is run again") from None


def _one_if_equal(counts: list[int]) -> list[int] | int:
    return counts[0] if len(set(counts)) == 1 else counts


def _questions(rows: Sequence[Mapping[str, Any]]) -> Questions:
    return Questions(
        digest=hashlib.blake2b(json.dumps([row["query_id"] for row in rows]).encode(), digest_size=8).hexdigest(),
        num_correct_Q=np.array([row["num_correct"] for row in rows]),
        num_judged_Q=np.array([row["num_judged"] for row in rows]),
    )


def _read_score(path: Path, evaluation_set: str) -> dict[str, Any]:
    score = read_json(path)[evaluation_set]
    if score["avg"] is None:
        raise UserError(f"{path}: no answer of {evaluation_set} could be judged, so that there is no accuracy")
    return score


def _profiled_in_training(rows: Sequence[Mapping[str, Any]]) -> TokenCounts:
    """What steps spent on profiling; the rest of it was spent before the first."""
    return TokenCounts(
        generated=sum(row["profile/num_tokens"] for row in rows),
        prompt_generated=sum(row["profile/num_prompt_tokens"] for row in rows),
    )


def _zero_variance(rows: Sequence[Mapping[str, Any]], asked_for: str) -> float:
    """Of the groups that were asked for to be trained ("rollouts") or as a profile ("profile")."""
    num_groups = sum(row[f"{asked_for}/num_groups"] for row in rows)
    num_equal = sum(row[f"{asked_for}/num_groups"] * row[f"{asked_for}/zero_variance_frac"] for row in rows)
    return num_equal / num_groups if num_groups else 0.0


def run_row(result: RunResult) -> dict[str, Any]:
    """The columns of study.csv that a run has by itself."""
    cell, ledger, tokens = result.cell, result.ledger.to_dict(), result.ledger.tokens
    train = cell.config.train
    stages = ledger["stages"]
    return {
        "task": cell.task,
        "method": cell.method,
        "seed": cell.seed,
        "final_accuracy": result.final_accuracy,
        # float: an exact count of FLOPs can outgrow 64 bits
        "total_flops": float(result.ledger.paper_flops),
        "total_flops_itemised": float(result.ledger.itemised_flops),
        **{f"{stage}_flops": float(stages[stage]["paper"]["flops"]) for stage in CHARGED},
        **{f"{stage}_flops_itemised": float(stages[stage]["itemised"]["flops"]) for stage in CHARGED},
        "generated_tokens": sum(tokens[stage].generated for stage in CHARGED),
        "trained_tokens": sum(tokens[stage].trained for stage in CHARGED),
        "zero_variance_frac": result.zero_variance_frac,
        "num_steps": result.num_steps,
        "learning_rate": train.optimizer.learning_rate,
        "schedule": train.optimizer.schedule,
        "settings": settings_text(cell.settings),
        "seconds": round(result.seconds, 1),
    }


def settings_text(settings: Settings) -> str:
    return " ".join(f"{key}={json.dumps(value)}" for key, value in flatten(settings).items())


def curve_rows(results: Iterable[RunResult]) -> list[dict[str, Any]]:
    """The rows of curves.csv: one for each evaluation of each run."""
    return [
        {
            "task": result.cell.task,
            "method": result.cell.method,
            "seed": result.cell.seed,
            "step": point.step,
            "phase": point.phase,
            "paper_flops": float(point.paper_flops),
            "itemised_flops": float(point.itemised_flops),
            "accuracy": point.accuracy,
        }
        for result in results
        for point in result.points
    ]


def write_csv(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """Columns are the keys of the rows; None is an empty field."""
    sink = io.BytesIO()
    pyarrow.csv.write_csv(_table(rows), sink)
    write_bytes(path, sink.getvalue())


def write_parquet(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    sink = io.BytesIO()
    pyarrow.parquet.write_table(_table(rows), sink)
    write_bytes(path, sink.getvalue())


def _table(rows: Sequence[Mapping[str, Any]]) -> pa.Table:
    return pa.Table.from_pylist([dict(row) for row in rows])
