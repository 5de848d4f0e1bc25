"""A vLLM server as a child of this run: its command, its start, its end."""

import contextlib
import os
import random
import re
import secrets
import shutil
import socket
import subprocess
import sys
import time
from itertools import islice
from pathlib import Path
from typing import Protocol

from sgpo_jax.config import VLLMConfig
from sgpo_jax.hosts.messages import is_loopback, num_processes
from sgpo_jax.rollouts import vllm_guard, vllm_watchdog
from sgpo_jax.rollouts.placement import visible_devices
from sgpo_jax.types import MachineError, UserError

_PORTS = range(20_000, 30_000)
_LOG_LINES = 12  # shown in errors
_CAUSE = re.compile(r"\b\w+Error: .*|error: .*")  # of a traceback, of a command line
_CAUSE_CHARS = 300


class Server(Protocol):
    """A server of this run, on this host or another. Its methods may take seconds."""

    url: str

    @property
    def is_running(self) -> bool: ...

    def start(self, model_dir: Path) -> None: ...

    def stop(self) -> None: ...

    def failure(self, what: str) -> MachineError: ...

    def path_of(self, directory: Path) -> Path:
        """Where the server finds the weights that process 0 has in `directory`."""
        ...

    def close(self) -> None:
        """End it for good, where that is this process's to do."""
        ...


