"""Which candidate of the grid each tuned method takes on each task: decided once, and kept in tuning.json."""

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from sgpo_jax.config import binding_settings
from sgpo_jax.files import read_json, write_json
from sgpo_jax.study.cells import Cell, Protocol, State
from sgpo_jax.study.config import Settings, TuningConfig
from sgpo_jax.study.results import LedgerKind, RunResult, settings_text
from sgpo_jax.types import UserError

ReadCell = Callable[[Cell], RunResult]


def read_choices(protocol: Protocol) -> dict[tuple[str, str], Settings]:
    """What was chosen so far. Raises UserError where the study file has changed what that was chosen from."""
    path = _path(protocol)
    if not path.exists():
        return {}
    tree = read_json(path)
    chosen = {}
    for task, method in _tuned(protocol):
        choice = tree.get(task, {}).get(method)
        if choice is None:
            continue
        if choice.get("digest") != _digest(protocol, task, method):
            raise UserError(
                f"{path}: {task}/{method} was tuned with another grid, seeds or settings; set them back, name another "
                "results_dir, or take its entry out of that file to tune it again"
            )
        chosen[task, method] = choice["settings"]
    return chosen


def choose(protocol: Protocol, read: ReadCell) -> None:
    """When every candidate was tried, decide for the tasks and methods that are open, and write it down for good.

    The highest mean accuracy over the tuning seeds wins (see TuningConfig.at_flops), of equal ones the first in the
    grid. Where a run failed, the method stays open; with tuning.accept_failures its candidate cannot win, and is named
    in the file.
    """
    path = _path(protocol)
    tree: dict[str, dict[str, Any]] = read_json(path) if path.exists() else {}
    for task, method in _tuned(protocol):
        if method in tree.get(task, {}):
            continue
        scores = _scores(protocol, task, method, read)
        failed = [candidate for number, candidate in enumerate(protocol.candidates) if number not in scores]
        if not scores or (failed and not _tuning(protocol).accept_failures):
            continue
        best = max(scores, key=lambda number: scores[number])
        tree.setdefault(task, {})[method] = {
            "settings": protocol.candidates[best],
            "accuracy": scores[best],
            "failed": failed,
            "digest": _digest(protocol, task, method),
        }
    write_json(path, tree)


def waiting_lines(protocol: Protocol, chosen: Mapping[tuple[str, str], Settings]) -> list[str]:
    """Why each method that is still open is."""
    way_out = "" if _tuning(protocol).accept_failures else "; tuning.accept_failures=true decides without them"
    lines = []
    for task, method in _tuned(protocol):
        if (task, method) not in chosen:
            cells = _cells_of(protocol, task, method)
            num_failed = sum(protocol.state_of(cell) is not State.DONE for cell in cells)
            lines.append(
                f"{task}/{method} is not tuned yet, and its final runs wait: {num_failed} of its {len(cells)} tuning "
                f"runs are not done; the same command tries these again{way_out}"
            )
    return lines


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
        if cell.candidate is not None and protocol.state_of(cell) is State.DONE
        for settings in [protocol.candidates[cell.candidate]]
    ]


def _scores(protocol: Protocol, task: str, method: str, read: ReadCell) -> dict[int, float]:
    """The mean over the seeds by candidate, of those whose every run is done."""
    cells = _cells_of(protocol, task, method)
    groups = {number: [c for c in cells if c.candidate == number] for number in range(len(protocol.candidates))}
    return {
        number: float(np.mean([_compared(protocol, read(cell)) for cell in group]))
        for number, group in groups.items()
        if all(protocol.state_of(cell) is State.DONE for cell in group)
    }


def _digest(protocol: Protocol, task: str, method: str) -> str:
    """Of all that a choice depends on: the candidates, seeds and settings of its runs, and how they are compared."""
    tuning = _tuning(protocol)
    cells = [
        [cell.candidate, cell.seed, protocol.evaluation_set(cell.config), binding_settings(cell.config)]
        for cell in _cells_of(protocol, task, method)
    ]
    everything = [protocol.candidates, tuning.at_flops, cells]
    return hashlib.blake2b(json.dumps(everything, sort_keys=True).encode(), digest_size=16).hexdigest()


def _cells_of(protocol: Protocol, task: str, method: str) -> Sequence[Cell]:
    return [cell for cell in protocol.tuning_cells if (cell.task, cell.method) == (task, method)]


def _tuned(protocol: Protocol) -> list[tuple[str, str]]:
    return [(task, method) for task in protocol.study.tasks for method in protocol.tuned]


def _compared(protocol: Protocol, result: RunResult) -> float:
    at_flops = _tuning(protocol).at_flops
    return result.final_accuracy if at_flops is None else result.curve(LedgerKind.PAPER).at(at_flops)


def _tuning(protocol: Protocol) -> TuningConfig:
    assert protocol.study.tuning is not None, "there are tuned methods"
    return protocol.study.tuning


def _path(protocol: Protocol) -> Path:
    return protocol.study.results / "tuning.json"
