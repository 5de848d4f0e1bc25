"""summary.md: what a study found, in tables to be read."""

from collections.abc import Callable, Sequence

from sgpo_jax.algorithms.compute import Stage
from sgpo_jax.study.config import StudyConfig
from sgpo_jax.study.readings import MethodReading, TaskReading
from sgpo_jax.study.results import LedgerKind
from sgpo_jax.telemetry import format_flops

Column = tuple[str, Callable[[MethodReading], str]]


def summary(
    study: StudyConfig, readings: Sequence[TaskReading], num_runs: int, num_planned: int, chosen: Sequence[str]
) -> str:
    """Markdown. num_runs: finished ones of num_planned. chosen: a line for each tuned method and task."""
    partial = "" if num_runs == num_planned else ": what follows is partial"
    lines = ["# Study", "", f"{num_runs} of {num_planned} runs are finished{partial}.", ""]
    for reading in readings:
        lines += _task_lines(reading, study)
    if chosen:
        lines += ["## Tuned settings", "", *(f"- {line}" for line in chosen), ""]
    return "\n".join(lines)


def _task_lines(reading: TaskReading, study: StudyConfig) -> list[str]:
    targets = reading.targets
    budgets = [f"{100 * frac:.3g}%" for frac in study.budget_fracs]
    return [
        f"## {reading.task}",
        "",
        f"Accuracy is avg@k on {reading.num_questions} held-out questions. The best baseline is **{targets.best}**, "
        f"with a mean final accuracy of {targets.accuracy:.1%}; the target is that less {100 * study.margin:g} "
        f"percentage points: {targets.target:.1%}. Totals hold profiling. ± is the 95% interval over seeds.",
        "",
        "**Totals and final accuracies**",
        "",
        *_table(reading, _totals()),
        "",
        f"**FLOPs from which on the mean curve over seeds stays above the target ({targets.target:.1%})**, how many "
        f"times fewer than {targets.best}'s own curve needs, and than the baseline's that gets there for the fewest; "
        f"and FLOPs to {100 * study.target_frac:g}% of its accuracy "
        f"({targets.frac_target:.1%})",
        "",
        *_table(reading, _reaching()),
        "",
        f"**Times fewer FLOPs than each baseline's own curve** needs from which on it stays above its own final "
        f"accuracy less {100 * study.margin:g} percentage points (in brackets), by the paper's ledger / itemised",
        "",
        *_table(reading, [_against(name, target) for name, target in targets.own.items()]),
        "",
        *_budget_lines(reading, LedgerKind.PAPER, budgets),
        *_budget_lines(reading, LedgerKind.ITEMISED, budgets),
        f"**Final accuracy less {targets.best}'s**, in points: paired bootstrap over questions and seeds",
        "",
        *_table(reading, _differences()),
        "",
    ]


def _budget_lines(reading: TaskReading, kind: LedgerKind, budgets: Sequence[str]) -> list[str]:
    return [
        f"**Accuracy at equal FLOPs** ({kind} ledger; shares of {reading.targets.best}'s mean total)",
        "",
        *_table(reading, [(budget, _at_budget(kind, i)) for i, budget in enumerate(budgets)]),
        "",
    ]


def _table(reading: TaskReading, columns: Sequence[Column]) -> list[str]:
    names = ["method", "seeds", *(name for name, _ in columns)]
    rows = [[m.method, str(len(m.seeds)), *(cell(m) for _, cell in columns)] for m in reading.methods]
    return [
        f"| {' | '.join(names)} |",
        f"|---|{'---:|' * (len(names) - 1)}",
        *(f"| {' | '.join(row)} |" for row in rows),
    ]


def _totals() -> list[Column]:
    paper, itemised = LedgerKind.PAPER, LedgerKind.ITEMISED
    return [
        ("final accuracy", _final),
        ("paper FLOPs", lambda m: _flops(m.costs[paper].total)),
        ("of it profiling", lambda m: _flops(m.costs[paper].stages[Stage.PROFILING])),
        ("itemised FLOPs", lambda m: _flops(m.costs[itemised].total)),
        ("of it profiling", lambda m: _flops(m.costs[itemised].stages[Stage.PROFILING])),
        ("generated tokens", lambda m: f"{m.generated_tokens / 1e6:.2f} M"),
        ("trained tokens", lambda m: f"{m.trained_tokens / 1e6:.2f} M"),
        ("groups without variance", lambda m: f"{m.zero_variance_frac:.0%}"),
        ("steps", lambda m: f"{m.num_steps:.0f}"),
    ]


def _reaching() -> list[Column]:
    paper, itemised = LedgerKind.PAPER, LedgerKind.ITEMISED
    return [
        ("paper FLOPs", lambda m: _flops(m.costs[paper].to_target)),
        ("times fewer", lambda m: _times(m.costs[paper].saving)),
        ("than the cheapest", lambda m: _times(m.costs[paper].saving_cheapest)),
        ("itemised FLOPs", lambda m: _flops(m.costs[itemised].to_target)),
        ("times fewer", lambda m: _times(m.costs[itemised].saving)),
        ("than the cheapest", lambda m: _times(m.costs[itemised].saving_cheapest)),
        ("easier target: paper FLOPs", lambda m: _flops(m.costs[paper].to_frac)),
        ("itemised FLOPs", lambda m: _flops(m.costs[itemised].to_frac)),
    ]


def _against(baseline: str, target: float) -> Column:
    def cell(method: MethodReading) -> str:
        return " / ".join(_times(method.costs[kind].savings[baseline]) for kind in LedgerKind)

    return f"{baseline} ({target:.1%})", cell


def _differences() -> list[Column]:
    def difference(method: MethodReading) -> str:
        return f"{100 * method.against_best.mean:+.1f}" if method.against_best else "-"

    def interval(method: MethodReading) -> str:
        found = method.against_best
        return f"{100 * found.low:+.1f} to {100 * found.high:+.1f}" if found else "-"

    def p_value(method: MethodReading) -> str:
        return f"{method.against_best.p:.2g}" if method.against_best else "-"

    return [("difference", difference), ("95% interval", interval), ("p", p_value)]


def _final(method: MethodReading) -> str:
    half_width = method.final.half_width
    return f"{method.final.mean:.1%}" + (f" ± {100 * half_width:.1f}" if half_width is not None else "")


def _at_budget(kind: LedgerKind, index: int) -> Callable[[MethodReading], str]:
    return lambda method: f"{method.costs[kind].at_budgets[index]:.1%}"


def _flops(flops: float | None) -> str:
    return "never" if flops is None else format_flops(flops).removesuffix("FLOPs").strip()


def _times(saving: float | None) -> str:
    return "-" if saving is None else f"{saving:.2f}"
