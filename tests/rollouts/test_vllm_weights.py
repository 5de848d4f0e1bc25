from dataclasses import replace

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from helpers import tiny_architecture, tiny_model
from safetensors.numpy import load_file, save_file
from vllm_helpers import model_dir

from sgpo_jax.files import read_json
from sgpo_jax.models.qwen import Transformer
from sgpo_jax.models.safetensors import load_params
from sgpo_jax.rollouts.vllm_weights import WeightsDirectory
from sgpo_jax.types import MachineError


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_what_is_written_is_the_model_untied(tmp_path, tied, dtype):
    arch = tiny_architecture(tie_embeddings=tied)
    model = Transformer(arch, rngs=nnx.Rngs(3), remat="none")
    weights = WeightsDirectory(arch, model_dir(tmp_path / "model", tied=tied), dtype, tmp_path)
    directory = weights.write(nnx.state(model))
    config = read_json(directory / "config.json")
    assert (config["tie_word_embeddings"], config["torch_dtype"]) == (False, dtype)
    found = load_params(directory, replace(arch, tie_embeddings=False), dtype=jnp.dtype(dtype))
    head = model.embedding if tied else model.lm_head
    np.testing.assert_array_equal(found["lm_head"][...], head[...].astype(dtype))
    np.testing.assert_array_equal(found["layers"]["q_proj"][...], model.layers.q_proj[...].astype(dtype))


def test_only_the_newest_is_kept_and_nothing_after_the_end(tmp_path):
    model = tiny_model()
    weights = WeightsDirectory(model.arch, model_dir(tmp_path / "model"), "float32", tmp_path)
    first, second = (weights.write(nnx.state(model)) for _ in range(2))
    assert first != second
    weights.keep_only(second)
    assert not first.exists()
    assert second.exists()
    weights.close()
    assert not weights.path.exists()


def damage_type(file):
    tensors = load_file(file)
    save_file({**tensors, "model.norm.weight": tensors["model.norm.weight"].astype(np.float16)}, file)


def damage_missing(file):
    tensors = load_file(file)
    del tensors["lm_head.weight"]
    save_file(tensors, file)


def damage_length(file):
    file.write_bytes(file.read_bytes()[:-10])


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (damage_type, "1 tensors are not as the model has them: model.norm.weight"),
        (damage_missing, "1 tensors are not as the model has them: lm_head.weight"),
        (damage_length, "not written whole"),
    ],
)
def test_weights_that_are_not_whole_are_refused(tmp_path, damage, message):
    model = tiny_model()
    weights = WeightsDirectory(model.arch, model_dir(tmp_path / "model"), "float32", tmp_path)
    directory = weights.write(nnx.state(model))
    damage(directory / "model.safetensors")
    with pytest.raises(MachineError, match=message):
        weights._check(directory)


def test_a_place_that_cannot_be_written_is_named(tmp_path):
    model = tiny_model()
    with pytest.raises(MachineError, match="nowhere: no directory for the weights can be made in it: No such file"):
        WeightsDirectory(model.arch, model_dir(tmp_path / "model"), "float32", tmp_path / "nowhere")
