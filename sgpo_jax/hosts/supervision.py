"""A process of several as the child of the one that was started, so that it ends with a line and an exit code.

JAX ends a process by an abort as soon as another one is lost, with pages of its own, which nothing inside the process
can catch or word. Imports no JAX: a process that has it must not fork.
"""

import os
import re
import signal
import sys
import tempfile
import threading
from typing import IO, Any, TextIO

CANNOT_LISTEN = "hosts.bind: process 0 cannot listen at {}; the port is taken, or the address is of another host"
RESUME = "the same command on every host resumes the run"

# What JAX prints before it ends a process, and in which words this says it. The first that is found counts.
_CAUSES = (
    (r"Failed to add port to server: .*'(\S+)'", CANNOT_LISTEN),
    (
        r"CoordinationService/RegisterTask",
        "not all processes came within hosts.start_timeout_s; start as many as hosts.num_processes says, all with the "
        "same hosts.coordinator",
    ),
    (
        r"stopped sending heartbeats\):\s*((?:\d+\s+)+)",
        f"lost process {{}}: killed, hung, or cut off; {RESUME}",
    ),
    (r"Failed to send RPC to coordination service", f"lost process 0, which leads: killed, or cut off; {RESUME}"),
    (r"JAX distributed service detected fatal errors", f"lost touch with the other processes; {RESUME}"),
)
_CRASHES = (signal.SIGABRT, signal.SIGSEGV, signal.SIGBUS, signal.SIGILL, signal.SIGFPE)
_LAST_LINES = 5


def supervise(*, debug: bool) -> None:
    """Go on in a child process; this returns in it alone. What was started waits for it, and ends as it did: with its
    exit code, or with a line on standard error and exit code 1 where a signal or JAX ended it.

    Interrupts and terminations are passed on as one interrupt, a second one ends the child at once. What C++ libraries
    print is not shown, unless `debug`.
    """
    noise = tempfile.TemporaryFile()  # noqa: SIM115 (both processes hold it until they end)
    alive, held = os.pipe()
    sys.stdout.flush()
    sys.stderr.flush()
    child = os.fork()
    if child == 0:
        os.close(held)
        os.setpgid(0, 0)  # a terminal interrupts its whole group; this process is interrupted by its parent
        sys.stdout, sys.stderr = _apart(sys.stdout, noise), _apart(sys.stderr, noise)
        threading.Thread(target=_end_with_parent, args=(alive,), name="lifeline", daemon=True).start()
        return
    os.close(alive)
    _pass_on_signals(child)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    noise.seek(0)
    text = noise.read().decode(errors="replace")
    if debug and status != 0:
        sys.stderr.write(text)
    if status < 0:
        print(f"error: {_cause(-status, text)}", file=sys.stderr)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status if status >= 0 else 1)  # what else there is to end is the child's


def _apart(stream: TextIO, noise: IO[bytes]) -> TextIO:
    """Python's own standard stream as it was, while what writes to its descriptor goes to `noise`."""
    descriptor = stream.fileno()
    own = os.fdopen(os.dup(descriptor), "w", buffering=1, encoding=stream.encoding, errors=stream.errors)
    os.dup2(noise.fileno(), descriptor)
    return own


def _end_with_parent(alive: int) -> None:
    """The other end of the pipe is closed when the parent is gone, killed even."""
    os.read(alive, 1)
    os._exit(1)


def _pass_on_signals(child: int) -> None:
    received = []

    def pass_on(number: int, _: Any) -> None:
        received.append(number)
        os.kill(child, signal.SIGINT if len(received) == 1 else signal.SIGKILL)

    signal.signal(signal.SIGINT, pass_on)
    signal.signal(signal.SIGTERM, pass_on)


def _cause(number: int, noise: str) -> str:
    """Why a signal ended the child, as far as its libraries say so."""
    for pattern, text in _CAUSES:
        if found := re.search(pattern, noise):
            return text.format(*(", ".join(group.split()) for group in found.groups()))
    lines = [line.strip() for line in noise.splitlines() if line.strip()][-_LAST_LINES:]
    said = f"; last it said: {' | '.join(lines)}" if lines and number in _CRASHES else ""
    return f"ended by {signal.Signals(number).name}; {RESUME}{said}"
