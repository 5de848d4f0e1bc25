"""Orbax checkpoints of a run (train state and everything on the host), and of bare weights. Pytrees only, no pickle."""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np
from orbax.checkpoint import v1 as ocp

from sgpo_jax.files import fsync_path, read_json, write_values
from sgpo_jax.hosts.messages import lead
from sgpo_jax.types import MachineError, UserError

WEIGHTS = "checkpoint"  # the folder of bare weights inside a directory
_TREE = "state"  # Orbax's folder for the arrays of a tree that was saved without a name


@dataclass(frozen=True, slots=True)
class Restored:
    """step; arrays by part ("params", "optimizer"); host: JSON values."""

    step: int
    arrays: dict[str, Any]
    host: dict[str, Any]


class Checkpoints:
    """The checkpoints of one run directory, the newest `keep` of them. Saving is asynchronous and atomic.

    The parts are saved apart, so that an export reads the parameters alone. Of several processes each writes and reads
    its own shards, so that the directory is one that all of them reach.
    """

    def __init__(self, directory: Path, keep: int) -> None:
        lead("checkpoints")
        self._directory = directory.absolute()
        with _storage_errors(self._directory):
            self._directory.mkdir(parents=True, exist_ok=True)
            self._checkpointer = ocp.training.Checkpointer(
                self._directory,
                context=_uncompressed(),
                preservation_policy=ocp.training.preservation_policies.LatestN(keep),
                cleanup_tmp_directories=True,
            )

    @property
    def steps(self) -> list[int]:
        return [checkpoint.step for checkpoint in self._checkpointer.checkpoints]

    @property
    def latest_step(self) -> int | None:
        return max(self.steps, default=None)

    def save(self, step: int, arrays: Mapping[str, Any], host: Mapping[str, Any]) -> None:
        """Start saving, after the save before is done. Arrays are copied first: the caller may donate them at once."""
        lead("save", {"step": step})
        with _storage_errors(self._directory):
            self._checkpointer.wait()
            # Every save that is asked for is made: Orbax' default policy would skip some.
            self._checkpointer.save_checkpointables_async(step, dict(arrays), custom_metadata=dict(host), force=True)

    def restore(self, abstract: Mapping[str, Any], step: int | None = None) -> Restored:
        """Load the parts named in `abstract` (ShapeDtypeStructs with shardings) of a step, the newest by default.

        Raises UserError where there is no such checkpoint.
        """
        lead("restore", {"parts": list(abstract), "step": step})
        with _storage_errors(self._directory):
            return _restore(self._checkpointer, self._directory, abstract, step)

    def host(self) -> dict[str, Any]:
        """The JSON values of the newest step, without its arrays; empty where there is no checkpoint."""
        if self.latest_step is None:
            return {}
        lead("read host values")
        with _storage_errors(self._directory):
            return dict(self._checkpointer.checkpointables_metadata(self.latest_step).custom_metadata or {})

    def wait(self) -> None:
        """Until the last save is on the disk. Raises MachineError where it failed."""
        lead("wait for checkpoints")
        with _storage_errors(self._directory):
            self._checkpointer.wait()

    def close(self) -> None:
        with _storage_errors(self._directory):
            self._checkpointer.close()


def read_checkpoint(directory: Path, abstract: Mapping[str, Any], step: int | None = None) -> Restored:
    """`Checkpoints.restore` for who only reads: nothing is made or cleaned up, so a run may be writing meanwhile.

    Raises UserError where there is no such checkpoint.
    """
    directory = directory.absolute()
    if not directory.is_dir():
        raise UserError(f"{directory.parent}: has no checkpoints yet; train first")
    with _storage_errors(directory), ocp.training.Checkpointer(directory) as checkpointer:
        return _restore(checkpointer, directory, abstract, step)


def _restore(checkpointer: Any, directory: Path, abstract: Mapping[str, Any], step: int | None) -> Restored:
    steps = [checkpoint.step for checkpoint in checkpointer.checkpoints]
    step = max(steps, default=None) if step is None else step
    if step not in steps or step is None:
        wanted = "no checkpoint" if step is None else f"no checkpoint of step {step}"
        raise UserError(f"{directory}: {wanted}; there are {steps or 'none'}")
    arrays = checkpointer.load_checkpointables(step, dict(abstract))
    host = checkpointer.checkpointables_metadata(step).custom_metadata
    return Restored(step, arrays, dict(host or {}))


