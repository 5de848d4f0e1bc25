"""Process 0 leads, the others follow: one message before every program that all processes run."""

import atexit
import ipaddress
import os
from collections.abc import Callable, Mapping
from typing import Any

import jax

from sgpo_jax.config import HostsConfig
from sgpo_jax.hosts.link import Link, Message, one_line
from sgpo_jax.hosts.supervision import CANNOT_LISTEN, RESUME
from sgpo_jax.types import MachineError, UserError

STOP = "stop"

_link: Link | None = None  # of this process, where there are others


def start(config: HostsConfig) -> None:
    """Join the other processes, before JAX first uses a device; returns when all have come.

    Raises UserError where the configuration and the cluster's environment do not say who they are, or process 0 cannot
    listen as configured; MachineError where not all come within hosts.start_timeout_s.
    """
    global _link
    bind = _address_to_listen_at(config)
    if config.coordinator is None:
        os.environ["JAX_COORDINATOR_PORT"] = bind.rpartition(":")[2]  # what JAX puts after the host that it finds
    jax.config.update("jax_enable_preemption_service", False)  # it would take SIGTERM for itself
    try:
        jax.distributed.initialize(
            coordinator_address=config.coordinator,
            num_processes=config.num_processes,
            process_id=config.process_id,
            local_device_ids=[],  # not the one that JAX would take under Slurm, but mesh.devices: placement.claim
            initialization_timeout=config.start_timeout_s,
            heartbeat_timeout_seconds=config.timeout_s,
            shutdown_timeout_seconds=config.timeout_s,
            coordinator_bind_address=bind,
        )
    except (ValueError, TypeError) as error:
        raise UserError(
            f"hosts: the environment of this process does not say which of several it is ({one_line(error)}); set "
            "hosts.coordinator, hosts.num_processes and hosts.process_id"
        ) from None
    except RuntimeError as error:
        if "Failed to start RPC server" in str(error):
            raise UserError(CANNOT_LISTEN.format(bind)) from None
        raise MachineError(f"hosts: the processes did not come together: {one_line(error)}") from None
    state = _distributed_state()
    _link = Link(
        state.client,
        state.process_id,
        state.num_processes,
        timeout_s=config.timeout_s,
        on_one_host=is_loopback(bind.rpartition(":")[0]),
    )
    atexit.register(_link.close)  # before JAX's own end


def has_started() -> bool:
    return _link is not None


def num_processes() -> int:
    return 1 if _link is None else _link.num_processes


def process_id() -> int:
    return 0 if _link is None else _link.process_id


def are_on_one_host() -> bool:
    """Whether all processes are: process 0 then listens at a loopback address."""
    return _link is None or _link.on_one_host


def is_leader() -> bool:
    """Whether this process is process 0, which one alone is."""
    return process_id() == 0


def lead(op: str, values: Mapping[str, Any] | None = None, arrays: Mapping[str, Any] | None = None) -> None:
    """Have the other processes do `op` too. Does nothing in one that follows, or is alone."""
    if num_processes() > 1 and _link is not None and _link.process_id == 0 and not _link.has_failed:
        _link.send(Message(op, values or {}, arrays or {}))


def follow(handle: Callable[[Message], None]) -> None:
    """Do what process 0 says, message by message, until it says stop. Raises what `handle` raises."""
    assert _link is not None, "start comes first"
    while (message := _link.receive()).op != STOP:
        handle(message)


def receive(op: str) -> Message:
    """The next message of process 0, which is of `op`."""
    assert _link is not None, "start comes first"
    message = _link.receive()
    assert message.op == op, f"{message.op} where {op} was due"
    return message


def say_ready() -> None:
    """Let process 0 go on, which waits for that."""
    assert _link is not None, "start comes first"
    _link.say_ready()


def await_ready(limit_s: float) -> None:
    """Until all other processes have said that they are ready. Raises MachineError after limit_s."""
    if _link is not None:
        _link.await_ready(limit_s)


def ask(process_id: int, what: str, values: Mapping[str, Any], *, limit_s: float) -> Any:
    """Have another process answer a question, whatever it does meanwhile; see Link.ask."""
    assert _link is not None, "start comes first"
    return _link.ask(process_id, what, values, limit_s)


def answer(handle: Callable[[str, Mapping[str, Any]], Any]) -> None:
    """Answer the questions of process 0 from now on; see Link.answer."""
    assert _link is not None, "start comes first"
    _link.answer(handle)


def has_failed() -> bool:
    """Whether a process has failed, so that nothing can be done together any more."""
    return _link is not None and _link.has_failed


def failure_of_another() -> MachineError | None:
    return None if _link is None else _link.failure


def fail(error: BaseException) -> None:
    """Tell the other processes, if there are any, that this one ends, and why. They end then too.

    Where the error is the loss of another process in other words, JAX ends this process here.
    """
    if _link is None or _link.has_failed:
        return
    if isinstance(error, UserError):
        _link.fail(one_line(error))
    elif isinstance(error, KeyboardInterrupt):
        _link.fail(f"interrupted; {RESUME}")
    else:
        _link.await_verdict(error)
        _link.fail(f"{one_line(error)}; {RESUME}")


def leave() -> None:
    """Last of all in a process of several that ends after a failure; see Link.leave."""
    if _link is not None:
        _link.leave()


def _address_to_listen_at(config: HostsConfig) -> str:
    """Of process 0: hosts.bind, or the coordinator's own address where that is a loopback one."""
    if config.bind is not None:
        return config.bind
    if config.coordinator is not None and is_loopback(config.coordinator.rpartition(":")[0]):
        return config.coordinator
    raise UserError(
        "hosts.bind: process 0 has to listen beyond loopback; name address and port, such as 0.0.0.0:8476 for every "
        "interface. The port has no key: it belongs into a network that only the job's hosts reach (docs/hosts.md)"
    )


def is_loopback(host: str) -> bool:
    try:
        return host == "localhost" or ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False  # another name


def _distributed_state() -> Any:
    """JAX has no public name for its client and the numbers that it found."""
    from jax._src import distributed

    return distributed.global_state
