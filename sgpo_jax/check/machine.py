"""The machines that a configuration is for, and devices to compile for them where there are none."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import jax

from sgpo_jax.config import Config
from sgpo_jax.hardware import DEVICES, Device
from sgpo_jax.models.attention import Implementation
from sgpo_jax.rollouts.placement import place
from sgpo_jax.types import UserError

# Of a GPU's memory, where the configuration does not say: JAX's own default when it starts, and vLLM's.
JAX_FRAC, VLLM_FRAC = 0.75, 0.9
# Turn by turn neither has a share of its own, but contexts and programs of both stay.
SHARED_FRAC = 0.92

# The chips of a slice by their number, as Google sells them: up to a pod in three dimensions, or in two.
_SHAPES = {
    "tpu-v5p": ("v5p", {4: "2x2x1", 8: "2x2x2", 16: "2x2x4", 32: "2x4x4", 64: "4x4x4", 128: "4x4x8", 256: "4x8x8"}),
    "tpu-v5e": ("v5e", {4: "2x2", 8: "2x4", 16: "4x4", 32: "4x8", 64: "8x8", 128: "8x16", 256: "16x16"}),
    "tpu-v6e": ("v6e", {4: "2x2", 8: "2x4", 16: "4x4", 32: "4x8", 64: "8x8", 128: "8x16", 256: "16x16"}),
}


@dataclass(frozen=True, slots=True)
class Machine:
    """name, device: None where the section hardware names none. trainer_devices: of the mesh, over all hosts.

    server_devices: of the vLLM servers that the run starts on GPUs, over all hosts; 0 without them.
    trainer_bytes, server_bytes: what each may take of one of its devices; None where that is not known.
    """

    name: str | None
    device: Device | None
    num_hosts: int
    trainer_devices: int
    server_devices: int
    trainer_bytes: int | None
    server_bytes: int | None

    @property
    def is_tpu(self) -> bool:
        return self.device is not None and self.device.platform == "tpu"


def machine_of(config: Config, num_devices: int | None = None) -> Machine:
    """num_devices: of the trainer, in place of those that hardware and placement give it.

    Raises UserError where the placement is not possible on such machines.
    """
    hardware = config.hardware
    if hardware is None or hardware.device is None or hardware.devices_per_host is None:
        sizes = (config.mesh.data, config.mesh.fsdp, config.mesh.tensor)
        trainer = num_devices or math.prod(size for size in sizes if size != -1)
        return Machine(None, None, 1, trainer, 0, None, None)
    device = DEVICES[hardware.device]
    starts_server = config.rollouts.engine == "vllm" and not config.vllm.urls and config.vllm.platform == "cuda"
    if starts_server and device.platform != "gpu":
        raise UserError(f"hardware.device={hardware.device}: vLLM serves a run on GPUs only; set rollouts.engine=jax")
    placed = place(config, hardware.devices_per_host, {})
    is_shared = starts_server and config.vllm.placement == "shared"
    on_host = len(placed.mesh.devices) or hardware.devices_per_host
    trainer_frac = 1.0 if device.platform == "tpu" else config.mesh.memory_frac or JAX_FRAC
    return Machine(
        hardware.device,
        device,
        hardware.num_hosts,
        num_devices or hardware.num_hosts * on_host,
        hardware.num_hosts * len(placed.vllm.devices) if starts_server else 0,
        round(device.memory_bytes * (SHARED_FRAC if is_shared else trainer_frac)),
        round(device.memory_bytes * (config.vllm.memory_frac or VLLM_FRAC)) if starts_server else None,
    )


def environment(machine: Machine) -> dict[str, str]:
    """What a process needs to have the machine's devices: JAX reads it when it starts.

    Always CPUs: TPUs are compiled for through libtpu, without being there, and GPUs by what a CPU stands in for.
    Programs are compiled anew, because one out of the cache has no text; and with little effort spent on a CPU's code,
    which changes neither their memory nor what they send.
    """
    common = {"JAX_PLATFORMS": "cpu", "JAX_ENABLE_COMPILATION_CACHE": "false", "TOKENIZERS_PARALLELISM": "false"}
    if machine.is_tpu:  # libtpu asks no metadata server what it is then
        return {
            **common,
            "TPU_SKIP_MDS_QUERY": "1",
            "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",  # no TPU is opened, so others may have libtpu at the same time
            "TPU_ACCELERATOR_TYPE": "none",
            "TPU_WORKER_HOSTNAMES": "localhost",
            "TPU_STDERR_LOG_LEVEL": "3",
            "TPU_MIN_LOG_LEVEL": "3",
        }
    flags = f"--xla_backend_optimization_level=0 --xla_force_host_platform_device_count={machine.trainer_devices}"
    return {**common, "XLA_FLAGS": flags}


def devices_of(machine: Machine) -> Sequence[jax.Device]:
    """The trainer's, simulated. Raises UserError: no such slice of TPUs, libtpu is not installed."""
    if not machine.is_tpu or machine.name is None:
        return jax.devices()[: machine.trainer_devices]
    family, shapes = _SHAPES[machine.name]
    if machine.trainer_devices not in shapes:
        raise UserError(
            f"hardware.device={machine.name}: no slice has {machine.trainer_devices} chips; there are "
            f"{', '.join(map(str, shapes))} (devices_per_host x num_hosts)"
        )
    from jax.experimental import topologies

    try:
        topology = topologies.get_topology_desc(
            platform="tpu", topology_name=f"{family}:{shapes[machine.trainer_devices]}"
        )
    except (RuntimeError, ImportError, NotImplementedError) as error:
        reason = " ".join(str(error).split())[:200]
        raise UserError(
            f"hardware.device={machine.name}: libtpu, which compiles for it, cannot be used here ({reason}); install "
            "the version that tools/requirements/tpu.txt names, beside the JAX of that file"
        ) from None
    return topology.devices


def attention_of(config: Config, machine: Machine) -> Implementation:
    """What `model.attention` comes to on the machine: as attention.choose_attention decides it there."""
    wanted = config.model.attention
    if wanted != "auto":
        return wanted
    if machine.device is None:
        return "plain"
    if machine.is_tpu:
        return "splash"
    return "cudnn" if config.model.compute_dtype == "bfloat16" else "plain"
