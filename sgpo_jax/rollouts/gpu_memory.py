"""GPU memory that arrays have left, given back to the other processes of the machine.

Under vllm.placement=shared JAX takes memory from each GPU's default pool of the CUDA driver (`placement.claim`). A pool
gives nothing back before the host has seen the work on it end (CUDA driver API, cuMemPoolTrimTo), and JAX has no
function that asks for it: so the driver, which JAX has loaded, is asked itself.
"""

import ctypes
from dataclasses import dataclass
from typing import Any

import jax

from sgpo_jax.types import MachineError

_DRIVER = "libcuda.so.1"


@dataclass(frozen=True, slots=True)
class GPUMemory:
    """Bytes of a GPU, over all processes. number: of the GPU, among those that this process sees."""

    number: int
    free: int
    total: int


def release_unused() -> list[GPUMemory]:
    """Wait until JAX's GPUs are idle, give back what it holds of their memory unused, and tell what is then free.

    Empty where JAX runs on no GPUs. Raises MachineError where the driver refuses.
    """
    gpus = [device.local_hardware_id for device in jax.local_devices() if device.platform == "gpu"]
    driver = ctypes.CDLL(_DRIVER) if gpus else None
    return [_release(driver, gpu) for gpu in gpus]


def _release(driver: Any, gpu: int) -> GPUMemory:
    """The synchronisation needs a context, and JAX uses the GPU's primary one."""

    def call(function: str, *arguments: Any) -> None:
        if error := getattr(driver, function)(*arguments):
            raise MachineError(f"GPU {gpu}: its memory cannot be given back: {function} failed with CUDA error {error}")

    device, context, pool = ctypes.c_int(), ctypes.c_void_p(), ctypes.c_void_p()
    free, total = ctypes.c_size_t(), ctypes.c_size_t()
    call("cuDeviceGet", ctypes.byref(device), ctypes.c_int(gpu))
    call("cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
    try:
        call("cuCtxPushCurrent_v2", context)
        try:
            call("cuCtxSynchronize")
            call("cuDeviceGetDefaultMemPool", ctypes.byref(pool), device)
            call("cuMemPoolTrimTo", pool, ctypes.c_size_t(0))
            call("cuMemGetInfo_v2", ctypes.byref(free), ctypes.byref(total))
        finally:
            call("cuCtxPopCurrent_v2", ctypes.byref(ctypes.c_void_p()))
    finally:
        call("cuDevicePrimaryCtxRelease_v2", device)
    return GPUMemory(gpu, free.value, total.value)
