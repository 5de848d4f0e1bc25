"""A Hugging Face directory to an Orbax checkpoint and back (`launch convert`), tensor by tensor.

The Orbax side is a directory of two parts: checkpoint/ holds the weights by their Hugging Face names, huggingface/ what
else belongs to the model (configuration, and tokenizer files where there are any), so that the way back needs nothing
else.
"""

from pathlib import Path

import jax.numpy as jnp

from sgpo_jax.checkpoints import Weights, is_weights, save_weights
from sgpo_jax.files import new_directory, read_json
from sgpo_jax.models.architecture import read_architecture
from sgpo_jax.models.safetensors import copy_companions, read_tensors, tensor_shapes, write_tensors
from sgpo_jax.types import UserError

COMPANIONS_DIR = "huggingface"


def convert(source: Path, destination: Path, *, dtype: str | None, max_shard_bytes: int) -> str:
    """Convert, and say what was done in a line.

    The host holds one tensor at a time, in mapped files. max_shard_bytes: of the files of a Hugging Face directory.
    dtype: of the result; None: that of the source.
    Raises UserError: `source` is neither of the two, or `destination` exists.
    """
    if is_weights(source):
        return _to_huggingface(source, destination, dtype, max_shard_bytes)
    if (source / "config.json").is_file():
        return _to_orbax(source, destination, dtype)
    raise UserError(f"{source}: neither a Hugging Face directory (config.json) nor an Orbax one made by convert")


def _to_orbax(source: Path, destination: Path, dtype: str | None) -> str:
    arch = read_architecture(source)
    config = read_json(source / "config.json")
    dtype = dtype or config.get("dtype") or config.get("torch_dtype") or "float32"
    with new_directory(destination.absolute()) as directory:
        save_weights(directory, tensor_shapes(arch), read_tensors(source, arch), jnp.dtype(dtype))
        companions = directory / COMPANIONS_DIR
        companions.mkdir()
        copy_companions(source, companions, dtype)
    return f"{source} (Hugging Face) -> {destination} (Orbax, {dtype})"


def _to_huggingface(source: Path, destination: Path, dtype: str | None, max_shard_bytes: int) -> str:
    weights = Weights(source)
    dtype = dtype or str(weights.dtype)
    wanted, found = tensor_shapes(read_architecture(source / COMPANIONS_DIR)), weights.shapes
    if problems := sorted(name for name in wanted.keys() | found.keys() if wanted.get(name) != found.get(name)):
        raise UserError(f"{source}: its weights are not those of its config.json: {', '.join(problems)}")
    write_tensors(weights.read, source / COMPANIONS_DIR, destination, dtype=dtype, max_shard_bytes=max_shard_bytes)
    return f"{source} (Orbax) -> {destination} (Hugging Face, {dtype})"
