"""What a study says of each method on a task: totals, accuracy at equal FLOPs, FLOPs to reach a target."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np

from sgpo_jax.algorithms.compute import CHARGED, Stage
from sgpo_jax.study.config import StudyConfig
from sgpo_jax.study.curves import Curve, mean_curve
from sgpo_jax.study.results import LedgerKind, RunResult
from sgpo_jax.study.statistics import Difference, SeedInterval, paired_bootstrap, seed_interval
from sgpo_jax.types import UserError


@dataclass(frozen=True, slots=True)
class Cost:
    """What a method costs by one ledger, means over seeds.

    to_target, to_frac: FLOPs from which on the mean curve over the seeds stays above the targets, None where it ends
    below. saving, saving_cheapest: over this one's to_target, the best baseline's and that of the baseline which gets
    there for the least. savings: against each baseline, its FLOPs to its own target over this one's to the same.
    at_budgets: accuracy of the mean curve at each of the task's budgets.
    """

    total: float
    stages: Mapping[Stage, float]
    to_target: float | None
    to_frac: float | None
    saving: float | None
    saving_cheapest: float | None
    savings: Mapping[str, float | None]
    at_budgets: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class MethodReading:
    """against_best: final accuracy less the best baseline's, None for that baseline itself."""

    method: str
    seeds: tuple[int, ...]
    final: SeedInterval
    costs: Mapping[LedgerKind, Cost]
    generated_tokens: float
    trained_tokens: float
    zero_variance_frac: float
    num_steps: float
    against_best: Difference | None


@dataclass(frozen=True, slots=True)
class Targets:
    """What the methods of a task are held to. own: the target that follows from each baseline's final accuracy; target
    is the best one's. budgets: shares of the best baseline's mean total, in FLOPs.
    """

    best: str
    accuracy: float
    target: float
    frac_target: float
    own: Mapping[str, float]
    budgets: Mapping[LedgerKind, tuple[float, ...]]


@dataclass(frozen=True, slots=True)
class _Marks:
    """FLOPs at which the best baseline reaches the target, the least that any baseline needs for it, and those at which
    each reaches its own.
    """

    best: float | None
    cheapest: float | None
    own: Mapping[str, float | None]


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
    totals = {
        LedgerKind.PAPER: _mean(r.ledger.paper_flops for r in by_method[best]),
        LedgerKind.ITEMISED: _mean(r.ledger.itemised_flops for r in by_method[best]),
    }
    return Targets(
        best=best,
        accuracy=accuracy_of[best],
        target=accuracy_of[best] - study.margin,
        frac_target=accuracy_of[best] * study.target_frac,
        own={name: accuracy - study.margin for name, accuracy in accuracy_of.items()},
        budgets={kind: tuple(frac * total for frac in study.budget_fracs) for kind, total in totals.items()},
    )


def read_task(task: str, results: Sequence[RunResult], study: StudyConfig, targets: Targets) -> TaskReading:
    """Read one task's finished runs; methods in the study's order, those without a run left out."""
    groups = {name: [r for r in results if r.cell.method == name] for name in study.methods}
    best = groups[targets.best]
    baselines = {name: groups[name] for name in study.baselines if groups[name]}
    marks = {kind: _marks(baselines, kind, targets) for kind in LedgerKind}
    return TaskReading(
        task=task,
        num_questions=len(best[0].questions.num_correct_Q),
        targets=targets,
        methods=tuple(_read_method(name, runs, best, targets, marks) for name, runs in groups.items() if runs),
    )


def target_columns(result: RunResult, targets: Targets | None, study: StudyConfig) -> dict[str, Any]:
    """The columns of study.csv that hold a run against its task's targets; empty while there are none."""
    paper, itemised = (result.curve(kind) for kind in LedgerKind)
    columns: dict[str, Any] = {
        "target_accuracy": targets and targets.target,
        "flops_to_target": targets and paper.stays_above(targets.target),
        "flops_to_target_itemised": targets and itemised.stays_above(targets.target),
        "flops_to_frac_target": targets and paper.stays_above(targets.frac_target),
        "flops_to_frac_target_itemised": targets and itemised.stays_above(targets.frac_target),
    }
    for i, frac in enumerate(study.budget_fracs):
        columns[f"accuracy_at_{100 * frac:g}pct"] = targets and paper.at(targets.budgets[LedgerKind.PAPER][i])
    for i, frac in enumerate(study.budget_fracs):
        column = f"accuracy_at_{100 * frac:g}pct_itemised"
        columns[column] = targets and itemised.at(targets.budgets[LedgerKind.ITEMISED][i])
    return columns


