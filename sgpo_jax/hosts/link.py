"""What ties a process to the others: messages, questions, and the news that one has failed.

All of it goes through the key-value store of jax.distributed's coordination service, which process 0 hosts: no further
port is opened, no device waits for a message, and a process that fails can still say why. Nothing is pickled.
"""

import io
import json
import os
import socket
import sys
import threading
import time
from _thread import interrupt_main
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np

from sgpo_jax.types import MachineError, UserError

# Directories of keys: messages by number, how many each process has read; questions and answers by process and number;
# who is ready; the first failure, and who has ended since.
_MESSAGE, _READ, _QUESTION, _ANSWER, _READY, _FAILURE, _LEFT = (
    f"sgpo_jax/{name}" for name in ("message", "read", "question", "answer", "ready", "failure", "left")
)
_TIDY_EVERY = 32  # messages
_WAIT_MS = 1000  # between two looks at whether this process was interrupted
_POLL_S = 0.5
_LEAVE_S = 5.0  # longest wait of process 0, after a failure, for the others to end
_GRACE_S = 10.0  # what process 0 has to put its files in order after a failure of another
# What a program says that another process has left: JAX finds out soon, and ends this one with the better message.
_LOST = ("Gloo", "NCCL", "UNAVAILABLE", "DEADLINE_EXCEEDED")


@dataclass(frozen=True)
class Message:
    """What to do, with JSON values and arrays to do it with."""

    op: str
    values: Mapping[str, Any] = field(default_factory=dict)
    arrays: Mapping[str, np.ndarray] = field(default_factory=dict)

    def to_bytes(self) -> bytes:
        sink = io.BytesIO()
        head = json.dumps([self.op, self.values]).encode()
        arrays: dict[str, Any] = {f"array {name}": np.asarray(array) for name, array in self.arrays.items()}
        np.savez(sink, head=np.frombuffer(head, np.uint8), **arrays)
        return sink.getvalue()

    @classmethod
    def from_bytes(cls, data: bytes) -> "Message":
        with np.load(io.BytesIO(data), allow_pickle=False) as stored:
            op, values = json.loads(stored["head"].tobytes())
            return cls(op, values, {name.removeprefix("array "): stored[name] for name in stored if name != "head"})


