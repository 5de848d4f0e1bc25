"""A Hugging Face directory to an Orbax checkpoint and back (`launch convert`).

The Orbax side is a directory of two parts: checkpoint/ holds the weights, huggingface/ what else belongs to the model
(configuration, and tokenizer files where there are any), so that the way back needs nothing else.
"""

from pathlib import Path

import jax
import jax.numpy as jnp
from flax import nnx

from sgpo_jax.checkpoints import is_weights, load_weights, save_weights, saved_dtype
from sgpo_jax.files import new_directory, read_json
from sgpo_jax.models.architecture import read_architecture
from sgpo_jax.models.safetensors import abstract_model, copy_companions, export_model, load_params
from sgpo_jax.types import UserError

COMPANIONS_DIR = "huggingface"


def convert(source: Path, destination: Path, *, dtype: str | None, max_shard_bytes: int) -> str:
    """Convert, and say what was done in a line. dtype: of the result; None: that of the source.

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
    params = load_params(source, arch, dtype=jnp.dtype(dtype))
    with new_directory(destination.absolute()) as directory:
        save_weights(directory, params)
        companions = directory / COMPANIONS_DIR
        companions.mkdir()
        copy_companions(source, companions, dtype)
    return f"{source} (Hugging Face) -> {destination} (Orbax, {dtype})"


def _to_huggingface(source: Path, destination: Path, dtype: str | None, max_shard_bytes: int) -> str:
    companions = source / COMPANIONS_DIR
    arch = read_architecture(companions)
    saved = saved_dtype(source)
    abstract = nnx.state(abstract_model(arch, compute_dtype=jnp.float32, remat="none"))
    abstract = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, saved), abstract)
    params = load_weights(source, abstract)
    dtype = dtype or str(saved)
    export_model(params, arch, companions, destination, dtype=dtype, max_shard_bytes=max_shard_bytes)
    return f"{source} (Orbax) -> {destination} (Hugging Face, {dtype})"
