"""A Hugging Face directory to an Orbax checkpoint and back (`launch convert`), a few tensors at a time.

The Orbax side is a directory of two parts: checkpoint/ holds the weights by their Hugging Face names, huggingface/ what
else belongs to the model (configuration, and tokenizer files where there are any), so that the way back needs nothing
else.
"""

import ctypes
from contextlib import suppress
from pathlib import Path

from sgpo_jax.checkpoints import Weights, is_weights, save_weights
from sgpo_jax.files import new_directory, read_json
from sgpo_jax.models.architecture import read_architecture
from sgpo_jax.models.safetensors import copy_companions, read_tensors, write_tensors
from sgpo_jax.types import UserError

COMPANIONS_DIR = "huggingface"
_MIN_PART_BYTES = 100 * 10**6
_M_MMAP_THRESHOLD = -3  # mallopt's name for it, in <malloc.h>


def convert(source: Path, destination: Path, *, dtype: str | None, max_shard_bytes: int) -> str:
    """Convert, and say what was done in a line. dtype: of the result; None: that of the source.

    The host holds at most about max_shard_bytes at a time, or one larger tensor.
    Raises UserError: `source` is neither of the two, or `destination` exists.
    """
    _give_freed_memory_back()
    # Orbax is slow with many small parts, and holds each of them up to three times.
    part_bytes = max(max_shard_bytes // 4, _MIN_PART_BYTES)
    if is_weights(source):
        return _to_huggingface(source, destination, dtype, max_shard_bytes, part_bytes)
    if (source / "config.json").is_file():
        return _to_orbax(source, destination, dtype, part_bytes)
    raise UserError(f"{source}: neither a Hugging Face directory (config.json) nor an Orbax one made by convert")


def _to_orbax(source: Path, destination: Path, dtype: str | None, part_bytes: int) -> str:
    arch = read_architecture(source)
    config = read_json(source / "config.json")
    dtype = dtype or config.get("dtype") or config.get("torch_dtype") or "float32"
    with new_directory(destination.absolute()) as directory:
        save_weights(directory, read_tensors(source, arch, dtype=dtype, max_bytes=part_bytes))
        companions = directory / COMPANIONS_DIR
        companions.mkdir()
        copy_companions(source, companions, dtype)
    return f"{source} (Hugging Face) -> {destination} (Orbax, {dtype})"


def _to_huggingface(source: Path, destination: Path, dtype: str | None, max_shard_bytes: int, part_bytes: int) -> str:
    weights = Weights(source)
    dtype = dtype or str(weights.dtype)
    write_tensors(
        weights.read,
        source / COMPANIONS_DIR,
        destination,
        dtype=dtype,
        max_shard_bytes=max_shard_bytes,
        max_part_bytes=part_bytes,
    )
    return f"{source} (Orbax) -> {destination} (Hugging Face, {dtype})"


def _give_freed_memory_back() -> None:
    """Have glibc return freed blocks of over 1 MB to the system at once.

    By default it keeps those of up to 32 MB, in a heap of every thread: twice the memory that is in use here.
    """
    with suppress(OSError, AttributeError):  # another C library
        ctypes.CDLL("libc.so.6").mallopt(_M_MMAP_THRESHOLD, 1 << 20)
