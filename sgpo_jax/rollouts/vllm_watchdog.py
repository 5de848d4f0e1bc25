"""Runs a server in this process's session, and ends everything in the session when the run that wanted it is gone.

    python vllm_watchdog.py LOG SCRATCH COMMAND...

Standard input is a pipe whose other end the run holds. "stop" on it ends the server; its end without a word means that
the run was killed: then the directory SCRATCH, which the run can no longer remove, goes too. Standard library only:
this file is run by its path, and costs a few megabytes.
"""

import contextlib
import os
import select
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

GRACE_S = 6.0  # from SIGTERM to SIGKILL; a vLLM server needs about two
STOP = b"stop\n"
_SHARED_MEMORY = "/dev/shm/"
_LOOK_EVERY_S = 5.0  # at the shared memory in use: a killed process no longer tells its own


def session_members(session: int) -> list[int]:
    """Processes of a session that have not ended (zombies have), its leader left out."""
    found = []
    for entry in os.listdir("/proc"):
        if entry.isdigit() and int(entry) != session:
            with contextlib.suppress(OSError):
                # pid (name) state ppid pgrp session ...; the name may hold anything, so count from its last bracket.
                fields = Path("/proc", entry, "stat").read_text().rpartition(")")[2].split()
                if int(fields[3]) == session and fields[0] != "Z":
                    found.append(int(entry))
    return found


def shared_memory_of(pids: list[int]) -> set[int]:
    """Inodes of the files in /dev/shm that these processes have mapped. Names would not do: a semaphore is mapped under
    a temporary one.
    """
    found = set()
    for pid in pids:
        with contextlib.suppress(OSError), open(f"/proc/{pid}/maps") as maps:
            # address perms offset device inode path
            found |= {int(line.split(maxsplit=5)[4]) for line in maps if _SHARED_MEMORY in line}
    return found


def end_session(session: int, grace_s: float, shared: set[int]) -> None:
    """SIGTERM to every process of a session but its leader, SIGKILL to what is left after grace_s; wait for their end.

    Then remove what they had in shared memory, inodes in `shared` included: files right in /dev/shm, not those of
    directories in it, such as weights.
    """
    for signal_, limit_s in ((signal.SIGTERM, grace_s), (signal.SIGKILL, GRACE_S)):
        shared |= shared_memory_of(session_members(session))
        for pid in session_members(session):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal_)
        end = time.monotonic() + limit_s
        while session_members(session) and time.monotonic() < end:
            time.sleep(0.05)
    for entry in os.scandir(_SHARED_MEMORY):
        if entry.inode() in shared and entry.is_file(follow_symlinks=False):
            Path(entry).unlink(missing_ok=True)


def _watch(server: subprocess.Popen[bytes], shared: set[int]) -> bool:
    """Until the server ends or is to end. True where the run is gone without having said stop."""
    next_look = 0.0
    while server.poll() is None:
        if time.monotonic() > next_look:
            shared |= shared_memory_of(session_members(os.getpid()))
            next_look = time.monotonic() + _LOOK_EVERY_S
        if select.select([sys.stdin.fileno()], [], [], 0.5)[0]:
            return not os.read(sys.stdin.fileno(), len(STOP))
    return False


def main(log: str, scratch: str, *command: str) -> int:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # runs the clean-up below
    shared: set[int] = set()
    abandoned = False
    with open(log, "ab") as sink:
        server = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=sink, stderr=subprocess.STDOUT)
    try:
        abandoned = _watch(server, shared)
    finally:
        end_session(os.getpid(), GRACE_S, shared)
        server.wait()
        if abandoned:
            shutil.rmtree(scratch, ignore_errors=True)
    return server.returncode


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
