"""Memory of the vLLM servers that a run starts on GPUs, by arithmetic."""

import math
from dataclasses import dataclass

from sgpo_jax.check.machine import Machine
from sgpo_jax.check.memory import kv_bytes_per_token
from sgpo_jax.config import Config
from sgpo_jax.hardware import GIB
from sgpo_jax.models.architecture import Architecture
from sgpo_jax.models.weights import weight_table

_OWN_GIB = 4.0  # what a server takes beside weights and cache: CUDA graphs, the activations of one step; assumed


@dataclass(frozen=True, slots=True)
class ServerMemory:
    """Bytes of one GPU. num_sequences: completions of full length that all copies of the model hold side by side."""

    weights: int
    kv_cache: int
    budget: int
    num_copies: int
    num_sequences: int


def server_memory(config: Config, machine: Machine, arch: Architecture, row_length: int) -> ServerMemory | None:
    """None where the run starts no server on GPUs. row_length: tokens of the longest prompt with its completion.

    kv_cache is what vllm.memory_frac leaves for it, 0 where that is nothing.
    """
    if not machine.server_devices or machine.server_bytes is None:
        return None
    itemsize = 2 if config.model.compute_dtype == "bfloat16" else 4
    split = config.vllm.tensor_parallel
    weights = sum(
        math.prod(weight.shape) * itemsize // (split if weight.is_matrix else 1) for weight in weight_table(arch)
    )
    left = max(0, machine.server_bytes - weights - round(_OWN_GIB * GIB))
    per_token = kv_bytes_per_token(arch, itemsize) // min(split, arch.num_kv_heads)
    copies = machine.server_devices // split
    return ServerMemory(weights, left, machine.server_bytes, copies, copies * (left // (per_token * row_length)))
