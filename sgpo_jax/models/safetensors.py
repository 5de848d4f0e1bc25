"""Weights in and out as Hugging Face directories: read slice by slice, refused by name, written shard by shard."""

import math
import re
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from huggingface_hub import snapshot_download
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from sgpo_jax.files import new_directory, read_json, write_json, write_text
from sgpo_jax.models.architecture import Architecture, read_architecture
from sgpo_jax.models.attention import Implementation
from sgpo_jax.models.qwen import Remat, Transformer
from sgpo_jax.models.sharding import check_divisible, on_devices, partition_spec, weight_sharding
from sgpo_jax.models.tensor_files import (
    FLOAT_TYPES,
    INDEX_FILE,
    SINGLE_FILE,
    StoredTensor,
    map_checkpoint,
    write_index,
    write_tensor_file,
)
from sgpo_jax.models.weights import Weight, weight_table, weight_tree
from sgpo_jax.types import MachineError, UserError

_ALIGNMENT = 64  # bytes

T = TypeVar("T")
Made = TypeVar("Made")

# What goes with the weights from directory to directory, besides config.json.
COMPANIONS = (
    "generation_config.json",
    "tokenizer*",
    "vocab*",
    "merges.txt",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template*",
)

_HUB_NAME = re.compile(r"[\w-][\w.-]*(/[\w-][\w.-]*)?")


def resolve_model_dir(path_or_hub_name: str | Path) -> Path:
    """An existing directory as it is, else the local copy of a Hugging Face hub model, fetched where it is missing.

    Raises UserError naming both places where neither has it.
    """
    path, name = Path(path_or_hub_name), str(path_or_hub_name)
    if path.is_dir():
        return path
    if not _HUB_NAME.fullmatch(name):
        raise UserError(f"{name}: no such model directory (and not the form of a hub name, owner/model)")
    try:
        return Path(snapshot_download(name, allow_patterns=["config.json", "*.safetensors", INDEX_FILE, *COMPANIONS]))
    except (OSError, ValueError) as error:  # the hub's own errors are kinds of these
        reason = " ".join(str(error).split())
        raise UserError(f"{name}: no such directory, and the Hugging Face hub does not give it: {reason}") from error


def load_model(
    model_dir: Path,
    *,
    compute_dtype: jax.typing.DTypeLike,
    remat: Remat,
    attention: Implementation = "plain",
    mesh: Mesh | None = None,
) -> Transformer:
    """The model of a Hugging Face directory, with float32 weights. Raises what its two readers raise."""
    arch = read_architecture(model_dir)
    params = load_params(model_dir, arch, mesh=mesh)
    graphdef = nnx.graphdef(abstract_model(arch, compute_dtype=compute_dtype, remat=remat, attention=attention))
    return nnx.merge(graphdef, params)


def abstract_model(
    arch: Architecture,
    *,
    compute_dtype: jax.typing.DTypeLike,
    remat: Remat,
    attention: Implementation = "plain",
) -> Transformer:
    """A Transformer whose weights are shapes without values."""

    def make() -> Transformer:
        return Transformer(arch, rngs=None, compute_dtype=compute_dtype, remat=remat, attention=attention)

    return nnx.eval_shape(make)


def load_params(
    model_dir: Path, arch: Architecture, *, dtype: jax.typing.DTypeLike = jnp.float32, mesh: Mesh | None = None
) -> nnx.State:
    """The weights of a Hugging Face directory as the Transformer's state, of type `dtype`.

    With a mesh they are born sharded, and every process reads only its own slices. They go to the devices as they are
    stored, and are turned and converted there; one weight is read ahead.
    Raises UserError naming every tensor that is missing, too many, misshapen or not of floats, and an lm_head that
    differs from the embedding it is tied to.
    """
    if mesh:
        check_divisible(arch, mesh)
    tensors = map_checkpoint(model_dir)
    _check_tensors(model_dir, arch, tensors)

    def put(weight: Weight) -> jax.Array:
        read = partial(_read_weight, weight, tensors)
        shape = _as_stored(weight, weight.shape)
        if mesh is None:
            return jax.device_put(read((slice(None),) * len(shape)))
        spec = _as_stored(weight, tuple(partition_spec(weight.axes)))
        return jax.make_array_from_callback(shape, NamedSharding(mesh, PartitionSpec(*spec)), read)

    def finish(weight: Weight, stored: jax.Array) -> jax.Array:
        return _finish(stored, weight.transpose, jnp.dtype(dtype), weight_sharding(weight, mesh) if mesh else None)

    arrays = {weight.path: finish(weight, stored) for weight, stored in _one_ahead(put, weight_table(arch))}
    return nnx.State(weight_tree(arch, lambda weight: nnx.Param(arrays[weight.path])))


