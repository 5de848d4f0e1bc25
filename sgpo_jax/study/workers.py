"""Runs side by side, each in a process of its own, all ended with this one."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from pathlib import Path

from filelock import FileLock, Timeout

from sgpo_jax.files import write_json
from sgpo_jax.study.cells import Cell
from sgpo_jax.study.child import GRACE_S

_POLL_S = 0.2
CHILD = (sys.executable, "-m", "sgpo_jax.study.child")
_ALL: tuple[int, ...] = ()
LOCK = ".lock"  # of a run directory, and of a study's


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a run's process ended. error: in one line, why it failed; empty where it did not."""

    cell: Cell
    exit_code: int
    error: str


@dataclass(frozen=True, slots=True)
class _Running:
    cell: Cell
    process: subprocess.Popen[bytes]
    cpus: tuple[int, ...]


def worker_cpus(num_workers: int, cpus_per_worker: int | None) -> list[tuple[int, ...]]:
    """The CPUs of each worker; empty where the system cannot keep a process to some. Too few are shared in turn."""
    if not hasattr(os, "sched_getaffinity"):
        return [_ALL] * num_workers
    cpus = sorted(os.sched_getaffinity(0))
    count = min(len(cpus), cpus_per_worker or max(1, len(cpus) // num_workers))
    return [tuple(cpus[(worker * count + i) % len(cpus)] for i in range(count)) for worker in range(num_workers)]


def run_cells(command: str, cells: Sequence[Cell], workers: Sequence[tuple[int, ...]]) -> Generator[Outcome]:
    """`launch COMMAND` for every cell, as many at a time as there are workers; outcomes as they come.

    Close the generator (contextlib.closing) to end what still runs; whatever ends this process ends it too.
    """
    waiting, free = list(cells), list(workers)
    running: list[_Running] = []
    try:
        while waiting or running:
            while waiting and free:
                running.append(_start(command, waiting.pop(0), free.pop(0)))
            ended = next((run for run in running if run.process.poll() is not None), None)
            if ended is None:
                time.sleep(_POLL_S)
                continue
            running.remove(ended)
            free.append(ended.cpus)
            code = ended.process.returncode
            yield Outcome(ended.cell, code, _reason(code, ended.cell.log) if code else "")
    finally:
        _end([run.process for run in running])


def _start(command: str, cell: Cell, cpus: tuple[int, ...]) -> _Running:
    write_json(cell.config_file, cell.config.model_dump(mode="json"))
    _wait_for_lock(cell.run_dir)
    words = [*CHILD, str(os.getpid()), ",".join(map(str, cpus))]
    with cell.log.open("ab") as log:
        process = subprocess.Popen(
            [*words, command, str(cell.config_file)],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # an interrupt at the terminal comes to it through this process, once
        )
    return _Running(cell, process, cpus)


def _wait_for_lock(run_dir: Path) -> None:
    """A study that was killed a moment ago may still have a run there, which notices and ends."""
    if run_dir.exists():
        with contextlib.suppress(Timeout), FileLock(run_dir / LOCK, timeout=2 * GRACE_S):
            pass  # where it lasts, the run itself says so and fails


def _end(processes: Sequence[subprocess.Popen[bytes]]) -> None:
    """Interrupt them, so that each ends what it has started; kill those that take too long."""
    for process in processes:
        process.send_signal(signal.SIGINT)
    deadline = time.monotonic() + GRACE_S
    for process in processes:
        try:
            process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait(GRACE_S)


def _reason(exit_code: int, log: Path) -> str:
    if exit_code < 0:
        return f"ended by signal {-exit_code}"
    lines = [line.strip() for line in log.read_text(encoding="utf-8", errors="replace").splitlines() if line.strip()]
    errors = [line for line in lines if line.startswith("error: ")]
    return (errors or lines or [""])[-1].removeprefix("error: ")
