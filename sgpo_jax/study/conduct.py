"""`launch study`: profiles, tuning runs, final runs, and after each the tables; started again, it goes on."""

from collections.abc import Callable, Sequence
from contextlib import closing
from pathlib import Path

from filelock import FileLock, Timeout

from sgpo_jax import profiling
from sgpo_jax.study.cells import Cell, Protocol, State, state_of
from sgpo_jax.study.config import StudyConfig
from sgpo_jax.study.figures import check_matplotlib
from sgpo_jax.study.report import Report
from sgpo_jax.study.results import settings_text
from sgpo_jax.study.tuning import choose, read_choices
from sgpo_jax.study.workers import LOCK, Outcome, run_cells, worker_cpus
from sgpo_jax.telemetry import progress, say, show_table
from sgpo_jax.types import MachineError, UserError


def conduct(study: StudyConfig, study_file: Path) -> None:
    """Run what is not done yet. Raises MachineError at the end where runs failed, naming them and their logs."""
    check_matplotlib()
    protocol = Protocol(study, study_file)
    directory = Path(study.study_dir)
    directory.mkdir(parents=True, exist_ok=True)
    try:
        with FileLock(directory / LOCK, timeout=0):
            failed = _conduct(protocol, Report(protocol))
    except Timeout:
        raise UserError(f"study_dir={directory}: another study is running in it; wait for it or name another") from None
    if failed:
        named = ", ".join(f"{outcome.cell.name} ({outcome.cell.log})" for outcome in failed)
        raise MachineError(f"{len(failed)} runs failed: {named}; the same command tries them again")


def _conduct(protocol: Protocol, report: Report) -> list[Outcome]:
    num_tuning = len(protocol.tuning_cells)
    say(f"study: {num_tuning} tuning runs and {protocol.num_final_cells()} final runs in {protocol.study.study_dir}")
    profiles = [cell for cell in protocol.profile_cells() if not profiling.is_complete(cell.run_dir)]
    failed = _run("profiles", "profile", profiles, protocol, lambda: None)
    if failed:
        return failed  # whatever shares them would fail too
    chosen = read_choices(protocol)
    open_cells = [cell for cell in protocol.tuning_cells if (cell.task, cell.method) not in chosen]
    failed = _run("tuning", "run", open_cells, protocol, report.write_tuning)
    if open_cells:
        choose(protocol, report.read)
        report.write_tuning()
        chosen = read_choices(protocol)
    for (task, method), settings in chosen.items():
        say(f"study: {task}/{method} was tuned to {settings_text(settings)}")
    final = protocol.final_cells(chosen)
    failed += _run("runs", "run", final, protocol, lambda: report.write_tables(final))
    if num_waiting := protocol.num_final_cells() - len(final):
        say(f"study: {num_waiting} final runs wait for a method of which no tuning run ended well")
    report.write_tables(final)
    report.write_figures(final)
    say(f"study: {protocol.study.study_dir}/summary.md, study.csv and the figures are written")
    return failed


def _run(
    title: str, command: str, cells: Sequence[Cell], protocol: Protocol, after_each: Callable[[], None]
) -> list[Outcome]:
    """`launch COMMAND` for those that are not done; returns what failed."""
    if not cells:
        return []
    waiting = [cell for cell in cells if state_of(cell) is not State.DONE]
    study = protocol.study
    workers = worker_cpus(study.num_workers, study.cpus_per_worker)
    failed: list[Outcome] = []
    with (
        progress(title, len(cells), done=len(cells) - len(waiting)) as bar,
        closing(run_cells(command, waiting, workers)) as outcomes,
    ):
        for outcome in outcomes:
            if outcome.exit_code:
                failed.append(outcome)
                say(f"{outcome.cell.name}: failed with exit code {outcome.exit_code}: {outcome.error}")
                say(f"  its log: {outcome.cell.log}")
            else:
                after_each()
            bar.advance(note=outcome.cell.name + (f"; {len(failed)} failed" if failed else ""))
    return failed


def show_cells(study: StudyConfig, study_file: Path) -> None:
    """List every run with its state, on standard output."""
    protocol = Protocol(study, study_file)
    chosen = read_choices(protocol)
    cells = [*protocol.tuning_cells, *protocol.final_cells(chosen)]
    rows = [
        (cell.name, "complete" if profiling.is_complete(cell.run_dir) else "not complete")
        for cell in protocol.profile_cells()
    ]
    rows += [(cell.name, str(state_of(cell))) for cell in cells]
    show_table("Runs", ("run", "state"), rows)
    num_waiting = len(protocol.tuning_cells) + protocol.num_final_cells() - len(cells)
    num_done = sum(state_of(cell) is State.DONE for cell in cells)
    print(f"{num_done} of {len(cells) + num_waiting} runs are done; {num_waiting} wait for tuning to choose.")