@partial(jax.jit, static_argnames=("transpose", "dtype", "sharding"))
def _finish(stored: jax.Array, transpose: bool, dtype: np.dtype, sharding: NamedSharding | None) -> jax.Array:
    """What was read, as the Transformer has it: a copy, since a device may use the host's own memory for `stored`."""
    weight = jnp.copy(stored.swapaxes(-1, -2) if transpose else stored).astype(dtype)
    return weight if sharding is None else jax.lax.with_sharding_constraint(weight, sharding)


def _as_stored(weight: Weight, of_dimensions: tuple[T, ...]) -> tuple[T, ...]:
    """What belongs to a weight's dimensions, in the order of those that checkpoints have."""
    return (*of_dimensions[:-2], *of_dimensions[:-3:-1]) if weight.transpose else of_dimensions


def export_model(
    params: Transformer | nnx.State,
    arch: Architecture,
    source_dir: Path,
    out_dir: Path,
    *,
    dtype: jax.typing.DTypeLike,
    max_shard_bytes: int,
    extra_files: Mapping[str, str] | None = None,
    overwrite: bool = False,
) -> None:
    """Write `params` as a Hugging Face directory, whole or not at all. Of several processes, those that write nothing
    call `join_export` meanwhile.

    Configuration (with `dtype` in it), generation configuration, tokenizer and chat template come from `source_dir`.
    Each tensor is gathered alone, and the host holds that one and the next.
    extra_files: further files by name, text. overwrite: replace an out_dir that exists.
    Raises UserError where out_dir exists and is not to be replaced, or source_dir is another model.
    """
    if read_architecture(source_dir) != arch:
        raise UserError(f"{source_dir / 'config.json'}: not the configuration of the model to be exported to {out_dir}")
    shards = _plan_shards(arch, jnp.dtype(dtype).itemsize, max_shard_bytes)
    gathered = partial(_gathered, params, dtype=dtype)
    _write_shards(shards, gathered, source_dir, out_dir, dtype, extra_files or {}, overwrite=overwrite)


def join_export(params: Transformer | nnx.State, arch: Architecture, *, dtype: jax.typing.DTypeLike) -> None:
    """The part in `export_model` of a process that writes nothing: every tensor is gathered in all of them."""
    for _ in _gathered(params, _tensors(arch), dtype=dtype):
        pass


def write_tensors(
    read: Callable[[Sequence[str]], Iterable[np.ndarray]],
    source_dir: Path,
    out_dir: Path,
    *,
    dtype: jax.typing.DTypeLike,
    max_shard_bytes: int,
) -> None:
    """`export_model` for tensors that `read` gives by their Hugging Face names.

    read: these tensors in their order, of any type.
    """

    def values(tensors: Sequence[_Tensor]) -> Iterable[np.ndarray]:
        return read([tensor.name for tensor in tensors])

    shards = _plan_shards(read_architecture(source_dir), jnp.dtype(dtype).itemsize, max_shard_bytes)
    _write_shards(shards, values, source_dir, out_dir, dtype, {}, overwrite=False)


def read_tensors(model_dir: Path, arch: Architecture) -> Iterator[tuple[str, np.ndarray]]:
    """The tensors of a Hugging Face directory with their names, as they are stored, each a view of its mapped file.

    Memory holds those that the caller keeps. Raises what `load_params` raises.
    """
    tensors = map_checkpoint(model_dir)
    _check_tensors(model_dir, arch, tensors)
    for name in tensor_shapes(arch):
        yield name, tensors[name].values


