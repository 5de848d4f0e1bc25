"""Devices that a configuration may name: what `check` holds memory to, and forecasts make hours of."""

from dataclasses import dataclass
from typing import Literal

Platform = Literal["gpu", "tpu"]

GIB = 2**30


@dataclass(frozen=True, slots=True)
class Device:
    """memory_gib: what the driver gives to programs of one device, in GiB, a little less than what it is sold with.
    bf16_flops_per_s: peak of dense bfloat16 matrix products.
    """

    platform: Platform
    memory_gib: float
    bf16_flops_per_s: float

    @property
    def memory_bytes(self) -> int:
        return round(self.memory_gib * GIB)


# Peaks of GPUs: NVIDIA's data sheets of the SXM modules, without their factor of 2 for sparsity. Memory of GPUs: what
# CUDA reports in total. TPUs, by chip: Google's "Cloud TPU system architecture"; their memory as libtpu 0.0.42 reports
# it where a program needs more.
DEVICES: dict[str, Device] = {
    "a100-40gb": Device("gpu", 39.4, 312e12),
    "a100-80gb": Device("gpu", 79.1, 312e12),
    "h100-80gb": Device("gpu", 79.1, 989.4e12),
    "h200": Device("gpu", 139.8, 989.4e12),
    "b200": Device("gpu", 178.3, 2250e12),
    "tpu-v5e": Device("tpu", 15.75, 197e12),
    "tpu-v5p": Device("tpu", 95.74, 459e12),
    "tpu-v6e": Device("tpu", 31.25, 918e12),
}
