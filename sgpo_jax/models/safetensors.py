"""Weights in and out as Hugging Face directories: read slice by slice, refused by name, written shard by shard."""

import json
import math
import re
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from huggingface_hub import snapshot_download
from jax.experimental import multihost_utils
from jax.sharding import Mesh
from safetensors import SafetensorError, safe_open

from sgpo_jax.files import new_directory, read_json, write_json, write_text, write_values
from sgpo_jax.models.architecture import Architecture, read_architecture
from sgpo_jax.models.attention import Implementation
from sgpo_jax.models.qwen import Remat, Transformer
from sgpo_jax.models.sharding import check_divisible, on_devices, weight_sharding
from sgpo_jax.models.weights import Weight, weight_table, weight_tree
from sgpo_jax.types import MachineError, UserError

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
_TYPE_NAMES = {"float32": "F32", "bfloat16": "BF16", "float16": "F16"}
_TYPES = {name: jnp.dtype(dtype) for dtype, name in _TYPE_NAMES.items()}
FLOAT_TYPES = tuple(_TYPES)

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

# Buffers that old checkpoints hold beside the weights; they follow from the configuration.
_IGNORED = re.compile(r"rotary_emb\.inv_freq$")
_HUB_NAME = re.compile(r"[\w-][\w.-]*(/[\w-][\w.-]*)?")