def tensor_shapes(arch: Architecture) -> dict[str, tuple[int, ...]]:
    """The shape of every tensor of a checkpoint, by its Hugging Face name."""
    return {tensor.name: tensor.weight.hf_shape for tensor in _tensors(arch)}


def _write_shards(
    shards: Mapping[str, Sequence["_Tensor"]],
    read: Callable[[Sequence["_Tensor"]], Iterable[np.ndarray]],
    source_dir: Path,
    out_dir: Path,
    dtype: jax.typing.DTypeLike,
    extra_files: Mapping[str, str],
    *,
    overwrite: bool,
) -> None:
    with new_directory(out_dir, overwrite=overwrite) as directory:
        for file, tensors in shards.items():
            try:
                shapes = [(tensor.name, tensor.weight.hf_shape) for tensor in tensors]
                write_tensor_file(directory / file, shapes, read(tensors), jnp.dtype(dtype))
            except OSError as error:
                raise MachineError(f"{out_dir}: {file} cannot be written: {error.strerror}") from error
        if len(shards) > 1:
            names = {file: [tensor.name for tensor in tensors] for file, tensors in shards.items()}
            itemsize = jnp.dtype(dtype).itemsize
            write_index(directory, names, sum(t.num_bytes(itemsize) for tensors in shards.values() for t in tensors))
        copy_companions(source_dir, directory, str(jnp.dtype(dtype)))
        for name, text in extra_files.items():
            write_text(directory / name, text)


def _check_tensors(model_dir: Path, arch: Architecture, tensors: Mapping[str, StoredTensor]) -> None:
    """Raises UserError listing by name all that does not fit."""
    wanted = tensor_shapes(arch)
    found = set(tensors)
    problems = [f"{name} is missing" for name in wanted if name not in found]
    redundant_head = arch.tie_embeddings and "lm_head.weight" in found
    extra = found - set(wanted) - ({"lm_head.weight"} if redundant_head else set())
    problems += [f"{name} is not a tensor of this model" for name in sorted(extra)]
    for name in sorted(found & set(wanted)):
        shape, kind = tensors[name].shape, tensors[name].type_name
        if shape != wanted[name]:
            problems.append(f"{name} has shape {list(shape)}, config.json means {list(wanted[name])}")
        if kind not in FLOAT_TYPES:
            problems.append(f"{name} has type {kind}, supported are {', '.join(FLOAT_TYPES)}")
    if not problems and redundant_head and not _equal(tensors["lm_head.weight"], tensors["model.embed_tokens.weight"]):
        problems.append("lm_head.weight differs from model.embed_tokens.weight, but config.json ties them")
    if problems:
        raise UserError(f"{model_dir}: {len(problems)} problems with its tensors: {'; '.join(problems)}")


def _equal(one: StoredTensor, other: StoredTensor, rows: int = 4096) -> bool:
    """Bit equality of two matrices, a few rows at a time."""
    if (one.shape, one.type_name) != (other.shape, other.type_name):
        return False
    spans = (slice(start, start + rows) for start in range(0, one.shape[0], rows))
    return all(one.values[span].tobytes() == other.values[span].tobytes() for span in spans)


def _hf_names(weight: Weight) -> list[str]:
    """The tensors that a weight is made of; one a layer where it is stacked."""
    return [weight.hf_name.format(layer=layer) for layer in range(weight.num_tensors)]


def _read_weight(weight: Weight, tensors: Mapping[str, StoredTensor], index: tuple[slice, ...]) -> np.ndarray:
    """A slice of a weight as it is stored, matrices [out, in], in the host's own memory."""
    parts = [tensors[name].values for name in _hf_names(weight)]
    parts = [part[index[1:]] for part in parts[index[0]]] if weight.is_stacked else [parts[0][index]]
    dtypes = {part.dtype for part in parts}
    stacked = _aligned_empty((len(parts), *parts[0].shape), dtypes.pop() if len(dtypes) == 1 else np.dtype(np.float32))
    for row, part in zip(stacked, parts, strict=True):
        row[...] = part
    return stacked if weight.is_stacked else stacked[0]


