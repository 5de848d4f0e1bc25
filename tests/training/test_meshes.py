"""The same five steps on every mesh of eight simulated devices: losses, checkpoints, and what each device holds.

In one subprocess, since devices are made at start-up.
"""

import json
import os
import subprocess
import sys
from itertools import permutations
from pathlib import Path

import numpy as np
import pytest

MESHES = {"one": (1, 1, 1), "data": (8, 1, 1), "fsdp": (1, 8, 1), "tensor": (1, 4, 2), "all": (2, 2, 2)}

ON_EIGHT_DEVICES = """
import json, math, sys
from pathlib import Path
import jax, numpy as np
from flax import nnx
from helpers import VOCABULARY, make_config, tiny_architecture
from sgpo_jax.checkpoints import Checkpoints, abstract_like
from sgpo_jax.config import MeshConfig
from sgpo_jax.data.batching import BatchShape, TrainSequence, pack
from sgpo_jax.models.qwen import Transformer
from sgpo_jax.models.sharding import make_mesh, param_shardings
from sgpo_jax.training.state import initial_state
from sgpo_jax.training.step import TrainStep

out, meshes = Path(sys.argv[1]), json.loads(sys.argv[2])
ARCH = tiny_architecture(num_layers=16, model_dim=64, num_heads=8, num_kv_heads=2, mlp_dim=256)
CONFIG = make_config(model={"remat": "full", "vocab_chunk_tokens": 8})


def sequences(seed):
    rng = np.random.default_rng(seed)
    for number in range(32):
        length = int(rng.integers(1, 12))
        yield TrainSequence(
            rng.integers(1, VOCABULARY, 4), rng.integers(1, VOCABULARY, length),
            rng.normal(-2, 0.5, length).astype(np.float32), float(rng.normal()), number // 4,
        )


def begin(mesh):
    # Born sharded, and the same on every mesh.
    make = jax.jit(lambda: nnx.state(Transformer(ARCH, rngs=nnx.Rngs(0))), out_shardings=param_shardings(ARCH, mesh))
    model = nnx.merge(nnx.graphdef(nnx.eval_shape(lambda: Transformer(ARCH, rngs=None))), make())
    step = TrainStep(model, CONFIG)
    return step, initial_state(nnx.state(model), step.optimizer)


def arrays(state):
    return {"params": state.params, "optimizer": (state.opt_state, state.num_updates)}


found = {}
for name, (data, fsdp, tensor) in meshes.items():
    devices = jax.devices()[: data * fsdp * tensor]
    mesh = make_mesh(MeshConfig(data=data, fsdp=fsdp, tensor=tensor), devices)
    with jax.set_mesh(mesh):
        step, state = begin(mesh)
        checkpoints = Checkpoints(out / name, keep=1)
        losses = []
        for seed in range(5):
            state, result = step.update(state, pack(list(sequences(seed)), BatchShape(8, 16)), 1e-3)
            losses.append(result.loss)
        checkpoints.save(5, arrays(state), {})
        checkpoints.close()
        device = devices[-1]
        held = sum(s.data.nbytes for x in jax.tree.leaves(state) for s in x.addressable_shards if s.device == device)
        whole = sum(x.nbytes for x in jax.tree.leaves(state.params))
        memory = step._programs["accumulate"].memory_analysis()
        found[name] = {"losses": losses, "held": held, "whole": whole, "temporary": memory.temp_size_in_bytes}

        for other in (path for path in out.iterdir() if path.is_dir() and path.name != name):
            with_other = Checkpoints(other, keep=1)
            restored = with_other.restore(abstract_like(arrays(state)))
            with_other.close()
            for x, like in zip(jax.tree.leaves(restored.arrays), jax.tree.leaves(arrays(state)), strict=True):
                assert x.sharding == like.sharding
            np.savez(out / f"{other.name}-on-{name}.npz", *map(np.asarray, jax.tree.leaves(restored.arrays)))
        np.savez(out / f"{name}-on-{name}.npz", *map(np.asarray, jax.tree.leaves(arrays(state))))
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    out = tmp_path_factory.mktemp("meshes")
    environment = os.environ | {
        "XLA_FLAGS": "--xla_force_host_platform_device_count=8",
        "JAX_PLATFORMS": "cpu",
        "PYTHONPATH": str(Path(__file__).parent.parent),
    }
    command = [sys.executable, "-c", ON_EIGHT_DEVICES, str(out), json.dumps(MESHES)]
    finished = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=280)
    assert finished.returncode == 0, finished.stderr[-3000:]
    return out, json.loads(finished.stdout.splitlines()[-1])


@pytest.mark.parametrize("name", [name for name in MESHES if name != "one"])
def test_five_steps_have_the_same_losses(found, name):
    losses = found[1][name]["losses"]
    assert len(set(losses)) == 5
    np.testing.assert_allclose(losses, found[1]["one"]["losses"], rtol=0, atol=2e-6)


def test_a_checkpoint_is_restored_on_another_mesh_bit_by_bit(found):
    pairs = [(a, b) for a, b in permutations(MESHES, 2) if (found[0] / f"{a}-on-{b}.npz").exists()]
    assert len(pairs) == len(MESHES) * (len(MESHES) - 1) / 2, "each mesh read those that were saved before it"
    for source, target in pairs:
        saved, restored = (np.load(found[0] / f"{source}-on-{mesh}.npz") for mesh in (source, target))
        assert saved.files == restored.files
        for key in saved.files:
            assert saved[key].tobytes() == restored[key].tobytes()


def test_no_device_ever_holds_the_whole_model(found):
    """Weights and both moments are split; a step's temporaries, gathered weights among them, stay a fraction of it."""
    for name in ("fsdp", "tensor"):
        held, whole, temporary = (found[1][name][key] for key in ("held", "whole", "temporary"))
        assert held < 3 * whole / 8 * 1.1
        assert temporary < whole / 2, f"{name}: {temporary} of {whole} bytes"
    assert found[1]["data"]["held"] > 3 * found[1]["data"]["whole"] * 0.99, "data parallelism copies it"