class Link:
    """What ties this process to the others. client: jax.distributed's, of whose store only this class has keys under
    sgpo_jax/."""

    def __init__(
        self, client: Any, process_id: int, num_processes: int, *, timeout_s: float, on_one_host: bool
    ) -> None:
        self.process_id = process_id
        self.num_processes = num_processes
        self.on_one_host = on_one_host
        self.failure: MachineError | None = None  # of another process
        self.has_failed = False  # this one or another
        self._client = client
        self._timeout_s = timeout_s
        self._number = 0  # of the next message
        self._first_kept = 0
        self._num_questions = dict.fromkeys(range(1, num_processes), 0)
        self._is_over = threading.Event()
        self._threads: list[threading.Thread] = []
        self._start(self._watch_others)

    def close(self) -> None:
        """End the threads, which must not be in the midst of a call when Python ends."""
        self._is_over.set()
        for thread in self._threads:
            thread.join()

    def send(self, message: Message) -> None:
        self._client.key_value_set_bytes(f"{_MESSAGE}/{self._number}", message.to_bytes())
        self._number += 1
        if self._number % _TIDY_EVERY == 0:
            self._tidy()

    def receive(self) -> Message:
        """The next message, whenever it comes: process 0 is watched meanwhile."""
        data = None
        while data is None:
            data = self._wait_for(f"{_MESSAGE}/{self._number}")
        self._number += 1
        self._client.key_value_set(f"{_READ}/{self.process_id}", str(self._number), allow_overwrite=True)
        return Message.from_bytes(data)

    def say_ready(self) -> None:
        self._client.key_value_set(f"{_READY}/{self.process_id}", "")

    def await_ready(self, limit_s: float) -> None:
        """Until all others have said so. Raises MachineError after limit_s."""
        end = time.monotonic() + limit_s
        while len(self._client.key_value_dir_get(_READY)) < self.num_processes - 1:
            if time.monotonic() > end:
                raise MachineError(f"not all other processes were ready within {limit_s:.0f} s")
            time.sleep(_POLL_S / 5)

    def ask(self, process_id: int, what: str, values: Mapping[str, Any], limit_s: float) -> Any:
        """What `answer` says in another process: a JSON value. Raises its error, and MachineError after limit_s."""
        number = self._num_questions[process_id]
        self._num_questions[process_id] += 1
        self._client.key_value_set_bytes(f"{_QUESTION}/{process_id}/{number}", json.dumps([what, values]).encode())
        end, key = time.monotonic() + limit_s, f"{_ANSWER}/{process_id}/{number}"
        while (data := self._wait_for(key)) is None:
            if time.monotonic() > end:
                raise MachineError(f"process {process_id} has not answered ({what}) within {limit_s:.0f} s")
        self._client.key_value_delete(key)
        value, error, is_users = json.loads(data)
        if error is not None:
            raise (UserError if is_users else MachineError)(error)
        return value

    def answer(self, handle: Callable[[str, Mapping[str, Any]], Any]) -> None:
        """Answer the questions of process 0 in a thread from now on, whatever this process does meanwhile.

        handle(what, values): gives a JSON value, or raises what process 0 then raises.
        """
        self._start(self._answer_questions, handle)

    def _answer_questions(self, handle: Callable[[str, Mapping[str, Any]], Any]) -> None:
        number = 0
        while not self._is_over.is_set():
            key = f"{self.process_id}/{number}"
            try:
                data = self._wait_for(f"{_QUESTION}/{key}")
            except jax.errors.JaxRuntimeError:
                return  # process 0 is gone, and JAX ends this one
            if data is None:
                continue
            self._client.key_value_delete(f"{_QUESTION}/{key}")
            try:
                answer = [handle(*json.loads(data)), None, False]
            except Exception as error:  # process 0 raises it
                answer = [None, one_line(error), isinstance(error, UserError)]
            self._client.key_value_set_bytes(f"{_ANSWER}/{key}", json.dumps(answer).encode())
            number += 1

    def _wait_for(self, key: str) -> bytes | None:
        """The value of a key, None where it is not there after a second."""
        try:
            return self._client.blocking_key_value_get_bytes(key, _WAIT_MS)
        except jax.errors.JaxRuntimeError as error:
            if "DEADLINE_EXCEEDED" in str(error):
                return None
            raise

    def _start(self, target: Callable[..., None], *args: Any) -> None:
        thread = threading.Thread(target=target, args=args, name="hosts", daemon=True)
        self._threads.append(thread)
        thread.start()

    def fail(self, why: str) -> None:
        """Tell the others that this process ends."""
        self.has_failed = True
        with suppress(jax.errors.JaxRuntimeError):  # another one was first, or process 0 is gone: they know
            text = f"process {self.process_id} on {socket.gethostname()}: {why}"
            self._client.key_value_set(f"{_FAILURE}/first", text)

    def leave(self) -> None:
        """To be called last. With process 0 goes what the others hear failures by, and JAX then ends them with other
        words: it waits for them, a few seconds at most."""
        with suppress(jax.errors.JaxRuntimeError):
            if self.process_id != 0:
                self._client.key_value_set(f"{_LEFT}/{self.process_id}", "")
                return
            end = time.monotonic() + _LEAVE_S
            while len(self._client.key_value_dir_get(_LEFT)) < self.num_processes - 1 and time.monotonic() < end:
                time.sleep(_POLL_S / 5)

    def await_verdict(self, error: BaseException) -> None:
        """Where the error may come from the loss of another process, wait until JAX knows, which ends this process."""
        if any(sign in str(error) for sign in _LOST):
            end = time.monotonic() + 1.5 * self._timeout_s + _POLL_S
            while time.monotonic() < end and self.failure is None:
                time.sleep(_POLL_S)

    def _tidy(self) -> None:
        """Forget the messages that all have read."""
        read = [int(number) for _, number in self._client.key_value_dir_get(_READ)]
        if len(read) == self.num_processes - 1:
            for number in range(self._first_kept, min(read)):
                self._client.key_value_delete(f"{_MESSAGE}/{number}")
            self._first_kept = max(self._first_kept, min(read))

    def _watch_others(self) -> None:
        """End this process when another one fails: with a few seconds for its files where it leads."""
        while not (found := self._look()):
            if found is None or self._is_over.wait(_POLL_S):
                return
        if self.has_failed:
            return
        self.failure, self.has_failed = MachineError(found), True
        if self.process_id == 0:
            interrupt_main()
            if self._is_over.wait(_GRACE_S):
                return
        print(f"error: {self.failure}", file=sys.stderr, flush=True)
        self.leave()
        os._exit(1)

    def _look(self) -> str | None:
        """The failure of another process, empty without one; None where there is no service any more."""
        try:
            failures = self._client.key_value_dir_get(_FAILURE)
            return failures[0][1] if failures else ""
        except jax.errors.JaxRuntimeError:
            return None


def one_line(error: BaseException) -> str:
    return " ".join(str(error).split())
