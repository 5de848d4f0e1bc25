"""Trainer and sampler in different layouts of eight simulated devices: the same weights, the same completions, no whole
model anywhere, and no weights on the wire while tokens are decoded.

In one subprocess, since devices are made at start-up.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from helpers import make_config

from sgpo_jax.types import UserError

ON_EIGHT_DEVICES = """
import json, weakref
import jax, jax.numpy as jnp, numpy as np
from flax import nnx
from helpers import VOCABULARY, make_query, tiny_architecture
from sgpo_jax.check.collectives import collectives
from sgpo_jax.config import MeshConfig, RolloutsConfig, SamplerMeshConfig
from sgpo_jax.models.qwen import Transformer, decoding_params
from sgpo_jax.models.sharding import make_mesh, param_shardings, sampler_mesh
from sgpo_jax.rollouts.jax_engine import JaxEngine
from sgpo_jax.types import GroupRequest, Purpose, SamplingParams

ARCH = tiny_architecture(num_layers=16, model_dim=64, num_heads=8, num_kv_heads=2, mlp_dim=256)
OPTIONS = RolloutsConfig(batch_size=8, decode_steps=4, prefill_tokens=32)
SAMPLING = SamplingParams(max_completion_tokens=8)
rng = np.random.default_rng(0)
REQUESTS = [
    GroupRequest(make_query(f"q{i}", tuple(rng.integers(1, VOCABULARY, 3 + 2 * i).tolist())), 3, Purpose.TRAIN)
    for i in range(5)
]


def values_of(seed):
    model = Transformer(ARCH, rngs=nnx.Rngs(seed))
    model.lm_head[...] = model.lm_head[...] * 20
    return jax.tree.map(np.asarray, nnx.state(model))


VALUES = [values_of(seed) for seed in range(2)]


def model_of(params, dtype):
    return nnx.merge(nnx.graphdef(nnx.eval_shape(lambda: Transformer(ARCH, rngs=None, compute_dtype=dtype))), params)


def make_engine(params, dtype, mesh=None):
    model = model_of(params, dtype)
    return JaxEngine(model, stop_ids=[0], max_prompt_tokens=11, config=OPTIONS, run_seed=7, mesh=mesh)


def completions(engine, sampling=SAMPLING):
    return {
        (group.request.query.query_id, c.sample_index): (c.token_ids_C.tolist(), c.sampler_logprobs_C)
        for group in engine.generate(REQUESTS, sampling)
        for c in group.completions
    }


def assert_same(found, expected, name):
    assert found.keys() == expected.keys()
    for key, (token_ids, logprobs) in expected.items():
        assert found[key][0] == token_ids, (name, key)
        np.testing.assert_allclose(found[key][1], logprobs, atol=1e-5, err_msg=name)


def assert_bits(params, values, shardings, name):
    for x, value, sharding in zip(*map(jax.tree.leaves, (params, values, shardings)), strict=True):
        assert np.asarray(x).tobytes() == np.asarray(value).tobytes(), name
        assert x.sharding.is_equivalent_to(sharding, x.ndim), (name, x.sharding, sharding)


def full(mesh):
    # A sharding for each leaf of the values.
    return jax.tree.unflatten(jax.tree.structure(VALUES[0]), jax.tree.leaves(param_shardings(ARCH, mesh)))


def on_mesh(values, mesh):
    return jax.tree.map(jax.device_put, values, full(mesh))


greedy = SamplingParams(8, temperature=0.0)
with jax.default_device(jax.devices()[0]):
    alone = make_engine(jax.tree.map(jnp.asarray, VALUES[0]), "float32")
    expected, expected_greedy = completions(alone), completions(alone, greedy)
    alone.update_weights(jax.tree.map(jnp.asarray, VALUES[1]), 1, None)
    expected_new = completions(alone)
assert len({tuple(ids) for ids, _ in expected.values()}) > 8, "the model must not be degenerate"

