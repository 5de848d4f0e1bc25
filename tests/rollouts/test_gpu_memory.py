"""Memory given back to the CUDA driver, of which a stand-in does what its documentation says: only a GPU shows more."""

# ruff: noqa: N802 (the names are CUDA's)

import ctypes
from types import SimpleNamespace

import jax
import pytest

from sgpo_jax.rollouts.gpu_memory import GPUMemory, release_unused
from sgpo_jax.types import MachineError

HANDLES = 1 << 40  # wider than an int


class Driver:
    """GPUs of 100 bytes. A pool has bytes in use, and unused ones that a trim releases once their end was waited for.

    Functions return 0, or their error. Devices, contexts and pools are told apart.
    """

    def __init__(self, pools):
        self.used, self.unused = ({gpu: pool[i] for gpu, pool in pools.items()} for i in (0, 1))
        self.waited = set()
        self.retained, self.stack = [], []
        self.failing = ""

    def __getattribute__(self, name):
        if name.startswith("cu") and name == self.failing:
            return lambda *_: 719
        return super().__getattribute__(name)

    def cuDeviceGet(self, device, ordinal):
        device._obj.value = 10 + ordinal.value
        return 0

    def cuDevicePrimaryCtxRetain(self, context, device):
        self.retained.append(device.value)
        context._obj.value = HANDLES + device.value
        return 0

    def cuDevicePrimaryCtxRelease_v2(self, device):
        self.retained.remove(device.value)
        return 0

    def cuCtxPushCurrent_v2(self, context):
        self.stack.append(context.value - HANDLES - 10)
        return 0

    def cuCtxPopCurrent_v2(self, context):
        context._obj.value = HANDLES + 10 + self.stack.pop()
        return 0

    def cuCtxSynchronize(self):
        self.waited.add(self.stack[-1])
        return 0

    def cuDeviceGetDefaultMemPool(self, pool, device):
        pool._obj.value = 2 * HANDLES + device.value
        return 0

    def cuMemPoolTrimTo(self, pool, num_bytes):
        gpu = pool.value - 2 * HANDLES - 10
        if gpu in self.waited:
            self.unused[gpu] = min(self.unused[gpu], num_bytes.value)
        return 0

    def cuMemGetInfo_v2(self, free, total):
        gpu = self.stack[-1]
        free._obj.value, total._obj.value = 100 - self.used[gpu] - self.unused[gpu], 100
        return 0


@pytest.fixture
def driver(monkeypatch):
    driver = Driver({0: (5, 50), 1: (1, 70), 3: (2, 90)})
    devices = [SimpleNamespace(platform="gpu", local_hardware_id=number) for number in (1, 3)]
    monkeypatch.setattr(jax, "local_devices", lambda: devices)
    monkeypatch.setattr(ctypes, "CDLL", {"libcuda.so.1": driver}.__getitem__)
    return driver


def test_what_jaxs_gpus_hold_unused_is_given_back(driver):
    assert release_unused() == [GPUMemory(1, 99, 100), GPUMemory(3, 98, 100)]
    assert driver.unused == {0: 50, 1: 0, 3: 0}, "GPU 0 is not JAX's"
    assert (driver.stack, driver.retained) == ([], [])


@pytest.mark.parametrize("function", ["cuDevicePrimaryCtxRetain", "cuCtxSynchronize", "cuMemPoolTrimTo"])
def test_an_error_of_the_driver_is_raised_and_leaves_no_context(driver, function):
    driver.failing = function
    with pytest.raises(MachineError, match=f"GPU 1: its memory cannot be given back: {function} .* CUDA error 719"):
        release_unused()
    assert (driver.stack, driver.retained) == ([], [])


def test_without_gpus_no_driver_is_asked():
    assert release_unused() == []
