"""The trainer's weights as a directory for a vLLM server: in memory where there is a tmpfs, whole or not at all."""

import os
import shutil
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax.numpy as jnp
from flax import nnx
from safetensors import SafetensorError, safe_open

from sgpo_jax.files import read_json, write_json
from sgpo_jax.hosts.messages import lead
from sgpo_jax.models.architecture import Architecture
from sgpo_jax.models.safetensors import copy_companions, export_model, join_export
from sgpo_jax.models.weights import weight_table
from sgpo_jax.types import MachineError

_TMPFS = Path("/dev/shm")
_SHARD_BYTES = 5 * 10**9
_SAFETENSORS_TYPES = {"float32": "F32", "bfloat16": "BF16"}


def join_write(params: nnx.State, arch: Architecture, dtype: str) -> None:
    """The part in `WeightsDirectory.write` of a process that writes no copy of its own."""
    untied = replace(arch, tie_embeddings=False)
    join_export(_untied(params, arch.tie_embeddings), untied, dtype=jnp.dtype(dtype))


def _untied(params: nnx.State, is_tied: bool) -> nnx.State:
    return nnx.State({**params, "lm_head": params["embedding"]}) if is_tied else params


class WeightsDirectory:
    """A private directory with the newest weights in it; `path` is removed by `close`.

    Tied embeddings are written untied, as two tensors: vLLM on CPUs keeps the old lm_head of a tied model when it
    reloads, without a word.
    parent: where it is made; None: /dev/shm, or the system's directory for temporary files where there is none.
    """

    def __init__(self, arch: Architecture, model_dir: Path, dtype: str, parent: Path | None) -> None:
        self._arch = replace(arch, tie_embeddings=False)
        self._is_tied = arch.tie_embeddings
        self._dtype = dtype
        if parent is None and os.access(_TMPFS, os.W_OK):
            parent = _TMPFS
        try:
            self.path = Path(tempfile.mkdtemp(prefix="sgpo_jax-", dir=parent))  # for this user only
        except OSError as error:
            raise MachineError(f"{parent}: no directory for the weights can be made in it: {error.strerror}") from None
        self._count = 0
        self._source = self.path / "model"
        self._source.mkdir()
        copy_companions(model_dir, self._source, dtype)
        config = read_json(self._source / "config.json")
        write_json(self._source / "config.json", config | {"tie_word_embeddings": False})

    def write(self, params: nnx.State) -> Path:
        """A new Hugging Face directory of `params`, complete and checked. Raises MachineError where it is not."""
        lead("write weights")
        params = _untied(params, self._is_tied)
        self._count += 1
        directory = self.path / f"weights-{self._count}"
        try:
            export_model(
                params,
                self._arch,
                self._source,
                directory,
                dtype=jnp.dtype(self._dtype),
                max_shard_bytes=_SHARD_BYTES,
            )
        except OSError as error:
            raise MachineError(f"{directory}: the weights cannot be written: {error.strerror}") from error
        self._check(directory)
        return directory

    def keep_only(self, directory: Path) -> None:
        """Remove the weights of all other versions."""
        lead("keep weights", {"name": directory.name})
        for other in self.path.glob("weights-*"):
            if other != directory:
                shutil.rmtree(other)

    def close(self) -> None:
        shutil.rmtree(self.path, ignore_errors=True)

    def _check(self, directory: Path) -> None:
        """Every tensor of the model is there, with its shape and type, and no other; files are as long as they say."""
        kind = _SAFETENSORS_TYPES[self._dtype]
        wanted: dict[str, Any] = {
            weight.hf_name.format(layer=layer): (weight.hf_shape, kind)
            for weight in weight_table(self._arch)
            for layer in range(weight.num_tensors)
        }
        found: dict[str, Any] = {}
        for file in sorted(directory.glob("*.safetensors")):
            try:
                with safe_open(file, framework="numpy") as tensors:
                    for name in tensors.keys():  # noqa: SIM118 (not a dict)
                        part = tensors.get_slice(name)
                        found[name] = (tuple(part.get_shape()), part.get_dtype())
            except SafetensorError as error:
                raise MachineError(f"{file}: not written whole: {error}") from None
        wrong = sorted(name for name in wanted.keys() | found.keys() if wanted.get(name) != found.get(name))
        if wrong:
            raise MachineError(
                f"{directory}: {len(wrong)} tensors are not as the model has them: {', '.join(wrong[:5])}"
            )