for name, sizes, layout in (
    ("fsdp to data x tensor", (1, 8, 1), {"tensor": 2}),
    ("all to fsdp", (2, 2, 2), {"data": 1, "fsdp": 8}),
):
    mesh = make_mesh(MeshConfig(data=sizes[0], fsdp=sizes[1], tensor=sizes[2]), arch=ARCH)
    layout = sampler_mesh(SamplerMeshConfig(**layout), mesh, arch=ARCH)
    with jax.set_mesh(mesh):
        params, new = (on_mesh(values, mesh) for values in VALUES)
        engine = make_engine(params, "float32", layout)
        assert_bits(engine._params, VALUES[0], full(layout), name)
        generating = engine.generate(REQUESTS, SAMPLING)
        next(generating)
        assert jax.sharding.get_mesh() == mesh, "what takes completions is in the trainer's mesh"
        generating.close()
        assert_same(completions(engine), expected, name)
        if name.startswith("fsdp"):
            assert_same(completions(engine, greedy), expected_greedy, name)
        old = [weakref.ref(x) for x in jax.tree.leaves(engine._params)]
        program, held = engine._decoding_params, []
        engine._decoding_params = lambda p: (held.extend(ref() for ref in old), program(p))[1]
        engine.update_weights(new, 1, None)
        assert held == [None] * len(old), "the earlier copy goes first"
        assert_bits(engine._params, VALUES[1], full(layout), name)
        assert_same(completions(engine), expected_new, name)
        engine.close()
        assert_bits(new, VALUES[1], full(mesh), name)  # the trainer's are untouched
        assert_bits(params, VALUES[0], full(mesh), name)

    if name.startswith("fsdp"):
        with jax.set_mesh(mesh):
            half = make_engine(params, "bfloat16", layout)
        cast = decoding_params(jax.tree.map(jnp.asarray, VALUES[0]), ARCH, "bfloat16")
        assert_bits(half._params, cast, full(layout), "bfloat16")
        same = sampler_mesh(SamplerMeshConfig(data=1, fsdp=-1), mesh, arch=ARCH)
        assert same is mesh
        with jax.set_mesh(mesh):
            in_place = make_engine(params, "float32", same)
        for x, y in zip(*map(jax.tree.leaves, (in_place._params, params)), strict=True):
            assert x is y, "in one layout nothing is copied"


jax.config.update("jax_enable_compilation_cache", False)  # a program out of the cache has no text


def programs_of(sizes, layout):
    # An engine and the trainer's parameters, both abstract.
    mesh = make_mesh(MeshConfig(data=sizes[0], fsdp=sizes[1], tensor=sizes[2]), arch=ARCH)
    abstract = jax.tree.map(
        lambda x, sharding: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), VALUES[0], full(mesh)
    )
    with jax.set_mesh(mesh):
        other = layout and sampler_mesh(SamplerMeshConfig(**layout), mesh, arch=ARCH)
        return make_engine(abstract, "float32", other), abstract


whole = sum(x.nbytes for x in jax.tree.leaves(VALUES[0]))
found = {"whole": whole, "relayout": [], "decode": []}
for sizes, layout in (
    ((1, 8, 1), {"tensor": 2}),
    ((1, 8, 1), {"data": 2, "fsdp": 2, "tensor": 2}),
    ((2, 2, 2), {"data": 1, "fsdp": 8}),
    ((1, 4, 2), {"data": 1, "fsdp": 8}),
):
    engine, abstract = programs_of(sizes, layout)
    program = engine._decoding_params.trace(abstract).lower().compile()
    memory = program.memory_analysis()
    held = [memory.argument_size_in_bytes, memory.output_size_in_bytes, memory.temp_size_in_bytes]
    found["relayout"].append([f"{sizes} to {layout}", *held, sum(c.num_bytes for c in collectives(program.as_text()))])
for layout in None, {"tensor": 2}:
    engine, abstract = programs_of((1, 8, 1), layout)
    with jax.set_mesh(make_mesh(MeshConfig())):
        text = engine.trace(abstract, SAMPLING)["decode"].lower().compile().as_text()
    gathered = sum(c.num_bytes for c in collectives(text) if c.kind == "all-gather")
    found["decode"].append(gathered / OPTIONS.decode_steps)  # for each token
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def found():
    """What the compiler says of the programs; the subprocess has then compared values and completions."""
    environment = os.environ | {
        "XLA_FLAGS": "--xla_force_host_platform_device_count=8",
        "JAX_PLATFORMS": "cpu",
        "PYTHONPATH": str(Path(__file__).parent.parent),
    }
    command = [sys.executable, "-c", ON_EIGHT_DEVICES]
    finished = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=580)
    assert finished.returncode == 0, finished.stderr[-3000:]
    return json.loads(finished.stdout.splitlines()[-1])


@pytest.mark.timeout(600)  # a loaded machine compiles slowly
def test_no_device_ever_holds_more_than_its_shares_and_a_layer_on_its_way(found):
    whole = found["whole"]
    for name, arguments, results, temporaries, sent in found["relayout"]:
        assert temporaries < whole / 10, f"{name}: {temporaries} of {whole} bytes"
        assert arguments + results + temporaries < 0.75 * whole, name
        # What a device ends up with, and twice an eighth on the way to where that lies.
        assert sent < results + 2 * whole / 8 * 1.1, f"{name}: {sent} of {whole} bytes"


@pytest.mark.timeout(600)
def test_weights_stay_where_they_are_while_tokens_are_decoded(found):
    """On the trainer's fsdp mesh every token gathers the model; in a layout of copies and tensor shards none does."""
    trainers, layout = found["decode"]
    assert trainers > 0.9 * found["whole"]
    assert layout < 0.01 * found["whole"]


def test_a_layout_beside_vllm_is_refused():
    assert make_config(rollouts={"mesh": {"tensor": 2}}).rollouts.mesh.data == -1
    with pytest.raises(UserError, match=r"engine=vllm leave it out, and see vllm\.tensor_parallel"):
        make_config(rollouts={"engine": "vllm", "mesh": {"tensor": 2}})
