"""What a study says of each method on a task: totals, accuracy at equal FLOPs, FLOPs to reach a target."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import cache
from typing import Any

import numpy as np

from sgpo_jax.algorithms.compute import CHARGED, Stage
from sgpo_jax.study.config import StudyConfig
from sgpo_jax.study.curves import Curve, mean_curve
from sgpo_jax.study.results import RunResult
from sgpo_jax.study.statistics import Difference, SeedInterval, paired_bootstrap, seed_interval


class LedgerKind(StrEnum):
    PAPER = "paper"
    ITEMISED = "itemised"


@dataclass(frozen=True, slots=True)
class Cost:
    """What a method costs by one ledger, means over seeds.

    to_target, to_frac: FLOPs from which on the mean curve over the seeds stays above the targets, None where it ends
    below. saving: the best baseline's to_target over this one's.
    """

    total: float
    stages: Mapping[Stage, float]
    to_target: float | None
    to_frac: float | None
    saving: float | None


@dataclass(frozen=True, slots=True)
class MethodReading:
    """at_budgets: accuracy of the mean curve at each of the task's budgets. against_best: final accuracy less the best
    baseline's, None for that baseline itself.
    """

    method: str
    seeds: tuple[int, ...]
    final: SeedInterval
    costs: Mapping[LedgerKind, Cost]
    at_budgets: tuple[float, ...]
    generated_tokens: float
    trained_tokens: float
    zero_variance_frac: float
    num_steps: float
    against_best: Difference | None


@dataclass(frozen=True, slots=True)
class Targets:
    """What the methods of a task are held to. budgets: paper FLOPs."""

    best: str
    accuracy: float
    target: float
    frac_target: float
    budgets: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class TaskReading:
    task: str
    num_questions: int
    targets: Targets
    methods: tuple[MethodReading, ...]


def targets_of(results: Sequence[RunResult], study: StudyConfig) -> Targets | None:
    """Of one task's runs, by the best of the baselines; None while none of them has a finished run."""
    by_method = {name: [r for r in results if r.cell.method == name] for name in study.baselines}
    accuracy_of = {name: _mean(r.final_accuracy for r in runs) for name, runs in by_method.items() if runs}
    if not accuracy_of:
        return None
    best = max(accuracy_of, key=lambda name: accuracy_of[name])  # of equal ones the first that is named
    total = _mean(r.ledger.paper_flops for r in by_method[best])
    return Targets(
        best=best,
        accuracy=accuracy_of[best],
        target=accuracy_of[best] - study.margin,
        frac_target=accuracy_of[best] * study.target_frac,
        budgets=tuple(frac * total for frac in study.budget_fracs),
    )


def read_task(task: str, results: Sequence[RunResult], study: StudyConfig, targets: Targets) -> TaskReading:
    """Read one task's finished runs; methods in the study's order, those without a run left out."""
    groups = {name: [r for r in results if r.cell.method == name] for name in study.methods}
    best = groups[targets.best]
    marks = {kind: mean_curve(_curves(best, kind)).stays_above(targets.target) for kind in LedgerKind}
    return TaskReading(
        task=task,
        num_questions=len(best[0].accuracy_of),
        targets=targets,
        methods=tuple(_read_method(name, runs, best, targets, marks) for name, runs in groups.items() if runs),
    )


def target_columns(result: RunResult, targets: Targets | None, study: StudyConfig) -> dict[str, Any]:
    """The columns of study.csv that hold a run against its task's targets; empty while there are none."""
    paper, itemised = result.paper_curve, result.itemised_curve
    columns: dict[str, Any] = {
        "target_accuracy": targets and targets.target,
        "flops_to_target": targets and paper.stays_above(targets.target),
        "flops_to_target_itemised": targets and itemised.stays_above(targets.target),
        "flops_to_frac_target": targets and paper.stays_above(targets.frac_target),
        "flops_to_frac_target_itemised": targets and itemised.stays_above(targets.frac_target),
    }
    for i, frac in enumerate(study.budget_fracs):
        columns[f"accuracy_at_{100 * frac:g}pct"] = targets and paper.at(targets.budgets[i])
    return columns


def question_matrix(runs: Sequence[RunResult], query_ids: Sequence[str]) -> np.ndarray:
    """Final accuracy by run and question, [len(runs), len(query_ids)]."""
    return np.array([[run.accuracy_of[query_id] for query_id in query_ids] for run in runs], np.float64)


def _read_method(
    name: str,
    runs: Sequence[RunResult],
    best: Sequence[RunResult],
    targets: Targets,
    marks: Mapping[LedgerKind, float | None],
) -> MethodReading:
    counts = [[run.ledger.tokens[stage] for stage in CHARGED] for run in runs]
    paper = mean_curve(_curves(runs, LedgerKind.PAPER))
    return MethodReading(
        method=name,
        seeds=tuple(run.cell.seed for run in runs),
        final=seed_interval([run.final_accuracy for run in runs]),
        costs={kind: _cost(runs, kind, targets, marks[kind]) for kind in LedgerKind},
        at_budgets=tuple(paper.at(budget) for budget in targets.budgets),
        generated_tokens=_mean(sum(count.generated for count in stages) for stages in counts),
        trained_tokens=_mean(sum(count.trained for count in stages) for stages in counts),
        zero_variance_frac=_mean(run.zero_variance_frac for run in runs),
        num_steps=_mean(run.num_steps for run in runs),
        against_best=None if name == targets.best else _against(tuple(runs), tuple(best)),
    )


@cache  # most methods have no new run since the last table
def _against(runs: tuple[RunResult, ...], best: tuple[RunResult, ...]) -> Difference:
    """Over the questions that every run of both has a judged sample of."""
    shared = set.intersection(*(set(run.accuracy_of) for run in (*runs, *best)))
    query_ids = sorted(shared)
    return paired_bootstrap(question_matrix(runs, query_ids), question_matrix(best, query_ids))


def _cost(runs: Sequence[RunResult], kind: LedgerKind, targets: Targets, mark: float | None) -> Cost:
    trees = [run.ledger.to_dict() for run in runs]
    curve = mean_curve(_curves(runs, kind))
    to_target = curve.stays_above(targets.target)
    return Cost(
        total=_mean(tree["total"][kind]["flops"] for tree in trees),
        stages={stage: _mean(tree["stages"][stage][kind]["flops"] for tree in trees) for stage in CHARGED},
        to_target=to_target,
        to_frac=curve.stays_above(targets.frac_target),
        saving=mark / to_target if mark and to_target else None,
    )


def _curves(runs: Sequence[RunResult], kind: LedgerKind) -> list[Curve]:
    return [run.paper_curve if kind is LedgerKind.PAPER else run.itemised_curve for run in runs]


def _mean(values: Any) -> float:
    return float(np.mean(list(values)))
