"""Eight simulated devices give what one gives. In a subprocess, since devices are made at start-up."""

import os
import subprocess
import sys
from contextlib import suppress
from itertools import product
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import tiny_architecture, tiny_model
from safetensors.numpy import load_file

from sgpo_jax.config import MeshConfig, SamplerMeshConfig
from sgpo_jax.models.sharding import (
    check_divisible,
    constrain,
    fitting_layouts,
    make_mesh,
    num_batch_shards,
    param_shardings,
    sampler_mesh,
)
from sgpo_jax.types import UserError

ON_EIGHT_DEVICES = """
import sys
from pathlib import Path
import jax, jax.numpy as jnp, numpy as np
from flax import nnx
from sgpo_jax.config import MeshConfig
from sgpo_jax.models.qwen import decode_step, empty_cache, prefill, token_logprobs
from sgpo_jax.models.safetensors import export_model, load_model
from sgpo_jax.models.sharding import make_mesh, param_shardings

source, out = map(Path, sys.argv[1:])
recorded = np.load(source / "reference.npz")
ids_BT = np.tile(recorded["token_ids"], (4, 1))
rows = ids_BT, np.broadcast_to(np.arange(10), (8, 10)), np.ones((8, 10), np.int32)


def loss(model, *rows):
    return token_logprobs(model, *rows, temperature=0.8, chunk_tokens=2).logprobs_BT.sum()


def everything(model):
    logits_BTV = jax.jit(lambda model: model.logits(model.hidden(*rows)))(model)
    gradient = jax.jit(jax.grad(loss))(model, *rows)
    prompts = jax.jit(prefill)(model, ids_BT, np.full(8, 10))
    cache = jax.tree.map(lambda x, y: x.at[:, :, :10].set(y), empty_cache(model.arch, 8, 16, jnp.float32), prompts)
    logits_BV, cache = jax.jit(decode_step)(model, cache, ids_BT[:, 0], np.full(8, 10))
    return logits_BTV, logits_BV, cache, gradient


alone = everything(load_model(source, compute_dtype="float32", remat="dots"))
mesh = make_mesh(MeshConfig(data=1, fsdp=4, tensor=2))
model = load_model(source, compute_dtype="float32", remat="dots", mesh=mesh)
for param, sharding in zip(jax.tree.leaves(nnx.split(model)[1]), jax.tree.leaves(param_shardings(model.arch, mesh))):
    assert param.sharding == sharding, (param.sharding, sharding)
assert model.layers.q_proj[...].addressable_shards[0].data.size * 8 == model.layers.q_proj[...].size
with jax.set_mesh(mesh):
    sharded = everything(model)
assert "fsdp" in sharded[0].sharding.spec[0], sharded[0].sharding  # the batch stays spread
assert not sharded[2].keys_LBSKH.sharding.is_fully_replicated
np.testing.assert_allclose(sharded[0][:2], recorded["whole_logits"], atol=1e-4)
for one, other in zip(jax.tree.leaves(alone), jax.tree.leaves(sharded), strict=True):
    np.testing.assert_allclose(one, other, atol=2e-5 * max(1.0, float(jnp.abs(one).max())))
export_model(model, model.arch, source, out, dtype="float32", max_shard_bytes=9_000)
print("ALL EQUAL")
"""

FIXTURES = Path(__file__).parent.parent / "fixtures" / "models"


@pytest.mark.parametrize("name", ["qwen2_untied", "qwen3"])
def test_eight_devices_give_what_one_gives(name, tmp_path):
    environment = os.environ | {"XLA_FLAGS": "--xla_force_host_platform_device_count=8", "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, "-c", ON_EIGHT_DEVICES, str(FIXTURES / name), str(tmp_path / "out")]
    finished = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=250)
    assert finished.stdout.endswith("ALL EQUAL\n"), finished.stderr[-3000:]
    before = load_file(FIXTURES / name / "model.safetensors")
    after = {key: value for file in (tmp_path / "out").glob("*.safetensors") for key, value in load_file(file).items()}
    assert {key: value.tobytes() for key, value in before.items()} == {key: v.tobytes() for key, v in after.items()}


def test_mesh_sizes_must_multiply_to_the_devices():
    devices = jax.devices()[:1]
    assert dict(make_mesh(MeshConfig(), devices).shape) == {"data": 1, "fsdp": 1, "tensor": 1}
    with pytest.raises(UserError) as error:
        make_mesh(MeshConfig(fsdp=2), devices)
    assert str(error.value) == (
        "mesh.data=1, mesh.fsdp=2, mesh.tensor=1: the sizes must multiply to the number of devices, 1; "
        "on 1 device would fit as data x fsdp x tensor = 1x1x1"
    )
    with pytest.raises(UserError, match=r"mesh\.fsdp=-1, mesh\.tensor=3"):
        make_mesh(MeshConfig(tensor=3), devices)


