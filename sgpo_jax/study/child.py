"""One command of a study in a process of its own, on its own CPUs, which ends when the study does.

    python -m sgpo_jax.study.child PARENT CPU,CPU,... run FILE

PARENT is the process id of the study; no CPUs (""): all.
"""

import os
import runpy
import signal
import sys
import threading
import time

GRACE_S = 30.0  # from the interrupt to a hard end
_LOOK_EVERY_S = 1.0


def main() -> None:
    _, parent, cpus, *arguments = sys.argv
    if cpus:  # before XLA counts them
        os.sched_setaffinity(0, {int(cpu) for cpu in cpus.split(",")})
    signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored, where a shell started the study with &
    threading.Thread(target=_end_with, args=(int(parent),), daemon=True).start()
    sys.argv[1:] = arguments
    runpy.run_module("sgpo_jax.launch", run_name="__main__", alter_sys=False)


def _end_with(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(_LOOK_EVERY_S)
    os.kill(os.getpid(), signal.SIGINT)
    time.sleep(GRACE_S)
    os._exit(1)


if __name__ == "__main__":
    main()
