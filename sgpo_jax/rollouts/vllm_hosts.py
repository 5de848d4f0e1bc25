"""vLLM servers of a run over several hosts: every process starts one for its host, and process 0 says when.

Each host has its own copy of the weights, written by its process, so that weights cross the network once, between
devices, and each server reads what is in its host's memory.
"""

import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from flax import nnx

from sgpo_jax.config import Config
from sgpo_jax.hosts.messages import answer, are_on_one_host, ask, is_loopback, lead, num_processes
from sgpo_jax.models.architecture import Architecture
from sgpo_jax.rollouts.vllm_server import VLLMServer, shared_key
from sgpo_jax.rollouts.vllm_weights import WeightsDirectory
from sgpo_jax.types import MachineError, UserError

_ANSWER_S = 60.0  # for what takes no time, beside what the other process may be doing


class RemoteServer:
    """The server of another process, for process 0. write_limit_s: for a copy of the weights to be written there."""

    def __init__(self, process_id: int, write_limit_s: float) -> None:
        self._process_id = process_id
        self._write_limit_s = write_limit_s
        self.url: str = self._ask("url")

    @property
    def is_running(self) -> bool:
        return self._ask("is_running")

    def start(self, model_dir: Path) -> None:
        self._ask("start", self._write_limit_s, weights=model_dir.name)

    def stop(self) -> None:
        self._ask("stop")

    def close(self) -> None:
        """Nothing: it ends with its process."""

    def path_of(self, directory: Path) -> Path:
        return Path(self._ask("path_of", self._write_limit_s, weights=directory.name))

    def failure(self, what: str) -> MachineError:
        return MachineError(self._ask("failure", what=what))

    def _ask(self, question: str, work_s: float = 0.0, **values: Any) -> Any:
        return ask(self._process_id, question, values, limit_s=work_s + _ANSWER_S)


def remote_servers(max_model_len: int, write_limit_s: float) -> list[RemoteServer]:
    """Have every process that follows make its server; none is started yet."""
    lead("vllm server", {"max_model_len": max_model_len})
    return [RemoteServer(process_id, write_limit_s) for process_id in range(1, num_processes())]


class HostServer:
    """The server of a process that follows, with the host's copy of the weights: what RemoteServer asks for.

    log: where the server writes. Raises UserError where process 0 could not reach a server at vllm.host.
    """

    def __init__(self, config: Config, arch: Architecture, model_dir: Path, max_model_len: int, log: Path) -> None:
        if is_loopback(config.vllm.host) and not are_on_one_host():
            raise UserError(
                f"vllm.host={config.vllm.host}: process 0 cannot reach this host's server there; give every process an "
                "address of its own host (docs/hosts.md)"
            )
        dtype, parent = config.model.compute_dtype, config.vllm.weights_dir
        self._weights = WeightsDirectory(arch, model_dir, dtype, Path(parent).absolute() if parent else None)
        self._server = VLLMServer(
            config.vllm,
            dtype=dtype,
            max_model_len=max_model_len,
            scratch=self._weights.path,
            log=log,
            key=shared_key(config.vllm),
        )
        self._written: set[str] = set()
        self._news = threading.Condition()
        self._write_limit_s = config.vllm.sync_time_limit_s
        answer(self._answer)

    def write(self, params: nnx.State) -> None:
        """This process's part of `WeightsDirectory.write` in process 0, and the copy of this host."""
        directory = self._weights.write(params)
        with self._news:
            self._written.add(directory.name)
            self._news.notify_all()

    def keep_only(self, name: str) -> None:
        self._weights.keep_only(self._weights.path / name)

    def close(self) -> None:
        self._server.stop()
        self._weights.close()

    def _answer(self, what: str, values: Mapping[str, Any]) -> Any:
        match what:
            case "url":
                return self._server.url
            case "is_running":
                return self._server.is_running
            case "start":
                return self._server.start(self._path_of(values["weights"]))
            case "stop":
                return self._server.stop()
            case "path_of":
                return str(self._path_of(values["weights"]))
            case "failure":
                return str(self._server.failure(values["what"]))
        raise AssertionError(what)

    def _path_of(self, name: str) -> Path:
        """The weights that process 0 has under this name, once they are written here too."""
        with self._news:
            if not self._news.wait_for(lambda: name in self._written, self._write_limit_s):
                raise MachineError(f"{self._weights.path}: the weights were not written within {self._write_limit_s} s")
        return self._weights.path / name