@pytest.mark.parametrize(
    ("sizes", "changes", "words"),
    [
        ((1, 1, 4), {}, "mesh.tensor=4 does not divide the model's kv_heads=2; on 4 devices "),
        ((1, 5, 1), {}, "mesh.fsdp=5 does not divide the model's embed=32; on 5 devices "),
        ((1, 1, 2), {"vocab_size": 15}, "mesh.tensor=2 does not divide the model's vocab=15; on 2 devices "),
        ((1, 1, 2), {"num_heads": 3, "num_kv_heads": 3}, "mesh.tensor=2 does not divide the model's heads=3; on 2 "),
        ((1, 1, 2), {"mlp_dim": 49}, "mesh.tensor=2 does not divide the model's mlp=49; on 2 devices "),
    ],
)
def test_what_the_mesh_does_not_divide_is_named(sizes, changes, words):
    mesh = jax.sharding.AbstractMesh(sizes, ("data", "fsdp", "tensor"))
    with pytest.raises(UserError) as error:
        check_divisible(tiny_architecture(**changes), mesh)
    assert str(error.value).startswith(words)


def named_layouts(message):
    listed = message.split("this model would fit as data x fsdp x tensor = ")[1].split(" and ")[0]
    return [tuple(map(int, layout.split("x"))) for layout in listed.split(", ")]


@pytest.mark.parametrize("changes", [{}, {"num_kv_heads": 1}, {"vocab_size": 15, "model_dim": 12}, {"num_kv_heads": 4}])
@pytest.mark.parametrize("num_devices", [1, 6, 8])
def test_the_layouts_that_fit_are_all_that_work_and_no_others(num_devices, changes):
    """Against every combination of sizes, each tried as a user would."""
    arch, works = tiny_architecture(**changes), set()
    for data, fsdp, tensor in product(range(1, num_devices + 1), repeat=3):
        mesh = jax.sharding.AbstractMesh((data, fsdp, tensor), ("data", "fsdp", "tensor"))
        with suppress(UserError):
            check_divisible(arch, mesh)
            works |= {(data, fsdp, tensor)} if mesh.size == num_devices else set()
    found = fitting_layouts(num_devices, arch)
    assert len(found) == len(set(found))
    assert set(found) == works
    assert (num_devices, 1, 1) in works


@pytest.mark.parametrize("key", ["mesh", "rollouts.mesh"])
@pytest.mark.parametrize(
    ("sizes", "first_words", "nearest"),
    [
        ({"data": 1, "fsdp": 2, "tensor": 4}, "{key}.tensor=4 does not divide the model's kv_heads=2; ", (1, 4, 2)),
        ({"data": 4, "fsdp": 4, "tensor": 1}, "{key}.data=4, {key}.fsdp=4, {key}.tensor=1: the sizes ", (2, 4, 1)),
        ({"data": -1, "fsdp": 3, "tensor": 2}, "{key}.data=-1, {key}.fsdp=3, {key}.tensor=2: the sizes ", (1, 4, 2)),
    ],
)
def test_an_impossible_layout_says_what_would_fit_for_trainer_and_sampler_alike(key, sizes, first_words, nearest):
    devices = np.array([jax.devices()[0]] * 8)  # of which the sizes are all that is looked at
    trainer = jax.sharding.Mesh(devices.reshape(1, 8, 1), ("data", "fsdp", "tensor"))
    make = {
        "mesh": lambda: make_mesh(MeshConfig(**sizes), list(devices), arch=tiny_architecture()),
        "rollouts.mesh": lambda: sampler_mesh(SamplerMeshConfig(**sizes), trainer, arch=tiny_architecture()),
    }
    with pytest.raises(UserError) as error:
        make[key]()
    message = str(error.value)
    assert message.startswith(first_words.format(key=key))
    assert "on 8 devices this model would fit" in message
    listed = named_layouts(message)
    assert listed[0] == nearest
    assert len(listed) == 6
    assert message.endswith(f" and {len(fitting_layouts(8, tiny_architecture())) - 6} more")


def test_the_samplers_mesh_has_the_trainers_devices_in_their_order():
    devices = np.array([jax.devices()[0]] * 8)
    trainer = jax.sharding.Mesh(devices.reshape(1, 8, 1), ("data", "fsdp", "tensor"))
    assert sampler_mesh(None, trainer) is trainer
    assert sampler_mesh(SamplerMeshConfig(data=1, fsdp=-1), trainer) is trainer
    assert dict(sampler_mesh(SamplerMeshConfig(tensor=2), trainer).shape) == {"data": 4, "fsdp": 1, "tensor": 2}


def test_shardings_are_a_prefix_of_the_params():
    model = tiny_model()
    mesh = make_mesh(MeshConfig(), jax.devices()[:1])
    params = jax.tree.leaves(model)
    assert len(jax.tree.leaves(param_shardings(model.arch, mesh))) == len(params)


def test_without_a_mesh_nothing_is_constrained():
    x = jnp.ones((2, 3))
    assert constrain(x, ("batch", "model")) is x
    assert num_batch_shards() == 1


def test_under_a_mesh_a_batch_is_constrained_where_it_divides():
    axis_types = (jax.sharding.AxisType.Auto,) * 3
    mesh = jax.sharding.AbstractMesh((2, 2, 2), ("data", "fsdp", "tensor"), axis_types=axis_types)
    with jax.sharding.use_abstract_mesh(mesh):
        assert num_batch_shards() == 4
        text = str(jax.make_jaxpr(lambda x: constrain(x, ("batch", "mlp")))(np.ones((4, 3))))
    assert "('data', 'fsdp')" in text
    assert "UNCONSTRAINED" in text.upper()
