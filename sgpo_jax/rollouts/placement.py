"""Which GPUs of this machine are the trainer's and which the vLLM server's, and what JAX is told of it.

JAX takes memory on every GPU that it sees as soon as it starts, so a mesh over some of them would not leave the others
to the server: what JAX may see has to be said before its first use of a device. It is said by JAX's own option, not by
this process's CUDA_VISIBLE_DEVICES, which therefore stays what the numbers in the configuration count in.

Where both have the same GPUs, JAX must also give back the memory that its arrays leave. Its own allocator never does,
and with jaxlib 0.10.2 "platform" does not either (jax-ml/jax issue 39145), so it is "cuda_async": pools of the CUDA
driver's, which without preallocation keep nothing unused once the host has waited for the GPU (`gpu_memory`).
"""

import os
import re
from collections.abc import Mapping, MutableMapping, Sequence
from itertools import takewhile
from pathlib import Path

import jax

from sgpo_jax.config import Config, VLLMConfig
from sgpo_jax.types import MachineError, UserError

_VISIBLE = "CUDA_VISIBLE_DEVICES"
_PLATFORMS = "JAX_PLATFORMS"
_GIVES_BACK = {"XLA_PYTHON_CLIENT_ALLOCATOR": "cuda_async", "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
_LARGEST_SERVER_FRAC = 0.95  # a parked trainer still has its CUDA context and its programs on the GPU


def num_gpus(environment: Mapping[str, str], devices: Path = Path("/dev")) -> int:
    """The GPUs that this process sees, counted without waking JAX or CUDA up."""
    if _VISIBLE in environment:
        return len(_listed(environment[_VISIBLE]))
    return sum(re.fullmatch(r"nvidia\d+", path.name) is not None for path in devices.iterdir())


def visible_devices(numbers: Sequence[int], environment: Mapping[str, str]) -> str:
    """CUDA_VISIBLE_DEVICES of a child that gets these of the GPUs that this process sees."""
    names = _listed(environment[_VISIBLE]) if _VISIBLE in environment else None
    return ",".join(str(number) if names is None else names[number] for number in numbers)


def place(config: Config, count: int, environment: Mapping[str, str] = os.environ) -> Config:
    """The configuration with mesh.devices, vllm.devices and vllm.data_parallel filled in, on a machine of `count` GPUs.

    With JAX_PLATFORMS=cpu the trainer has no GPUs, and the server may have them all. Left as it is where no server of
    the run's own takes GPUs, and on a machine without any, where a plan can be made but no server started
    (`check_server`). Raises UserError where the GPUs do not suffice or are named twice, or cannot be shared as asked.
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
    if environment.get(_PLATFORMS, "").lower() == "cpu":
        trainer, server = _beside_cpus(config, count)
    else:
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


def claim(config: Config, environment: MutableMapping[str, str] = os.environ) -> None:
    """Tell JAX its GPUs (of a configuration that was placed) and how to take their memory, before it first uses one.

    Raises MachineError where JAX had started on other GPUs before; UserError where it has none at all, or where the
    environment has it keep memory of GPUs that are shared.
    """
    mesh = config.mesh
    if mesh.memory_frac is not None:
        environment.pop("XLA_PYTHON_CLIENT_MEM_FRACTION", None)  # the older name; JAX refuses to have both
        environment["XLA_CLIENT_MEM_FRACTION"] = str(mesh.memory_frac)
    if not mesh.devices:
        return
    if config.rollouts.engine == "vllm" and config.vllm.placement == "shared":
        _have_memory_given_back(environment)
    jax.config.update("jax_cuda_visible_devices", ",".join(map(str, mesh.devices)))
    if jax.default_backend() != "gpu":
        raise UserError(
            f"mesh.devices={list(mesh.devices)}: GPUs are meant for the trainer, but JAX runs on "
            f"{jax.default_backend()}; install its GPU build (PLATFORM=cuda12 bash tools/setup.sh), or set "
            f"{_PLATFORMS}=cpu to train on CPUs"
        )
    found = sorted(device.local_hardware_id for device in jax.local_devices())
    if found != sorted(mesh.devices):
        raise MachineError(
            f"mesh.devices={list(mesh.devices)}: JAX had started on GPUs {found} before; run this configuration in a "
            "process of its own"
        )


def _have_memory_given_back(environment: MutableMapping[str, str]) -> None:
    for name, wanted in _GIVES_BACK.items():
        if (given := environment.get(name, wanted)).lower() != wanted:
            raise UserError(
                f"{name}={given}: with vllm.placement=shared JAX must give GPU memory back, which takes {wanted} here; "
                "unset it, or set vllm.placement=split"
            )
        environment[name] = wanted


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
            f"server; give both at least one, set vllm.placement=shared, or train on CPUs with {_PLATFORMS}=cpu"
        )
    return trainer, server


def _beside_cpus(config: Config, count: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The server's GPUs where the trainer has none: those named, or all."""
    for key, is_meant in (
        ("vllm.placement=shared", config.vllm.placement == "shared"),
        (f"mesh.devices={list(config.mesh.devices)}", bool(config.mesh.devices)),
    ):
        if is_meant:
            raise UserError(f"{key}: gives the trainer GPUs, but {_PLATFORMS}=cpu has JAX run on CPUs; unset one")
    return (), config.vllm.devices or tuple(range(count))


def _shared(config: Config, count: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    if config.mesh.memory_frac is not None:
        raise UserError(
            f"mesh.memory_frac={config.mesh.memory_frac}: with vllm.placement=shared the trainer takes the memory that "
            "it needs when its turn comes, and gives it back; leave it out"
        )
    if (config.vllm.memory_frac or 0.0) > _LARGEST_SERVER_FRAC:
        raise UserError(
            f"vllm.memory_frac={config.vllm.memory_frac}: with vllm.placement=shared at most {_LARGEST_SERVER_FRAC}, "
            "since the waiting trainer's programs stay on the GPU"
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
