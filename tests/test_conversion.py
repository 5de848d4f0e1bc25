"""Conversion between Hugging Face directories and Orbax checkpoints, against Orbax itself and NumPy."""

import json
import resource
import shutil
import weakref
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from orbax.checkpoint import v1 as ocp
from safetensors.numpy import load_file, save_file

from sgpo_jax.checkpoints import Weights, save_weights
from sgpo_jax.conversion import convert
from sgpo_jax.types import MachineError, UserError

MODEL = Path(__file__).parent / "fixtures" / "models" / "qwen3"
TYPES = {"float32": np.float32, "bfloat16": ml_dtypes.bfloat16, "float16": np.float16}


def tensors_of(directory: Path) -> dict[str, np.ndarray]:
    return {name: value for file in directory.glob("*.safetensors") for name, value in load_file(file).items()}


def assert_equal(found: dict[str, np.ndarray], wanted: dict[str, np.ndarray], dtype: str) -> None:
    assert found.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert (found[name].dtype, found[name].shape) == (TYPES[dtype], tensor.shape)
        assert np.asarray(found[name]).tobytes() == tensor.astype(TYPES[dtype]).tobytes(), name


@pytest.mark.parametrize("stored", ["float32", "bfloat16"])
@pytest.mark.parametrize("dtype", [None, "float32", "bfloat16"])
def test_orbax_reads_what_is_converted_and_the_way_back_gives_shards(stored, dtype, tmp_path):
    source = shutil.copytree(MODEL, tmp_path / "source")
    config = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps(config | {"dtype": stored}))
    before = {name: tensor.astype(TYPES[stored]) for name, tensor in tensors_of(MODEL).items()}
    save_file(before, source / "model.safetensors")

    convert(source, tmp_path / "orbax", dtype=dtype, max_shard_bytes=10**9)
    assert_equal(ocp.load(tmp_path / "orbax" / "checkpoint"), before, dtype or stored)

    convert(tmp_path / "orbax", tmp_path / "back", dtype="float16", max_shard_bytes=9_000)
    assert len(list((tmp_path / "back").glob("*.safetensors"))) > 2
    converted = {name: tensor.astype(TYPES[dtype or stored]) for name, tensor in before.items()}
    assert_equal(tensors_of(tmp_path / "back"), converted, "float16")
    assert json.loads((tmp_path / "back" / "config.json").read_text())["dtype"] == "float16"


def test_arrays_are_let_go_one_by_one_and_come_in_any_order(tmp_path):
    shapes, given = {"a": (7, 3), "b": (5,), "c": (2, 3, 4)}, []

    def arrays():
        for name in reversed(shapes):
            assert sum(reference() is not None for reference in given) <= 1, "the one before"
            array = np.arange(np.prod(shapes[name]), dtype=np.float32).reshape(shapes[name])
            given.append(weakref.ref(array))
            yield name, array
            del array

    save_weights(tmp_path, shapes, arrays(), np.dtype(np.float32))
    weights = Weights(tmp_path)
    assert weights.shapes == shapes
    for name, found in zip(["b", "c", "a"], weights.read(["b", "c", "a"]), strict=True):
        assert isinstance(found, np.memmap), "memory holds no copy"
        assert np.array_equal(found, np.arange(found.size, dtype=np.float32).reshape(shapes[name]))


@pytest.mark.parametrize(
    "damage", [lambda file: file.unlink(), lambda file: file.write_bytes(file.read_bytes()[:-1])], ids=["gone", "short"]
)
def test_broken_values_are_named_and_nothing_is_left(damage, tmp_path):
    convert(MODEL, tmp_path / "orbax", dtype=None, max_shard_bytes=10**9)
    (file,) = (tmp_path / "orbax").rglob("model.norm.weight/0")
    damage(file)
    with pytest.raises(MachineError, match=r"orbax.*cannot be read.*remove what is broken"):
        convert(tmp_path / "orbax", tmp_path / "back", dtype=None, max_shard_bytes=10**9)
    assert [path.name for path in tmp_path.iterdir()] == ["orbax"]


def test_weights_of_another_model_are_named(tmp_path):
    convert(MODEL, tmp_path / "orbax", dtype=None, max_shard_bytes=10**9)
    file = tmp_path / "orbax" / "huggingface" / "config.json"
    config = json.loads(file.read_text())
    file.write_text(json.dumps(config | {"vocab_size": config["vocab_size"] + 8}))
    with pytest.raises(UserError, match=r"orbax: its weights are not those of its config.json: .*embed_tokens"):
        convert(tmp_path / "orbax", tmp_path / "back", dtype=None, max_shard_bytes=10**9)


def test_a_full_disk_is_reported_and_nothing_is_left(tmp_path):
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4_000, limits[1]))  # stands for a full disk
    try:
        with pytest.raises(MachineError, match=r"a checkpoint cannot be read or written: .*File too large"):
            convert(MODEL, tmp_path / "orbax", dtype=None, max_shard_bytes=10**9)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert list(tmp_path.iterdir()) == []