class VLLMServer:
    """One server of this process, which `start` starts (again). It ends with `stop`, and when this process is killed.

    max_model_len: tokens of prompt and completion together. scratch: a private directory, gone with this process.
    log: where the server's output is appended. key: of its endpoints; empty: one of its own.
    """

    def __init__(
        self, config: VLLMConfig, *, dtype: str, max_model_len: int, scratch: Path, log: Path, key: str = ""
    ) -> None:
        self._config = config
        self._dtype = dtype
        self._max_model_len = max_model_len
        self._scratch = scratch
        self._log = log
        self._log_start = 0  # where the newest server's output begins
        self._process: subprocess.Popen[bytes] | None = None
        self._port = config.port or _free_port(config.host)
        self.key = key or secrets.token_urlsafe(32)
        self.url = f"http://{config.host}:{self._port}"
        self._guard = scratch / "guard"
        self._guard.mkdir()
        shutil.copy(vllm_guard.__file__, self._guard)
        self._temporary = scratch / "tmp"
        self._temporary.mkdir()

    @property
    def is_running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def start(self, model_dir: Path) -> None:
        """Start it with the weights of a directory; `is_running` and the health endpoint tell what becomes of it.

        Raises UserError where the command or the port cannot be used.
        """
        self.stop()
        self._check_port()
        command = [*self._config.command, *self._arguments(model_dir)]
        if shutil.which(command[0]) is None:
            raise UserError(
                f"vllm.command: {command[0]} is no program; make it with `bash tools/setup_vllm.sh`, or name another"
            )
        self._log.parent.mkdir(parents=True, exist_ok=True)
        with self._log.open("ab") as sink:
            sink.write(f"\n--- {time.strftime('%F %T')} {' '.join(command)}\n".encode())
            self._log_start = sink.tell()
        self._process = subprocess.Popen(
            [sys.executable, "-I", vllm_watchdog.__file__, str(self._log), str(self._scratch), *command],
            stdin=subprocess.PIPE,
            env=self._environment(),
            start_new_session=True,
        )

    def stop(self) -> None:
        """End it and every process it started; returns when they are gone."""
        if self._process is None:
            return
        process, self._process = self._process, None
        assert process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            process.stdin.write(vllm_watchdog.STOP)
            process.stdin.close()
        try:
            process.wait(2 * vllm_watchdog.GRACE_S + 5)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        vllm_watchdog.end_session(process.pid, grace_s=0, shared=set())  # where the watchdog itself was killed

    def close(self) -> None:
        self.stop()

    def path_of(self, directory: Path) -> Path:
        return directory

    def failure(self, what: str) -> MachineError:
        """An error with the first error and the last lines of the newest server's log."""
        with self._log.open("rb") as source:
            source.seek(self._log_start)
            lines = source.read().decode(errors="replace").splitlines()
        causes = (found[0] for line in lines if (found := _CAUSE.search(line)))
        cause = "".join(f" ({text[:_CAUSE_CHARS]})" for text in islice(causes, 1))
        end = " | ".join(lines[-_LOG_LINES:]) or "nothing"
        return MachineError(f"the vLLM server {what}{cause}; {self._log} ends with: {end}")

    def _check_port(self) -> None:
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((self._config.host, self._port))
            except OSError as error:
                raise UserError(
                    f"vllm.port={self._port}: cannot be used: {error.strerror}; name another, or none for a free one"
                ) from None

    def _arguments(self, model_dir: Path) -> list[str]:
        config = self._config
        arguments: dict[str, object] = {
            "--model": model_dir,
            "--served-model-name": "policy",
            "--host": config.host,
            "--port": self._port,
            "--dtype": self._dtype,
            "--max-model-len": self._max_model_len,
            "--max-num-seqs": config.max_num_seqs,
            "--max-num-batched-tokens": max(config.max_batched_tokens, self._max_model_len),
            "--tensor-parallel-size": config.tensor_parallel,
            "--data-parallel-size": config.data_parallel or 1,
            "--generation-config": "vllm",  # else the model's own top_k and temperature apply unasked
            "--logprobs-mode": "processed_logprobs",  # at the sampling temperature, as the trainer computes them
            "--middleware": "vllm_guard.Guard",
            "--seed": 0,
        }
        if config.memory_frac is not None:
            arguments["--gpu-memory-utilization"] = config.memory_frac
        # On CPUs vLLM (0.32, 0.33) dies of a seeded request whose prompt is read in several pieces.
        flags = ["--enforce-eager", "--no-enable-chunked-prefill"] if config.platform == "cpu" else []
        if config.placement == "shared":
            flags.append("--enable-sleep-mode")
        return [*(str(part) for pair in arguments.items() for part in pair), *flags, *config.extra_args]

    def _environment(self) -> dict[str, str]:
        own = {
            "HF_HUB_OFFLINE": "1",
            "VLLM_NO_USAGE_STATS": "1",
            "VLLM_SERVER_DEV_MODE": "1",
            "VLLM_API_KEY": self.key,
            "TMPDIR": str(self._temporary),  # sockets and rendezvous files go with the scratch directory
            "VLLM_RPC_BASE_PATH": str(self._temporary),
            "PYTHONPATH": str(self._guard),
            "PYTHONUNBUFFERED": "1",
        }
        if self._config.platform == "cpu":
            own["VLLM_CPU_KVCACHE_SPACE"] = str(self._config.kv_cache_gib)
        if self._config.devices:
            own["CUDA_VISIBLE_DEVICES"] = visible_devices(self._config.devices, os.environ)
        return {**os.environ, **own, **self._config.env}


def shared_key(config: VLLMConfig) -> str:
    """The key of servers that others than this host's users may reach; empty: each server makes one of its own.

    Raises UserError where there should be one.
    """
    if num_processes() == 1 and is_loopback(config.host):
        return ""
    if not (key := os.environ.get("VLLM_API_KEY", "")):
        raise UserError(
            f"vllm.host={config.host}: servers beyond one process or host need a key; set the environment variable "
            "VLLM_API_KEY to a secret, the same for every process"
        )
    return key


def _free_port(host: str = "127.0.0.1") -> int:
    """Below the ports that the system gives to outgoing connections: from those, a client that asks whether the server
    is up yet would now and then connect to itself.
    """
    for port in random.SystemRandom().sample(_PORTS, k=100):
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind((host, port))
            return port
    raise MachineError(
        f"no free port was found between {_PORTS.start} and {_PORTS.stop}; name one: vllm.port, or another of this "
        f"host's addresses: vllm.host={host}"
    )
