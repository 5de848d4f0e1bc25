"""Judgements in processes that can be killed, so that no answer can hang, crash or starve the run.

One thread of the parent serves each worker over a pipe of its own: nothing is shared between workers, so one that
is killed at any moment disturbs no other. (pebble's pool was tried: all of its workers share one pipe and its locks,
and it breaks for good when an idle worker is killed.)
"""

import contextlib
import multiprocessing
import os
import queue
import signal
import threading
import time
from collections.abc import Iterable
from concurrent.futures import Future
from multiprocessing.connection import Connection
from typing import Any

from sgpo_jax.config import RewardsConfig
from sgpo_jax.rewards import worker
from sgpo_jax.rewards.worker import Request
from sgpo_jax.types import Judgement, MachineError, Query, Verdict

MAX_CHARS = 200_000
"""Longer completions are judged by their last MAX_CHARS characters: answers stand at the end."""
LOAD_LIMIT_S = 60.0
"""For a worker to start and to import a custom verifier; not charged to the answer."""
GRACE_S = 1.0
"""Beyond the time limit that the worker sets itself, before the parent kills it."""
MAX_JUDGEMENTS = 5000
"""A worker is renewed after so many: the parser's tables grow with what it has seen."""
ATTEMPTS = 3
"""A worker may be killed from outside while it judges an innocent answer, so that one is judged again."""


class WorkerLostError(Exception):
    """The worker ended, or never answered, for another reason than the time limit."""


class VerifierPool:
    """Judges completions in `num_workers` processes, each answer within `time_limit_s` and `memory_limit_mb`.

    Workers start by forkserver (spawn where there is none): never a fork of a process that runs JAX. Every method may
    be called from any thread. Workers end with this process, even if it is killed: an idle one sees its pipe close, a
    busy one is ended by the kernel's timer.
    """

    def __init__(self, config: RewardsConfig) -> None:
        self._config = config
        self._jobs: queue.SimpleQueue[tuple[Request, Future[Judgement]] | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._is_closed = False
        self._context = _context()
        self._workers = [_Worker(self._context, config) for _ in range(config.num_workers)]
        self._threads = [
            threading.Thread(target=self._serve, args=(index,), name=f"verifier-{index}", daemon=True)
            for index in range(config.num_workers)
        ]
        for thread in self._threads:
            thread.start()

    def __enter__(self) -> "VerifierPool":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def submit(self, query: Query, text: str) -> "Future[Judgement]":
        """Judge the completion `text` of `query`.

        The future's result is always a Judgement: what could not be judged (time, memory, a crash, an exception or a
        wrong return value of the verifier) is Verdict.ERROR with the reason in `detail`. Raises MachineError only
        when the pool is closed.
        """
        request = Request(query.kind, query.gold, text[-MAX_CHARS:], dict(query.metadata))
        future: Future[Judgement] = Future()
        with self._lock:
            if self._is_closed:
                raise MachineError("the verifier pool is closed: no more answers can be judged")
            self._jobs.put((request, future))
        return future

    def close(self) -> None:
        """End all workers now. Answers that still wait are cancelled. May be called twice."""
        with self._lock:
            self._is_closed = True
        with contextlib.suppress(queue.Empty):
            while job := self._jobs.get_nowait():
                job[1].cancel()
        for _ in self._threads:
            self._jobs.put(None)
        for handle in self._workers:
            handle.kill()
        for thread in self._threads:
            thread.join(LOAD_LIMIT_S)
        for handle in self._workers:  # one that its thread was just starting
            handle.kill()

    def _serve(self, index: int) -> None:
        while (job := self._jobs.get()) is not None:
            request, future = job
            if not future.set_running_or_notify_cancel():
                continue
            try:
                future.set_result(self._judge(index, request))
            except Exception as error:  # no process to be had; the next answer tries again
                future.set_result(_error(f"no worker could be started: {error}"))

    def _judge(self, index: int, request: Request) -> Judgement:
        reason = ""
        for _ in range(ATTEMPTS):
            try:
                judgement = self._workers[index].judge(request)
            except TimeoutError:
                judgement = _error(f"not judged within {self._config.time_limit_s:g} s")
            except WorkerLostError as error:
                reason = str(error)
                self._renew(index)
                continue
            except Exception as error:  # metadata that cannot be sent
                return _error(f"{type(error).__name__}: {error}")
            if self._workers[index].is_spent:
                self._renew(index)
            return judgement
        return _error(reason)

    def _renew(self, index: int) -> None:
        self._workers[index].kill()
        with self._lock:
            if not self._is_closed:
                self._workers[index] = _Worker(self._context, self._config)


class _Worker:
    """The parent's end of one worker process."""

    def __init__(self, context: Any, config: RewardsConfig) -> None:
        self._limit_s = config.time_limit_s
        self._num_judged = 0
        self._is_killed = False
        self._pipe: Connection
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=worker.run, args=(theirs, config), name="verifier", daemon=True)
        self._process.start()
        theirs.close()

    @property
    def is_spent(self) -> bool:
        return self._is_killed or self._num_judged >= MAX_JUDGEMENTS

    def judge(self, request: Request) -> Judgement:
        """Raises TimeoutError and WorkerLostError; the worker is of no more use then."""
        self._num_judged += 1
        begin = time.monotonic()
        try:
            self._pipe.send(request)
            self._receive(LOAD_LIMIT_S)  # the worker has the verifier, and sets its timer
            begin = time.monotonic()
            return self._receive(self._limit_s + GRACE_S)
        except (EOFError, OSError) as error:
            elapsed_s = time.monotonic() - begin
            self.kill()
            if isinstance(error, TimeoutError) or elapsed_s >= self._limit_s:
                raise TimeoutError from None
            raise WorkerLostError(f"the verifier's process ended with exit code {self._process.exitcode}") from None

    def kill(self) -> None:
        """End the process and all that it started (its session)."""
        self._is_killed = True
        try:
            os.killpg(self._process.pid, signal.SIGKILL)
        except (ProcessLookupError, PermissionError):  # ended, or has not yet a session of its own
            self._process.kill()
        self._process.join(GRACE_S)

    def _receive(self, limit_s: float) -> Any:
        if not self._pipe.poll(limit_s):
            raise TimeoutError
        return self._pipe.recv()


def judge_all(pool: VerifierPool, pairs: Iterable[tuple[Query, str]]) -> list[Judgement]:
    """The judgements of (query, completion) pairs, in their order."""
    futures = [pool.submit(query, text) for query, text in pairs]
    return [future.result() for future in futures]


def _context() -> Any:
    if "forkserver" not in multiprocessing.get_all_start_methods():
        return multiprocessing.get_context("spawn")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["sgpo_jax.rewards.preload"])
    return context


def _error(reason: str) -> Judgement:
    return Judgement(Verdict.ERROR, detail=reason)
