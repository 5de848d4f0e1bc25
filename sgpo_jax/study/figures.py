"""The figures of a study, as PNG and SVG: accuracy against cumulative FLOPs by either ledger, and accuracy by phase."""

import io
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from sgpo_jax.files import write_bytes
from sgpo_jax.study.curves import accuracies
from sgpo_jax.study.readings import Targets
from sgpo_jax.study.results import LedgerKind, RunResult
from sgpo_jax.telemetry import format_flops
from sgpo_jax.types import UserError

# Okabe and Ito's colours, told apart by colour-blind readers; the dashes tell them apart in print, and beyond eight.
_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#7F7F7F")
_DASHES = ("-", "--", "-.", ":")
_NUM_POINTS = 100  # of a curve with its band
_STYLE: dict[Any, Any] = {
    "font.size": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.color": "#E5E5E5",
    "svg.fonttype": "none",
    "svg.hashsalt": "study",
}


def check_matplotlib() -> None:
    """Raises UserError where the extra `study` is not installed."""
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise UserError("the figures of a study need matplotlib: pip install 'sgpo-jax[study]'") from None


def write_figures(
    directory: Path, tasks: Mapping[str, Sequence[RunResult]], targets: Mapping[str, Targets], methods: Sequence[str]
) -> None:
    """accuracy, accuracy-itemised and phases, each .png and .svg. tasks: finished runs by task; methods: those to
    show, in their order.
    """
    import matplotlib as mpl
    from matplotlib.figure import Figure

    with mpl.rc_context(_STYLE):
        for name, draw, height in (
            ("accuracy", partial(_draw_curves, LedgerKind.PAPER), 3.6),
            ("accuracy-itemised", partial(_draw_curves, LedgerKind.ITEMISED), 3.6),
            ("phases", _draw_phases, 3.2),
        ):
            figure = Figure(figsize=(8.0, height * len(tasks)), layout="constrained")
            axes = figure.subplots(len(tasks), 1, squeeze=False)[:, 0]
            for axis, (task, results) in zip(axes, tasks.items(), strict=True):
                runs = {m: own for m in methods if (own := [r for r in results if r.cell.method == m])}
                axis.set_title(task, loc="left", fontweight="bold")
                axis.set_ylabel("held-out accuracy (%)")
                draw(axis, runs, targets[task], methods)
            _save(figure, directory / f"{name}.png", dpi=120)
            # Without its date, so that equal results are equal files.
            _save(figure, directory / f"{name}.svg", metadata={"Date": None})


def _save(figure: Any, path: Path, **options: Any) -> None:
    sink = io.BytesIO()
    figure.savefig(sink, format=path.suffix[1:], **options)
    write_bytes(path, sink.getvalue())


def _draw_curves(
    kind: LedgerKind, axis: Any, runs: dict[str, list[RunResult]], targets: Targets, methods: Sequence[str]
) -> None:
    """Mean and range over seeds, each method as far as its shortest run."""
    for method, own in runs.items():
        curves = [run.curve(kind) for run in own]
        end = min(curve.flops_N[-1] for curve in curves)
        flops_N = np.linspace(max(curve.flops_N[0] for curve in curves), end, _NUM_POINTS)
        values = 100 * accuracies(curves, flops_N)
        colour, dash = _look(method, methods)
        axis.plot(flops_N, values.mean(0), color=colour, linestyle=dash, linewidth=1.6, label=method)
        if len(own) > 1:
            axis.fill_between(flops_N, values.min(0), values.max(0), color=colour, alpha=0.15, linewidth=0)
    axis.axhline(100 * targets.target, color="#444444", linewidth=0.8, linestyle=(0, (1, 2)))
    axis.annotate(
        f"target: {targets.best} less the margin",
        (1.0, 100 * targets.target),
        xycoords=("axes fraction", "data"),
        xytext=(0, -3),
        textcoords="offset points",
        ha="right",
        va="top",
        fontsize=8,
        color="#444444",
    )
    axis.xaxis.set_major_formatter(lambda flops, _: format_flops(flops).removesuffix("FLOPs") if flops > 0 else "0")
    axis.set_xlabel(f"cumulative FLOPs, {kind} ledger, profiling included (line: mean over seeds, band: their range)")
    axis.legend(loc="center left", bbox_to_anchor=(1.0, 0.5), frameon=False)


def _draw_phases(axis: Any, runs: dict[str, list[RunResult]], targets: Targets, methods: Sequence[str]) -> None:
    """The mean accuracy at the start and at the end of each phase, method beside method; small dots are seeds."""
    ticks: dict[int, str] = {}
    place = 0
    for method, own in runs.items():
        names = ["start", *own[0].phase_ends]
        values = 100 * np.array([_at_phase_ends(run, names) for run in own])
        places = np.arange(place, place + len(names))
        colour, dash = _look(method, methods)
        axis.plot(places, values.mean(0), color=colour, linestyle=dash, marker="o", markersize=4, linewidth=1.4)
        axis.plot(places, values.T, color=colour, linestyle="", marker=".", markersize=3, alpha=0.5)
        axis.annotate(
            method,
            (places.mean(), 1.0),
            xycoords=("data", "axes fraction"),
            ha="center",
            va="bottom",
            color=colour,
            fontsize=8,
        )
        ticks |= dict(zip(places.tolist(), names, strict=True))
        place += len(names) + 1
    axis.set_xticks(list(ticks), list(ticks.values()), rotation=60, ha="right", rotation_mode="anchor", fontsize=7)
    axis.title.set_position((0, 1))
    axis.set_title(axis.get_title(loc="left"), loc="left", fontweight="bold", pad=18)
    axis.grid(axis="x", visible=False)


def _at_phase_ends(run: RunResult, names: Sequence[str]) -> list[float]:
    """Linear between evaluations. A phase that this run did not have keeps the accuracy of the one before."""
    curve = run.curve(LedgerKind.PAPER)
    values = [float(curve.accuracy_N[0])]
    for name in names[1:]:
        values.append(curve.at(run.phase_ends[name]) if name in run.phase_ends else values[-1])
    return values


def _look(method: str, methods: Sequence[str]) -> tuple[str, str]:
    index = list(methods).index(method)
    return _COLOURS[index % len(_COLOURS)], _DASHES[(index + index // len(_COLOURS)) % len(_DASHES)]
