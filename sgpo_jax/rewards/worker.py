"""The process that judges: it takes requests from a pipe and answers each with a Judgement. Imports no JAX."""

import os
import resource
import signal
from collections.abc import Mapping
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from typing import Any

from sgpo_jax.config import RewardsConfig
from sgpo_jax.rewards.verifiers import Verifier, resolve_verifier
from sgpo_jax.types import Judgement, UserError, Verdict

MAX_EXTRACTED_CHARS = 500


@dataclass(frozen=True, slots=True)
class Request:
    kind: str
    gold: str
    text: str
    metadata: Mapping[str, Any]


def run(pipe: Connection, config: RewardsConfig) -> None:
    """Serve requests until the pipe closes. To each: None once its verifier is loaded, then the Judgement."""
    _isolate(config.memory_limit_mb)
    verifiers: dict[str, Verifier] = {}
    while True:
        try:
            request = pipe.recv()
            failure = _load(verifiers, request.kind, config)
            pipe.send(None)
            pipe.send(failure or _judge(verifiers[request.kind], request, config.time_limit_s))
        except (EOFError, OSError):
            return


def _isolate(memory_limit_mb: int) -> None:
    """Own session (a terminal's Ctrl-C is the parent's business, and one kill reaches all children), bounded memory."""
    os.setsid()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGALRM, signal.SIG_DFL)  # the kernel ends the process, whatever code is running
    limit = memory_limit_mb * 2**20
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def _load(verifiers: dict[str, Verifier], kind: str, config: RewardsConfig) -> Judgement | None:
    """Have the verifier in `verifiers`, or say why there is none. Outside the time limit: imports can be slow."""
    if kind in verifiers:
        return None
    try:
        verifiers[kind] = resolve_verifier(kind, config)
    except UserError as error:
        return Judgement(Verdict.ERROR, detail=str(error))
    return None


def _judge(verifier: Verifier, request: Request, limit_s: float) -> Judgement:
    signal.setitimer(signal.ITIMER_REAL, limit_s)
    try:
        judgement = verifier(request.gold, request.text, request.metadata)
    except MemoryError:
        judgement = Judgement(Verdict.ERROR, detail="more memory needed than rewards.memory_limit_mb allows")
    except BaseException as error:  # custom code may raise anything, SystemExit too
        judgement = Judgement(Verdict.ERROR, detail=f"{type(error).__name__}: {error}"[:MAX_EXTRACTED_CHARS])
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
    if judgement.extracted and len(judgement.extracted) > MAX_EXTRACTED_CHARS:
        judgement = replace(judgement, extracted=judgement.extracted[:MAX_EXTRACTED_CHARS])
    return judgement
