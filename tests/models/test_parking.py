"""Arrays that wait in the host's memory: moved, freed, saved, brought back bit by bit. The CPU has such memory too."""

import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from helpers import tiny_model

from sgpo_jax.checkpoints import Checkpoints, abstract_like
from sgpo_jax.models.sharding import on_devices, park, unpark


def kinds(arrays) -> list[str]:
    return [x.sharding.memory_kind for x in jax.tree.leaves(arrays)]


def test_parked_arrays_come_back_as_they_were_and_hold_nothing_meanwhile():
    before = {"matrix": jnp.arange(6.0).reshape(2, 3), "vector": jnp.ones(4, jnp.bfloat16), "count": jnp.int32(3)}
    values = jax.tree.map(np.asarray, before)
    parked = park(before)
    assert dict(zip(sorted(parked), kinds(parked), strict=True)) == {
        "count": "device",
        "matrix": "pinned_host",
        "vector": "pinned_host",
    }
    assert [before[name].is_deleted() for name in sorted(before)] == [False, True, True]
    assert jax.tree.all(jax.tree.map(lambda x, y: x is y, park(parked), parked)), "parked already"
    copy = on_devices(parked["matrix"])
    back = unpark(parked)
    assert parked["matrix"].is_deleted()
    assert set(kinds(back)) == {"device"}
    for name, value in values.items():
        np.testing.assert_array_equal(np.asarray(back[name]), value)
    np.testing.assert_array_equal(np.asarray(copy), values["matrix"])
    assert on_devices(copy) is copy
    assert unpark(back)["matrix"] is back["matrix"], "there already"


def test_a_models_state_is_parked_as_a_whole():
    state = nnx.state(tiny_model())
    values = jax.tree.map(np.asarray, state)
    back = unpark(park(state))
    assert jax.tree.structure(back) == jax.tree.structure(state)
    jax.tree.map(np.testing.assert_array_equal, jax.tree.map(np.asarray, back), values)


def test_a_checkpoint_of_parked_arrays_is_restored_to_the_devices(tmp_path):
    arrays = {"params": {"a": jnp.arange(12.0).reshape(3, 4)}}
    values, abstract = np.asarray(arrays["params"]["a"]), abstract_like(arrays)
    checkpoints = Checkpoints(tmp_path, keep=1)
    checkpoints.save(1, park(arrays), {})
    checkpoints.wait()
    restored = checkpoints.restore(abstract).arrays["params"]["a"]
    checkpoints.close()
    assert restored.sharding.memory_kind == "device"
    np.testing.assert_array_equal(np.asarray(restored), values)


def test_sharded_arrays_keep_their_sharding(tmp_path):
    script = """
import jax, jax.numpy as jnp, numpy as np
from sgpo_jax.config import MeshConfig
from sgpo_jax.models.sharding import make_mesh, park, unpark
mesh = make_mesh(MeshConfig(fsdp=2, tensor=2))
sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("fsdp", "tensor"))
array = jax.device_put(jnp.arange(32.0).reshape(4, 8), sharding)
parked = park(array)
assert array.is_deleted() and parked.sharding == sharding.with_memory_kind("pinned_host")
back = unpark(parked)
assert back.sharding.is_equivalent_to(sharding, 2) and back.sharding.memory_kind == "device"
np.testing.assert_array_equal(np.asarray(back), np.arange(32.0).reshape(4, 8))
"""
    environment = {"PATH": "", "XLA_FLAGS": "--xla_force_host_platform_device_count=4", "JAX_PLATFORMS": "cpu"}
    subprocess.run([sys.executable, "-c", script], check=True, timeout=120, env=environment, cwd=tmp_path)