def abstract_like(arrays: Any) -> Any:
    """Shapes, types and shardings of a pytree, to restore one like it."""
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=getattr(x, "sharding", None)), arrays)


def save_weights(
    directory: Path, shapes: Mapping[str, tuple[int, ...]], arrays: Iterable[tuple[str, np.ndarray]], dtype: np.dtype
) -> None:
    """Write named arrays of these shapes as one Orbax checkpoint inside `directory`, one after the other, as `dtype`.

    Orbax makes the tree, with an array of one value for each; its values and shape are then replaced. It writes arrays
    at half the speed: in large pieces, and many at a time in memory.
    """
    options = _uncompressed()
    options.array.saving.use_ocdbt = options.array.saving.use_zarr3 = False  # an array is a folder, its values a file
    path = directory.absolute() / WEIGHTS
    with _storage_errors(directory):
        with options:
            ocp.save(path, {name: np.zeros([1] * len(shape), dtype) for name, shape in shapes.items()})
        with ThreadPoolExecutor(1) as flusher:  # the disk writes one array while the next is converted
            files = (_replace_array(path / _TREE / name, array, dtype) for name, array in arrays)
            flushed = [flusher.submit(fsync_path, file) for file in files]
        for future in flushed:
            future.result()


def _replace_array(folder: Path, array: np.ndarray, dtype: np.dtype) -> Path:
    """Give a zarr array, version 2, other values in a single piece, without a copy of them. Returns their file."""
    metadata, shape = folder / ".zarray", list(array.shape)
    metadata.write_text(json.dumps(read_json(metadata) | {"shape": shape, "chunks": shape}))
    file = folder / _only_piece(shape)
    with file.open("wb") as sink:
        write_values(sink, array, dtype)
    return file


def _only_piece(shape: Sequence[int]) -> str:
    """The file that holds all values of a zarr array."""
    return ".".join("0" for _ in shape)


def is_weights(directory: Path) -> bool:
    """Whether `directory` holds what `save_weights` wrote."""
    return (directory / WEIGHTS).is_dir()


class Weights:
    """What `save_weights` wrote, to be read by name."""

    def __init__(self, directory: Path) -> None:
        self._path = directory.absolute() / WEIGHTS
        with _storage_errors(directory):
            self._abstract = dict(ocp.metadata(self._path).metadata)

    @property
    def dtype(self) -> Any:
        """The one type of all of them. Raises UserError where they are of several."""
        dtypes = {array.dtype for array in self._abstract.values()}
        if len(dtypes) != 1:
            raise UserError(f"{self._path}: weights of several types: {sorted(map(str, dtypes))}")
        return dtypes.pop()

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {name: tuple(array.shape) for name, array in self._abstract.items()}

    def read(self, names: Iterable[str]) -> Iterator[np.ndarray]:
        """The named arrays in their order, each a view of its mapped file: memory holds those that the caller keeps."""
        with _storage_errors(self._path):
            for name in names:
                array = self._abstract[name]
                file = self._path / _TREE / name / _only_piece(array.shape)
                yield np.memmap(file, array.dtype, mode="r", shape=tuple(array.shape))


def _uncompressed() -> ocp.Context:
    """Compression takes 8% off the bytes of float32 weights and moments, and four times as long."""
    options = ocp.Context()
    options.array.saving.use_compression = False
    return options


@contextmanager
def _storage_errors(directory: Path) -> Iterator[None]:
    try:
        yield
    except (UserError, MachineError):
        raise
    except Exception as error:  # Orbax and TensorStore report a full disk or a broken file by any kind of error
        reason = " ".join(str(error).split())
        reason = "no space is left" if "o space left" in reason or "RESOURCE_EXHAUSTED" in reason else reason[:200]
        raise MachineError(
            f"{directory}: a checkpoint cannot be read or written: {reason}; free space, or remove what is broken"
        ) from error