def _aligned_empty(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """Memory that JAX uses on CPUs as it is; of any other it makes a copy."""
    size = math.prod(shape) * dtype.itemsize
    memory = np.empty(size + _ALIGNMENT, np.uint8)
    start = -memory.ctypes.data % _ALIGNMENT
    return memory[start : start + size].view(dtype).reshape(shape)


def _one_ahead(make: Callable[[T], Made], items: Sequence[T]) -> Iterator[tuple[T, Made]]:
    """Each item with what is made of it, while the next one is being made."""
    with ThreadPoolExecutor(1) as worker:
        coming = worker.submit(make, items[0])
        for item, following in zip(items, [*items[1:], None], strict=True):
            made = coming.result()
            if following is not None:
                coming = worker.submit(make, following)
            yield item, made
            del made


@dataclass(frozen=True)
class _Tensor:
    """One tensor of an export: a weight, or one layer of a stacked weight."""

    name: str
    weight: Weight
    layer: int

    def num_bytes(self, itemsize: int) -> int:
        return math.prod(self.weight.hf_shape) * itemsize


def _plan_shards(arch: Architecture, itemsize: int, max_shard_bytes: int) -> dict[str, list[_Tensor]]:
    """Which tensors go into which file: filled in the order of the table; a larger tensor has a file of its own."""
    shards = _partition(_tensors(arch), itemsize, max_shard_bytes)
    if len(shards) == 1:
        return {SINGLE_FILE: shards[0]}
    return {f"model-{number:05}-of-{len(shards):05}.safetensors": shard for number, shard in enumerate(shards, start=1)}


def _tensors(arch: Architecture) -> list[_Tensor]:
    return [_Tensor(name, w, layer) for w in weight_table(arch) for layer, name in enumerate(_hf_names(w))]


def _partition(tensors: Iterable[_Tensor], itemsize: int, max_bytes: int) -> list[list[_Tensor]]:
    """In their order, each part filled up to max_bytes; a larger tensor is a part of its own."""
    parts: list[list[_Tensor]] = []
    free = 0
    for tensor in tensors:
        if not parts or tensor.num_bytes(itemsize) > free:
            parts.append([])
            free = max_bytes
        parts[-1].append(tensor)
        free -= tensor.num_bytes(itemsize)
    return parts


def _gathered(
    params: Transformer | nnx.State, tensors: Iterable[_Tensor], *, dtype: jax.typing.DTypeLike
) -> Iterator[np.ndarray]:
    """The tensors one by one, each gathered alone, while the devices get the next one ready."""
    arrays = dict(nnx.to_flat_state(nnx.state(params, nnx.Param) if isinstance(params, nnx.Module) else params))
    before: jax.Array | None = None
    for weight, own in groupby(tensors, key=lambda tensor: tensor.weight):
        array = on_devices(arrays[weight.path][...])
        for tensor in own:
            part = _part(array, tensor.layer, weight.is_stacked, weight.transpose, jnp.dtype(dtype))
            if before is not None:
                yield _on_host(before)
            before = part
    if before is not None:
        yield _on_host(before)


@partial(jax.jit, static_argnames=("is_stacked", "transpose", "dtype"))
def _part(weight: jax.Array, layer: int, is_stacked: bool, transpose: bool, dtype: np.dtype) -> jax.Array:
    """One tensor of a weight, as checkpoints have it."""
    part = jax.lax.dynamic_index_in_dim(weight, layer, keepdims=False) if is_stacked else weight
    return jnp.copy(part.swapaxes(-1, -2) if transpose else part).astype(dtype)


def _on_host(array: jax.Array) -> np.ndarray:
    """The whole array in this process's memory. A collective where it is spread over hosts."""
    return np.asarray(array if array.is_fully_addressable else multihost_utils.process_allgather(array, tiled=True))


def copy_companions(source_dir: Path, directory: Path, dtype: str) -> None:
    """config.json with the exported type, and what else belongs to the model, unchanged."""
    config = read_json(source_dir / "config.json")
    keys = {"dtype", "torch_dtype"} & config.keys() or {"torch_dtype"}  # new and old name; all readers know the old one
    write_json(directory / "config.json", config | dict.fromkeys(keys, dtype))
    for file in (file for pattern in COMPANIONS for file in source_dir.glob(pattern) if file.is_file()):
        shutil.copyfile(file, directory / file.name)
