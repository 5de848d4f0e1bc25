"""`launch study`: profiles, tuning runs, final runs, and after each the tables; started again, it goes on."""

from collections.abc import Callable, Sequence
from contextlib import closing
from pathlib import Path

from filelock import FileLock, Timeout

from sgpo_jax import profiling
from sgpo_jax.study.cells import Cell, Protocol, State
from sgpo_jax.study.config import StudyConfig
from sgpo_jax.study.figures import check_matplotlib
from sgpo_jax.study.questions import check_disjoint
from sgpo_jax.study.report import Report
from sgpo_jax.study.results import settings_text
from sgpo_jax.study.tuning import choose, read_choices, waiting_lines
from sgpo_jax.study.workers import LOCK, Outcome, Worker, make_workers, run_cells
from sgpo_jax.telemetry import progress, say, show_table
from sgpo_jax.types import MachineError, UserError


def conduct(study: StudyConfig, study_file: Path) -> None:
    """Run what is not done yet. Raises MachineError at the end where runs failed, naming them and their logs."""
    check_matplotlib()
    protocol = Protocol(study, study_file)
    check_disjoint(protocol)
    workers = make_workers(study.num_workers, study.cpus_per_worker)
    directory = Path(study.study_dir)
    directory.mkdir(parents=True, exist_ok=True)
    try:
        with FileLock(directory / LOCK, timeout=0):
            failed = _conduct(protocol, Report(protocol), workers)
    except Timeout:
        raise UserError(f"study_dir={directory}: another study is running in it; wait for it or name another") from None
    if failed:
        named = ", ".join(f"{outcome.cell.name} ({outcome.cell.log})" for outcome in failed)
        raise MachineError(f"{len(failed)} runs failed: {named}; the same command tries them again")


def _conduct(protocol: Protocol, report: Report, workers: Sequence[Worker]) -> list[Outcome]:
    num_tuning, num_final = len(protocol.tuning_cells), len(protocol.planned)
    say(f"study: {num_tuning} tuning runs and {num_final} final runs in {protocol.study.study_dir}")
    unprofiled = _profile(protocol, [*protocol.tuning_cells, *protocol.final_cells(read_choices(protocol))], workers)
    if unprofiled:
        return unprofiled  # whatever shares them would fail too
    failed = _tune(protocol, report, workers)
    chosen = read_choices(protocol)
    for (task, method), settings in chosen.items():
        say(f"study: {task}/{method} was tuned to {settings_text(settings)}")
    final = protocol.final_cells(chosen)
    if unprofiled := _profile(protocol, final, workers):  # of settings that tuning chose
        return failed + unprofiled
    failed += _run(protocol, "runs", "run", final, workers, lambda: report.write_tables(final))
    if num_waiting := num_final - len(final):
        say(f"study: {num_waiting} final runs wait for tuning")
    _write(protocol, report, final)
    return failed


def write_report(study: StudyConfig, study_file: Path) -> None:
    """Tables and figures of what is finished, without running anything."""
    check_matplotlib()
    protocol = Protocol(study, study_file)
    report = Report(protocol)
    report.write_tuning()
    _write(protocol, report, protocol.final_cells(read_choices(protocol)))


def _write(protocol: Protocol, report: Report, final: Sequence[Cell]) -> None:
    report.write_tables(final)
    report.write_figures(final)
    say(f"study: {protocol.study.results}/summary.md, study.csv and the figures are written")


def _tune(protocol: Protocol, report: Report, workers: Sequence[Worker]) -> list[Outcome]:
    """Try the candidates of methods that are open, and choose. Returns what failed and is to be tried again."""
    chosen = read_choices(protocol)
    open_cells = [cell for cell in protocol.tuning_cells if (cell.task, cell.method) not in chosen]
    if not open_cells:
        return []
    failed = _run(protocol, "tuning", "run", open_cells, workers, report.write_tuning)
    choose(protocol, report.read)
    report.write_tuning()
    chosen = read_choices(protocol)
    for line in waiting_lines(protocol, chosen):
        say(f"study: {line}")
    return [outcome for outcome in failed if (outcome.cell.task, outcome.cell.method) not in chosen]


def _profile(protocol: Protocol, cells: Sequence[Cell], workers: Sequence[Worker]) -> list[Outcome]:
    """Make the profiles that those of these share that are not done; returns what failed."""
    waiting = [cell for cell in cells if protocol.state_of(cell) is not State.DONE]
    profiles = [cell for cell in protocol.profile_cells(waiting) if not profiling.is_complete(cell.run_dir)]
    return _run(protocol, "profiles", "profile", profiles, workers, lambda: None)


def _run(
    protocol: Protocol,
    title: str,
    command: str,
    cells: Sequence[Cell],
    workers: Sequence[Worker],
    after_each: Callable[[], None],
) -> list[Outcome]:
    """`launch COMMAND` for those that are not done; returns what failed."""
    if not cells:
        return []
    waiting = [cell for cell in cells if protocol.state_of(cell) is not State.DONE]
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
        for cell in protocol.profile_cells(cells)
    ]
    rows += [(cell.name, str(protocol.state_of(cell))) for cell in cells]
    show_table("Runs", ("run", "state"), rows)
    num_waiting = len(protocol.tuning_cells) + len(protocol.planned) - len(cells)
    num_done = sum(protocol.state_of(cell) is State.DONE for cell in cells)
    print(f"{num_done} of {len(cells) + num_waiting} runs are done; {num_waiting} wait for tuning to choose.")
