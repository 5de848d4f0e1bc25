"""The tables and figures of a study, written anew after each of its runs, from the runs that are finished."""

from collections.abc import Sequence

from sgpo_jax.files import write_text
from sgpo_jax.study.cells import Cell, Protocol, State
from sgpo_jax.study.figures import write_figures
from sgpo_jax.study.readings import Targets, read_task, target_columns, targets_of
from sgpo_jax.study.results import (
    RunResult,
    curve_rows,
    from_record,
    read_result,
    run_row,
    settings_text,
    to_record,
    write_csv,
    write_parquet,
)
from sgpo_jax.study.summary import summary
from sgpo_jax.study.tuning import read_choices, tuning_rows


class Report:
    """Reads each finished run once."""

    def __init__(self, protocol: Protocol) -> None:
        self._protocol = protocol
        self._dir = protocol.study.results
        self._results: dict[str, RunResult] = {}

    def read(self, cell: Cell) -> RunResult:
        """From its record; of a run that has none yet, from its directory, and a record of it is kept."""
        if cell.name not in self._results:
            self._results[cell.name] = self._read(cell)
        return self._results[cell.name]

    def _read(self, cell: Cell) -> RunResult:
        records = self._protocol.records
        if (record := records.find(cell.name)) is not None:
            return from_record(cell, record, records.where(cell.name))
        result = read_result(cell, self._protocol.evaluation_set(cell.config))
        records.keep(to_record(result))
        return result

    def write_tuning(self) -> None:
        """tuning.csv"""
        rows = tuning_rows(self._protocol, self.read, read_choices(self._protocol))
        if rows:
            write_csv(self._dir / "tuning.csv", rows)

    def write_tables(self, cells: Sequence[Cell]) -> None:
        """study.csv, study.parquet, curves.csv, summary.md, of those final runs that are finished."""
        by_task, targets = self._finished(cells)
        rows = [
            run_row(run) | target_columns(run, targets.get(task), self._protocol.study)
            for task, runs in by_task.items()
            for run in runs
        ]
        if rows:
            write_csv(self._dir / "study.csv", rows)
            write_parquet(self._dir / "study.parquet", rows)
            write_csv(self._dir / "curves.csv", curve_rows(run for runs in by_task.values() for run in runs))
            write_text(self._dir / "summary.md", self._summary(by_task, targets))

    def write_figures(self, cells: Sequence[Cell]) -> None:
        """Of the tasks that have a baseline to be held to."""
        study = self._protocol.study
        by_task, targets = self._finished(cells)
        shown = {task: runs for task, runs in by_task.items() if task in targets}
        if shown:
            roots = [name for name, method in study.methods.items() if method.like is None]
            write_figures(self._dir, shown, targets, study.figure_methods or roots)

    def _finished(self, cells: Sequence[Cell]) -> tuple[dict[str, list[RunResult]], dict[str, Targets]]:
        """The finished runs of each task, in the order of the study file, and what they are held to, where there is a
        baseline among them."""
        study = self._protocol.study
        methods = list(study.methods)
        done = [cell for cell in cells if self._protocol.state_of(cell) is State.DONE]
        done.sort(key=lambda cell: (methods.index(cell.method), cell.seed))
        by_task = {task: [self.read(cell) for cell in done if cell.task == task] for task in study.tasks}
        targets = {task: targets_of(runs, study) for task, runs in by_task.items()}
        return by_task, {task: found for task, found in targets.items() if found is not None}

    def _summary(self, by_task: dict[str, list[RunResult]], targets: dict[str, Targets]) -> str:
        study = self._protocol.study
        readings = [read_task(task, by_task[task], study, targets[task]) for task in targets]
        chosen = [
            f"{task}, {method}: {settings_text(settings)}"
            for (task, method), settings in read_choices(self._protocol).items()
        ]
        return summary(study, readings, sum(map(len, by_task.values())), len(self._protocol.planned), chosen)