# One tensor of a checkpoint, as safetensors gives it: get_shape(), get_dtype(), [slices] -> np.ndarray.
TensorSlice = Any


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

    With a mesh they are born sharded, and every process reads only its own slices. Raises UserError naming every tensor
    that is missing, too many, misshapen or not of floats, and an lm_head that differs from the embedding it is tied to.
    """
    if mesh:
        check_divisible(arch, mesh)
    with _open_checkpoint(model_dir) as tensors:
        _check_tensors(model_dir, arch, tensors)

        def load(weight: Weight) -> jax.Array:
            def read(index: tuple[slice, ...] | None) -> np.ndarray:
                return _read_weight(weight, tensors, index or (slice(None),) * len(weight.shape), jnp.dtype(dtype))

            if mesh is None:
                return jnp.asarray(read(None))
            return jax.make_array_from_callback(weight.shape, weight_sharding(weight, mesh), read)

        return nnx.State(weight_tree(arch, lambda weight: nnx.Param(load(weight))))


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
    with _open_checkpoint(model_dir) as tensors:
        _check_tensors(model_dir, arch, tensors)
    names = tensor_shapes(arch).keys()
    for file in _files(model_dir):
        with file.open("rb") as source:
            header_bytes = int.from_bytes(source.read(8), "little")
            header = json.loads(source.read(header_bytes))
        for name in header.keys() & names:
            start = 8 + header_bytes + header[name]["data_offsets"][0]
            dtype, shape = _TYPES[header[name]["dtype"]], tuple(header[name]["shape"])
            yield name, np.memmap(file, dtype, mode="r", offset=start, shape=shape)


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
                _write_file(directory / file, tensors, read(tensors), jnp.dtype(dtype))
            except OSError as error:
                raise MachineError(f"{out_dir}: {file} cannot be written: {error.strerror}") from error
        if len(shards) > 1:
            _write_index(directory, shards, jnp.dtype(dtype).itemsize)
        copy_companions(source_dir, directory, str(jnp.dtype(dtype)))
        for name, text in extra_files.items():
            write_text(directory / name, text)


def _write_file(path: Path, tensors: Sequence["_Tensor"], values: Iterable[np.ndarray], dtype: np.dtype) -> None:
    """One safetensors file, written value by value: the library's own writer wants to have them all in memory.

    Its format is the length of the header (64 bits, little-endian), the header as JSON, and the values in their order.
    """
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for tensor in tensors:
        start, end = end, end + tensor.num_bytes(dtype.itemsize)
        shape = list(tensor.weight.hf_shape)
        header[tensor.name] = {"dtype": _TYPE_NAMES[str(dtype)], "shape": shape, "data_offsets": [start, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # so that values are aligned in a mapped file
    with path.open("xb") as sink:
        sink.write(len(text).to_bytes(8, "little") + text)
        for tensor, value in zip(tensors, values, strict=True):
            assert value.shape == tensor.weight.hf_shape, tensor.name
            write_values(sink, value, dtype)


@contextmanager
def _open_checkpoint(model_dir: Path) -> Iterator[dict[str, TensorSlice]]:
    """Every tensor of the directory by name, unread."""
    tensors: dict[str, TensorSlice] = {}
    with ExitStack() as stack:
        for file in _files(model_dir):
            try:
                handle = stack.enter_context(safe_open(file, framework="numpy"))
                tensors.update({name: handle.get_slice(name) for name in handle.keys()})  # noqa: SIM118 (not a dict)
            except FileNotFoundError:
                raise UserError(f"{file}: no such file; a model directory needs its safetensors") from None
            except SafetensorError as error:
                raise UserError(f"{file}: not a whole safetensors file: {error}") from None
        yield tensors


def _files(model_dir: Path) -> list[Path]:
    index = model_dir / INDEX_FILE
    if not index.exists():
        return [model_dir / SINGLE_FILE]
    try:
        return [model_dir / name for name in sorted(set(read_json(index)["weight_map"].values()))]
    except (KeyError, TypeError, AttributeError):
        raise UserError(f"{index}: not an index of safetensors files: weight_map is missing or no object") from None


def _check_tensors(model_dir: Path, arch: Architecture, tensors: Mapping[str, TensorSlice]) -> None:
    """Raises UserError listing by name all that does not fit."""
    wanted = tensor_shapes(arch)
    found = {name for name in tensors if not _IGNORED.search(name)}
    problems = [f"{name} is missing" for name in wanted if name not in found]
    redundant_head = arch.tie_embeddings and "lm_head.weight" in found
    extra = found - set(wanted) - ({"lm_head.weight"} if redundant_head else set())
    problems += [f"{name} is not a tensor of this model" for name in sorted(extra)]
    for name in sorted(found & set(wanted)):
        shape, kind = tuple(tensors[name].get_shape()), tensors[name].get_dtype()
        if shape != wanted[name]:
            problems.append(f"{name} has shape {list(shape)}, config.json means {list(wanted[name])}")
        if kind not in FLOAT_TYPES:
            problems.append(f"{name} has type {kind}, supported are {', '.join(FLOAT_TYPES)}")
    if not problems and redundant_head and not _equal(tensors["lm_head.weight"], tensors["model.embed_tokens.weight"]):
        problems.append("lm_head.weight differs from model.embed_tokens.weight, but config.json ties them")
    if problems:
        raise UserError(f"{model_dir}: {len(problems)} problems with its tensors: {'; '.join(problems)}")


def _equal(one: TensorSlice, other: TensorSlice, rows: int = 4096) -> bool:
    """Bit equality of two matrices, read a few rows at a time."""
    if one.get_shape() != other.get_shape() or one.get_dtype() != other.get_dtype():
        return False
    height = one.get_shape()[0]
    spans = (slice(start, min(start + rows, height)) for start in range(0, height, rows))
    return all(one[span].tobytes() == other[span].tobytes() for span in spans)


def _hf_names(weight: Weight) -> list[str]:
    """The tensors that a weight is made of; one a layer where it is stacked."""
    return [weight.hf_name.format(layer=layer) for layer in range(weight.num_tensors)]


def _read_weight(
    weight: Weight, tensors: Mapping[str, TensorSlice], index: tuple[slice, ...], dtype: np.dtype
) -> np.ndarray:
    """weight[index], read from the tensors that hold it."""
    names = _hf_names(weight)
    bounds = [slice(*part.indices(size)) for part, size in zip(index, weight.shape, strict=True)]
    within = bounds[1:] if weight.is_stacked else bounds
    if not weight.is_stacked:
        return _read_tensor(weight, tensors[names[0]], within).astype(dtype)
    stacked = np.empty([part.stop - part.start for part in bounds], dtype)
    for row, name in enumerate(names[bounds[0]]):
        stacked[row] = _read_tensor(weight, tensors[name], within)
    return stacked


def _read_tensor(weight: Weight, tensor: TensorSlice, index: list[slice]) -> np.ndarray:
    return tensor[tuple(index[::-1])].T if weight.transpose else tensor[tuple(index)]


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
    params: Transformer | nnx.State, tensors: Sequence[_Tensor], *, dtype: jax.typing.DTypeLike
) -> Iterator[np.ndarray]:
    """The tensors one by one, each gathered alone."""
    arrays = dict(nnx.to_flat_state(nnx.state(params, nnx.Param) if isinstance(params, nnx.Module) else params))
    for weight, own in groupby(tensors, key=lambda tensor: tensor.weight):
        array = on_devices(arrays[weight.path][...])
        for tensor in own:
            yield _gather(tensor, array, dtype)


def _gather(tensor: _Tensor, stacked: jax.Array, dtype: jax.typing.DTypeLike) -> np.ndarray:
    """The whole tensor in this process's memory, as checkpoints have it. A collective where it is spread over hosts."""
    part = (stacked[tensor.layer] if tensor.weight.is_stacked else stacked).astype(dtype)
    whole = np.asarray(part if part.is_fully_addressable else multihost_utils.process_allgather(part, tiled=True))
    return np.ascontiguousarray(whole.T if tensor.weight.transpose else whole)


def _write_index(directory: Path, shards: Mapping[str, Sequence[_Tensor]], itemsize: int) -> None:
    placed = [(tensor, file) for file, tensors in shards.items() for tensor in tensors]
    total = sum(tensor.num_bytes(itemsize) for tensor, _ in placed)
    weight_map = {tensor.name: file for tensor, file in placed}
    write_json(directory / INDEX_FILE, {"metadata": {"total_size": total}, "weight_map": weight_map})


def copy_companions(source_dir: Path, directory: Path, dtype: str) -> None:
    """config.json with the exported type, and what else belongs to the model, unchanged."""
    config = read_json(source_dir / "config.json")
    keys = {"dtype", "torch_dtype"} & config.keys() or {"torch_dtype"}  # new and old name; all readers know the old one
    write_json(directory / "config.json", config | dict.fromkeys(keys, dtype))
    for file in (file for pattern in COMPANIONS for file in source_dir.glob(pattern) if file.is_file()):
        shutil.copyfile(file, directory / file.name)
