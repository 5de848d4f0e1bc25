"""Which candidate of the grid each tuned method takes on each task: decided once, and kept in tuning.json."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from sgpo_jax.files import read_json, write_json
from sgpo_jax.study.cells import Cell, Protocol, State, state_of
from sgpo_jax.study.config import Settings
from sgpo_jax.study.results import RunResult, settings_text
from sgpo_jax.types import UserError

ReadCell = Callable[[Cell], RunResult]


def read_choices(protocol: Protocol) -> dict[tuple[str, str], Settings]:
    """What was chosen so far. Raises UserError where it was chosen from another grid."""
    path = _path(protocol)
    if not path.exists():
        return {}
    chosen = {}
    for task, methods in read_json(path).items():
        for method, choice in methods.items():
            if choice["settings"] not in protocol.candidates:
                raise UserError(
                    f"{path}: {task}/{method} was chosen from another grid ({settings_text(choice['settings'])}); set "
                    "the grid back, or name another study_dir"
                )
            chosen[task, method] = choice["settings"]
    return chosen


def choose(protocol: Protocol, read: ReadCell) -> None:
    """When every candidate was tried, decide for the tasks and methods that are open, and write it down for good.

    The highest mean accuracy over the tuning seeds wins (see TuningConfig.at_flops), of equal ones the first in the
    grid. A candidate of which a run failed cannot win, and is named in the file.
    """
    path = _path(protocol)
    tree: dict[str, dict[str, Any]] = read_json(path) if path.exists() else {}
    for task in protocol.study.tasks:
        for method in protocol.tuned:
            scores = _scores(protocol, task, method, read)
            if scores and method not in tree.get(task, {}):
                best = max(scores, key=lambda number: scores[number])
                tree.setdefault(task, {})[method] = {
                    "settings": protocol.candidates[best],
                    "accuracy": scores[best],
                    "failed": [c for number, c in enumerate(protocol.candidates) if number not in scores],
                }
    write_json(path, tree)


def tuning_rows(protocol: Protocol, read: ReadCell, chosen: Mapping[tuple[str, str], Settings]) -> list[dict[str, Any]]:
    """The rows of tuning.csv: one for each finished tuning run."""
    return [
        {
            "task": cell.task,
            "method": cell.method,
            "candidate": cell.candidate,
            "settings": settings_text(settings),
            "seed": cell.seed,
            "final_accuracy": read(cell).final_accuracy,
            "compared_accuracy": _compared(protocol, read(cell)),
            "total_flops": float(read(cell).ledger.paper_flops),
            "total_flops_itemised": float(read(cell).ledger.itemised_flops),
            "chosen": chosen.get((cell.task, cell.method)) == settings,
        }
        for cell in protocol.tuning_cells
        if cell.candidate is not None and state_of(cell) is State.DONE
        for settings in [protocol.candidates[cell.candidate]]
    ]


def _scores(protocol: Protocol, task: str, method: str, read: ReadCell) -> dict[int, float]:
    """The mean over the seeds by candidate, of those whose every run is done."""
    cells: dict[int, list[Cell]] = {}
    for cell in protocol.tuning_cells:
        if (cell.task, cell.method) == (task, method) and cell.candidate is not None:
            cells.setdefault(cell.candidate, []).append(cell)
    return {
        number: float(np.mean([_compared(protocol, read(cell)) for cell in group]))
        for number, group in cells.items()
        if all(state_of(cell) is State.DONE for cell in group)
    }


def _compared(protocol: Protocol, result: RunResult) -> float:
    tuning = protocol.study.tuning
    assert tuning is not None, "there are tuning runs"
    return result.final_accuracy if tuning.at_flops is None else result.paper_curve.at(tuning.at_flops)


def _path(protocol: Protocol) -> Path:
    return Path(protocol.study.study_dir) / "tuning.json"
