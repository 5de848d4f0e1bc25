"""Safetensors files: found, mapped into memory, refused where they are not whole, and written value by value."""

import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
from safetensors import SafetensorError, safe_open

from sgpo_jax.files import read_json, write_json, write_values, written_behind
from sgpo_jax.types import UserError

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
_TYPE_NAMES = {"float32": "F32", "bfloat16": "BF16", "float16": "F16"}
_TYPES = {name: jnp.dtype(dtype) for dtype, name in _TYPE_NAMES.items()}
FLOAT_TYPES = tuple(_TYPES)

# Buffers that old checkpoints hold beside the weights; they follow from the configuration.
_IGNORED = re.compile(r"rotary_emb\.inv_freq$")


@dataclass(frozen=True)
class StoredTensor:
    """A tensor of a mapped file. type_name: as safetensors has it, "BF16"."""

    shape: tuple[int, ...]
    type_name: str
    _bytes: np.ndarray

    @property
    def values(self) -> np.ndarray:
        """A view of the file; of a type in FLOAT_TYPES."""
        return self._bytes.view(_TYPES[self.type_name]).reshape(self.shape)


def map_checkpoint(model_dir: Path) -> dict[str, StoredTensor]:
    """Every tensor of a Hugging Face directory by name, unread.

    Raises UserError naming a file that is missing or not whole.
    """
    tensors: dict[str, StoredTensor] = {}
    for file in _files(model_dir):
        try:
            with safe_open(file, framework="numpy"):  # which checks the header against the file
                pass
        except FileNotFoundError:
            raise UserError(f"{file}: no such file; a model directory needs its safetensors") from None
        except SafetensorError as error:
            raise UserError(f"{file}: not a whole safetensors file: {error}") from None
        mapped = np.memmap(file, np.uint8, mode="r")
        start = 8 + int(mapped[:8].view("<u8")[0])
        header = json.loads(mapped[8:start].tobytes())
        for name, entry in header.items():
            if name != "__metadata__" and not _IGNORED.search(name):
                first, end = entry["data_offsets"]
                tensors[name] = StoredTensor(tuple(entry["shape"]), entry["dtype"], mapped[start + first : start + end])
    return tensors


def _files(model_dir: Path) -> list[Path]:
    index = model_dir / INDEX_FILE
    if not index.exists():
        return [model_dir / SINGLE_FILE]
    try:
        return [model_dir / name for name in sorted(set(read_json(index)["weight_map"].values()))]
    except (KeyError, TypeError, AttributeError):
        raise UserError(f"{index}: not an index of safetensors files: weight_map is missing or no object") from None


def write_tensor_file(
    path: Path, shapes: Sequence[tuple[str, tuple[int, ...]]], values: Iterable[np.ndarray], dtype: np.dtype
) -> None:
    """One safetensors file, written value by value: the library's own writer wants to have them all in memory.

    Its format is the length of the header (64 bits, little-endian), the header as JSON, and the values in their order.
    """
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, shape in shapes:
        start, end = end, end + math.prod(shape) * dtype.itemsize
        header[name] = {"dtype": _TYPE_NAMES[str(dtype)], "shape": list(shape), "data_offsets": [start, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # so that values are aligned in a mapped file
    with path.open("xb") as sink, written_behind(sink) as flush_soon:
        sink.write(len(text).to_bytes(8, "little") + text)
        for (name, shape), value in zip(shapes, values, strict=True):
            assert value.shape == shape, name
            write_values(sink, value, dtype)
            flush_soon()


def write_index(directory: Path, names_by_file: Mapping[str, Sequence[str]], total_size: int) -> None:
    """Which file has which tensor. total_size: bytes of all values."""
    weight_map = {name: file for file, names in names_by_file.items() for name in names}
    write_json(directory / INDEX_FILE, {"metadata": {"total_size": total_size}, "weight_map": weight_map})