def question_matrix(runs: Sequence[RunResult]) -> np.ndarray:
    """Final accuracy by run and question, [R, Q]; NaN where a run has no judged sample.

    Raises UserError where two of them were asked other questions.
    """
    odd = [run for run in runs if run.questions.digest != runs[0].questions.digest]
    if odd:
        raise UserError(
            f"{odd[0].cell.name} was evaluated on other questions than {runs[0].cell.name}: their accuracies cannot be "
            "compared"
        )
    return np.stack([run.questions.accuracies() for run in runs])


def _read_method(
    name: str,
    runs: Sequence[RunResult],
    best: Sequence[RunResult],
    targets: Targets,
    marks: Mapping[LedgerKind, _Marks],
) -> MethodReading:
    counts = [[run.ledger.tokens[stage] for stage in CHARGED] for run in runs]
    return MethodReading(
        method=name,
        seeds=tuple(run.cell.seed for run in runs),
        final=seed_interval([run.final_accuracy for run in runs]),
        costs={kind: _cost(runs, kind, targets, marks[kind]) for kind in LedgerKind},
        generated_tokens=_mean(sum(count.generated for count in stages) for stages in counts),
        trained_tokens=_mean(sum(count.trained for count in stages) for stages in counts),
        zero_variance_frac=_mean(run.zero_variance_frac for run in runs),
        num_steps=_mean(run.num_steps for run in runs),
        against_best=None if name == targets.best else _against(tuple(runs), tuple(best)),
    )


@cache  # most methods have no new run since the last table
def _against(runs: tuple[RunResult, ...], best: tuple[RunResult, ...]) -> Difference:
    """Over the questions that every run of both has a judged sample of."""
    accuracy_RQ = question_matrix([*runs, *best])
    accuracy_RQ = accuracy_RQ[:, ~np.isnan(accuracy_RQ).any(axis=0)]
    return paired_bootstrap(accuracy_RQ[: len(runs)], accuracy_RQ[len(runs) :])


def _marks(baselines: Mapping[str, Sequence[RunResult]], kind: LedgerKind, targets: Targets) -> _Marks:
    curves = {name: mean_curve(_curves(runs, kind)) for name, runs in baselines.items()}
    found = {name: curve.stays_above(targets.target) for name, curve in curves.items()}
    return _Marks(
        best=found[targets.best],
        cheapest=min((flops for flops in found.values() if flops is not None), default=None),
        own={name: curve.stays_above(targets.own[name]) for name, curve in curves.items()},
    )


def _cost(runs: Sequence[RunResult], kind: LedgerKind, targets: Targets, marks: _Marks) -> Cost:
    trees = [run.ledger.to_dict() for run in runs]
    curve = mean_curve(_curves(runs, kind))
    to_target = curve.stays_above(targets.target)
    return Cost(
        total=_mean(tree["total"][kind]["flops"] for tree in trees),
        stages={stage: _mean(tree["stages"][stage][kind]["flops"] for tree in trees) for stage in CHARGED},
        to_target=to_target,
        to_frac=curve.stays_above(targets.frac_target),
        saving=_ratio(marks.best, to_target),
        saving_cheapest=_ratio(marks.cheapest, to_target),
        savings={name: _ratio(mark, curve.stays_above(targets.own[name])) for name, mark in marks.own.items()},
        at_budgets=tuple(curve.at(budget) for budget in targets.budgets[kind]),
    )


def _ratio(mark: float | None, flops: float | None) -> float | None:
    return mark / flops if mark is not None and flops else None


def _curves(runs: Sequence[RunResult], kind: LedgerKind) -> list[Curve]:
    return [run.curve(kind) for run in runs]


def _mean(values: Any) -> float:
    return float(np.mean(list(values)))
