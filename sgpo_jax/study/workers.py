"""Runs side by side, each in a process of its own, all ended with this one."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from filelock import FileLock, Timeout

from sgpo_jax.files import write_json
from sgpo_jax.rollouts.placement import num_gpus, visible_devices
from sgpo_jax.study.cells import Cell
from sgpo_jax.study.child import GRACE_S
from sgpo_jax.types import UserError

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
class Worker:
    """What one run at a time is kept to. cpus: empty for all. gpus: CUDA_VISIBLE_DEVICES; None for this process's."""

    cpus: tuple[int, ...] = _ALL
    gpus: str | None = None


@dataclass(frozen=True, slots=True)
class _Running:
    """log_start: bytes of the log that earlier attempts wrote."""

    cell: Cell
    process: subprocess.Popen[bytes]
    worker: Worker
    log_start: int


def make_workers(num_workers: int, cpus_per_worker: int | None) -> list[Worker]:
    """Shares of this process's CPUs and GPUs. Raises UserError where there are GPUs, and fewer than workers."""
    cpus, gpus = worker_cpus(num_workers, cpus_per_worker), worker_gpus(num_workers, os.environ, num_gpus(os.environ))
    return [Worker(*share) for share in zip(cpus, gpus, strict=True)]


def worker_cpus(num_workers: int, cpus_per_worker: int | None) -> list[tuple[int, ...]]:
    """The CPUs of each worker; empty where the system cannot keep a process to some. Too few are shared in turn."""
    if not hasattr(os, "sched_getaffinity"):
        return [_ALL] * num_workers
    cpus = sorted(os.sched_getaffinity(0))
    count = min(len(cpus), cpus_per_worker or max(1, len(cpus) // num_workers))
    return [tuple(cpus[(worker * count + i) % len(cpus)] for i in range(count)) for worker in range(num_workers)]


def worker_gpus(num_workers: int, environment: Mapping[str, str], count: int) -> list[str | None]:
    """CUDA_VISIBLE_DEVICES of each worker, equal shares of the `count` GPUs that this process sees; None: as it is."""
    if num_workers == 1 or not count:
        return [None] * num_workers
    share = count // num_workers
    if not share:
        raise UserError(
            f"num_workers={num_workers}: this process sees {count} GPUs, and each run needs one of its own; lower "
            "num_workers, or hide the GPUs by an empty CUDA_VISIBLE_DEVICES"
        )
    return [visible_devices(range(i * share, (i + 1) * share), environment) for i in range(num_workers)]


def run_cells(command: str, cells: Sequence[Cell], workers: Sequence[Worker]) -> Generator[Outcome]:
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
            free.append(ended.worker)
            code = ended.process.returncode
            yield Outcome(ended.cell, code, _reason(ended) if code else "")
    finally:
        _end([run.process for run in running])


def _start(command: str, cell: Cell, worker: Worker) -> _Running:
    write_json(cell.config_file, cell.config.model_dump(mode="json"))
    _wait_for_lock(cell.run_dir)
    words = [*CHILD, str(os.getpid()), ",".join(map(str, worker.cpus))]
    gpus = {} if worker.gpus is None else {"CUDA_VISIBLE_DEVICES": worker.gpus}
    with cell.log.open("ab") as log:
        log_start = log.tell()
        process = subprocess.Popen(
            [*words, command, str(cell.config_file)],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            env={**os.environ, **gpus},
            start_new_session=True,  # an interrupt at the terminal comes to it through this process, once
        )
    return _Running(cell, process, worker, log_start)


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


def _reason(run: _Running) -> str:
    if run.process.returncode < 0:
        return f"ended by signal {-run.process.returncode}"
    printed = run.cell.log.read_bytes()[run.log_start :].decode(errors="replace")
    lines = [line.strip() for line in printed.splitlines() if line.strip()]
    errors = [line for line in lines if line.startswith("error: ")]
    return (errors or lines or [""])[-1].removeprefix("error: ")
