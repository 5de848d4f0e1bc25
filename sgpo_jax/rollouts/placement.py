"""Which GPUs of this machine are the trainer's and which the vLLM server's, and what JAX is told of it.

JAX takes memory on every GPU that it sees as soon as it starts, so a mesh over some of them would not leave the others
to the server: what JAX may see has to be said before its first use of a device. It is said by JAX's own option, not by
this process's CUDA_VISIBLE_DEVICES, which therefore stays what the numbers in the configuration count in.
"""

import os
import re
from collections.abc import Mapping, Sequence
from itertools import takewhile
from pathlib import Path
from typing import Any

import jax

from sgpo_jax.config import Config, MeshConfig, VLLMConfig
from sgpo_jax.types import MachineError, UserError

_VISIBLE = "CUDA_VISIBLE_DEVICES"


def num_gpus(environment: Mapping[str, str], devices: Path = Path("/dev")) -> int:
    """The GPUs that this process sees, counted without waking JAX or CUDA up."""
    if _VISIBLE in environment:
        return len(_listed(environment[_VISIBLE]))
    return sum(re.fullmatch(r"nvidia\d+", path.name) is not None for path in devices.iterdir())


def visible_devices(numbers: Sequence[int], environment: Mapping[str, str]) -> str:
    """CUDA_VISIBLE_DEVICES of a child that gets these of the GPUs that this process sees."""
    names = _listed(environment[_VISIBLE]) if _VISIBLE in environment else None
    return ",".join(str(number) if names is None else names[number] for number in numbers)


def place(config: Config, count: int) -> Config:
    """The configuration with mesh.devices, vllm.devices and vllm.data_parallel filled in, on a machine of `count` GPUs.

    Left as it is where no server of the run's own takes GPUs, and on a machine without any, where a plan can be made
    but no server started (`check_server`). Raises UserError where the GPUs do not suffice, are named twice, or are
    shared without both shares of their memory.
    """
    if config.rollouts.engine != "vllm":
        return config
    is_shared = config.vllm.placement == "shared"
    if config.vllm.urls or config.vllm.platform != "cuda":
        if is_shared:
            raise UserError("vllm.placement=shared: only with a server that the run starts itself, on GPUs")
        return config
    if not count:
        return config
    _check_numbers(config, count)
    trainer, server = (_shared if is_shared else _split)(config, count)
    mesh = config.mesh.model_copy(update={"devices": trainer})
    vllm = config.vllm.model_copy(update={"devices": server, "data_parallel": _data_parallel(config, len(server))})
    return config.model_copy(update={"mesh": mesh, "vllm": vllm})


def check_server(config: VLLMConfig, count: int) -> None:
    """Raises UserError where a server of the run's own is for GPUs, and `count` is 0."""
    if config.platform == "cuda" and not config.urls and not count:
        raise UserError(
            "vllm.platform=cuda: this process sees no GPU; set vllm.platform=cpu, or name running servers in vllm.urls"
        )


def claim(config: MeshConfig, environment: Any = os.environ) -> None:
    """Tell JAX its GPUs and its share of their memory, before it first uses a device.

    Raises MachineError where that was too late, UserError where JAX has no GPUs at all.
    """
    if config.memory_frac is not None:
        environment.pop("XLA_PYTHON_CLIENT_MEM_FRACTION", None)  # the older name; JAX refuses to have both
        environment["XLA_CLIENT_MEM_FRACTION"] = str(config.memory_frac)
    if not config.devices:
        return
    jax.config.update("jax_cuda_visible_devices", ",".join(map(str, config.devices)))
    if jax.default_backend() != "gpu":
        raise UserError(
            f"mesh.devices={list(config.devices)}: GPUs are meant for the trainer, but JAX runs on "
            f"{jax.default_backend()}; install its GPU build (PLATFORM=cuda12 bash tools/setup.sh)"
        )
    if len(jax.local_devices()) != len(config.devices):
        raise MachineError(
            f"mesh.devices={list(config.devices)}: JAX had started on {len(jax.local_devices())} GPUs before; run this "
            "configuration in a process of its own"
        )


def _listed(value: str) -> list[str]:
    """CUDA reads the list up to the first number that is none, such as -1."""
    names = (part.strip() for part in value.split(",") if part.strip())
    return list(takewhile(lambda name: not name.startswith("-"), names))


def _check_numbers(config: Config, count: int) -> None:
    for key, numbers in (("mesh.devices", config.mesh.devices), ("vllm.devices", config.vllm.devices)):
        if len(set(numbers)) < len(numbers):
            raise UserError(f"{key}={list(numbers)}: names a GPU twice")
        if any(number >= count for number in numbers):
            raise UserError(f"{key}={list(numbers)}: this process sees {count} GPUs, numbered from 0")


def _split(config: Config, count: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The trainer's GPUs and the server's. Of 8 that nobody named, each gets 4."""
    trainer, server = config.mesh.devices, config.vllm.devices
    if both := sorted(set(trainer) & set(server)):
        raise UserError(
            f"GPUs {both} are in mesh.devices and in vllm.devices: with vllm.placement=split each is of one of them"
        )
    everything = range(count)
    if not server:
        server = tuple(i for i in everything if i not in trainer) if trainer else tuple(everything[(count + 1) // 2 :])
    trainer = trainer or tuple(i for i in everything if i not in server)
    if not trainer or not server:
        raise UserError(
            f"vllm.placement=split: of {count} GPUs, {len(trainer)} are left to the trainer and {len(server)} to the "
            "server; give both at least one, or set vllm.placement=shared"
        )
    return trainer, server


def _shared(config: Config, count: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    shares = {"mesh.memory_frac": config.mesh.memory_frac, "vllm.memory_frac": config.vllm.memory_frac}
    if missing := [key for key, share in shares.items() if share is None]:
        raise UserError(f"vllm.placement=shared: needs {' and '.join(missing)}, the shares of a GPU's memory")
    # JAX keeps what it once took, asleep or not; and the server must fit in beside it when it starts.
    if sum(share or 0.0 for share in shares.values()) > 1:
        raise UserError(
            f"vllm.placement=shared: {', '.join(f'{key}={share}' for key, share in shares.items())} are together more "
            "than the whole GPU; they must not exceed 1"
        )
    both = config.mesh.devices or config.vllm.devices or tuple(range(count))
    if set(both) != set(config.vllm.devices or both):
        raise UserError(
            f"vllm.placement=shared: mesh.devices={list(config.mesh.devices)} and "
            f"vllm.devices={list(config.vllm.devices)} must be the same of this process's {count} GPUs; name one alone"
        )
    return both, both


def _data_parallel(config: Config, count: int) -> int:
    tensor, copies = config.vllm.tensor_parallel, config.vllm.data_parallel
    copies = copies or count // tensor
    if copies * tensor != count:
        raise UserError(
            f"vllm.tensor_parallel={tensor} x vllm.data_parallel={copies}: the server has {count} GPUs; "
            "the product must be their number"
        )
    return copies
