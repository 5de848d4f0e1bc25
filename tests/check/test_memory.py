"""The arithmetic against what eight simulated devices really hold, and the traced programs against the run's own.

In a subprocess, since devices are made at start-up.
"""

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from helpers import tiny_architecture

from sgpo_jax.check.advice import Budget, advise
from sgpo_jax.check.memory import Sizes, estimate, kv_bytes_per_token
from sgpo_jax.models.weights import num_parameters

TESTS = Path(__file__).parent.parent

ON_EIGHT_DEVICES = """
import sys
sys.path.insert(0, sys.argv[1])
from dataclasses import replace
import jax, numpy as np
from flax import nnx
from helpers import make_config
from sgpo_jax.config import SamplerMeshConfig
from sgpo_jax.check.memory import Sizes, estimate
from sgpo_jax.check.programs import Inputs, trace_programs
from sgpo_jax.data.batching import TrainSequence, batch_shape, pack
from sgpo_jax.models.safetensors import load_model
from sgpo_jax.models.sharding import make_mesh, sampler_mesh
from sgpo_jax.rollouts.jax_engine import JaxEngine, _no_arrivals
from sgpo_jax.training.state import initial_state
from sgpo_jax.training.step import TrainStep, _on_mesh, _zeros_program
from sgpo_jax.types import SamplingParams
from pathlib import Path

config = make_config(
    model={"compute_dtype": "bfloat16", "attention": "plain"},
    rollouts={"batch_size": 16, "max_completion_tokens": 24, "prefill_tokens": 16, "decode_steps": 4},
    mesh={"data": 2, "fsdp": 2, "tensor": 2},
    train={"micro_batch_tokens": 256},
)
mesh = make_mesh(config.mesh)
shape = batch_shape(8, 24, 256, 4)


def on_first_device(tree):
    first = jax.devices()[0]
    shards = [shard for x in jax.tree.leaves(tree) for shard in x.addressable_shards]
    return sum(shard.data.nbytes for shard in shards if shard.device == first and shard.data.ndim)


with jax.set_mesh(mesh):
    source = Path(sys.argv[1]) / "fixtures" / "models" / "qwen2_untied"
    model = load_model(source, compute_dtype="bfloat16", remat="full", mesh=mesh)
    step = TrainStep(model, config)
    state = initial_state(nnx.state(model), step.optimizer)
    total = _zeros_program(state.params)(state.params)
    engine = JaxEngine(model, stop_ids=(0,), max_prompt_tokens=8, config=config.rollouts, run_seed=0)
    slots = engine._open(SamplingParams(24))
    held = {
        "weights": on_first_device(state.params),
        "optimizer": on_first_device(state.opt_state),
        "gradients": on_first_device(total.grads),
        "sampler_weights": on_first_device(engine._params),
        "kv_cache": on_first_device(slots.cache),
    }

    # Lowered from the run's own arrays, the programs are the same to the letter.
    sequence = TrainSequence((1, 2), np.full(3, 4), np.zeros(3, np.float32), 1.0, 0)
    (batch,) = pack([sequence] * 4, shape)
    batch = _on_mesh(batch)
    arrivals = _no_arrivals(1, 16, 16)
    real = {
        "zeros": _zeros_program(state.params).lower(state.params),
        "accumulate": step._accumulate_program(total).lower(total, state.params, batch),
        "apply": step._apply_program(state).lower(state, total.grads, total.loss, np.float32(1e-3)),
        "logprobs": step._logprobs_program().lower(state.params, batch),
        "admit": engine._admit.lower(engine._params, slots, arrivals),
        "decode": engine._decode.lower(engine._params, slots, temperature=1.0, top_p=1.0, greedy=False),
    }
    traced = trace_programs(config, Inputs(model.arch, shape, 8, "plain"), mesh)
    for name, program in real.items():
        assert program.as_text() == traced[name].lower().as_text(), f"{name}: not the program of the run"

    # The same of a sampler with a layout of its own.
    layout = sampler_mesh(SamplerMeshConfig(tensor=2), mesh)
    other = JaxEngine(
        model, stop_ids=(0,), max_prompt_tokens=8, config=config.rollouts, run_seed=0, mesh=layout
    )
    with jax.set_mesh(layout):
        slots = other._open(SamplingParams(24))
        real = {
            "admit": other._admit.lower(other._params, slots, arrivals),
            "decode": other._decode.lower(other._params, slots, temperature=1.0, top_p=1.0, greedy=False),
        }
    real["decoding_params"] = other._decoding_params.lower(state.params)
    traced = trace_programs(config, Inputs(model.arch, shape, 8, "plain"), mesh, layout)
    for name, program in real.items():
        assert program.as_text() == traced[name].lower().as_text(), f"{name}: not the program of the run"
    held_of_other = {"sampler_weights": on_first_device(other._params), "kv_cache": on_first_device(slots.cache)}

sizes = Sizes(
    arch=model.arch, data=2, fsdp=2, tensor=2, num_rows=shape.num_rows, row_length=shape.row_length,
    vocab_chunk_tokens=64, remat="full", compute_bytes=2, holds_scores=True, has_reference=False,
    num_slots=16, slot_length=16 + 24,
)
expected = estimate(sizes).to_dict()
assert {name: expected[name] for name in held} == held, (expected, held)
of_other = estimate(replace(sizes, sampler_mesh=dict(layout.shape))).to_dict()
assert {name: of_other[name] for name in held_of_other} == held_of_other, (of_other, held_of_other)
assert {name: of_other[name] for name in ("weights", "optimizer", "gradients")}.items() <= held.items()
assert of_other["sampler_weights"] > 1.8 * held["sampler_weights"], "half of the model in place of a quarter"
print("ALL EQUAL")
"""


@pytest.mark.timeout(600)  # a loaded machine compiles slowly
def test_what_rests_is_what_real_arrays_hold_and_the_programs_are_the_runs_own():
    environment = os.environ | {"XLA_FLAGS": "--xla_force_host_platform_device_count=8", "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, "-c", ON_EIGHT_DEVICES, str(TESTS)]
    finished = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=580)
    assert finished.stdout == "ALL EQUAL\n", finished.stderr[-3000:]


LONG_ROWS = {
    "arch": tiny_architecture(vocab_size=2**17, model_dim=64, head_dim=16),
    "row_length": 1024,
    "holds_scores": False,
}


def sizes_of(**changes):
    values = {
        "arch": tiny_architecture(vocab_size=4096, model_dim=64, head_dim=16),
        "data": 2,
        "fsdp": 2,
        "tensor": 1,
        "num_rows": 32,
        "row_length": 64,
        "vocab_chunk_tokens": 1024,
        "remat": "none",
        "compute_bytes": 4,
        "holds_scores": True,
        "has_reference": False,
        "num_slots": 64,
        "slot_length": 64,
    }
    return Sizes(**{**values, **changes})


def test_stages_hold_what_they_need_at_the_time():
    memory = estimate(sizes_of(has_reference=True))
    assert memory.optimizer == 2 * memory.weights == 2 * memory.reference
    assert memory.sampler_weights == 0, "float32 is sampled from in place"
    assert memory.kv_cache == 64 * 64 * kv_bytes_per_token(tiny_architecture(head_dim=16), 4) // 4
    assert memory.sampling == 4 * memory.weights + memory.kv_cache + memory.decoding
    passing = memory.micro_gradients + memory.activations + max(memory.layer, memory.logits)
    assert memory.updating == 5 * memory.weights + passing
    assert estimate(sizes_of(num_slots=0)).sampling == 3 * memory.weights


@pytest.mark.parametrize(
    ("changes", "setting", "less"),
    [
        ({}, "mesh.data=1 mesh.fsdp=4", {"data": 1, "fsdp": 4}),
        ({"data": 1, "fsdp": 4}, "train.micro_batch_tokens=1024", {"num_rows": 16}),
        (
            {"data": 1, "fsdp": 4, "num_rows": 4, **LONG_ROWS, "vocab_chunk_tokens": 512},
            "model.vocab_chunk_tokens=256",
            {"vocab_chunk_tokens": 256},
        ),
        ({"data": 1, "fsdp": 4, "num_rows": 4, "vocab_chunk_tokens": 64}, "model.remat=full", {"remat": "full"}),
        (
            {"data": 1, "fsdp": 4, "num_rows": 4, "vocab_chunk_tokens": 64, "remat": "full"},
            "mesh.fsdp=8 (on 8 devices)",
            {"fsdp": 8, "num_rows": 8},
        ),
    ],
)
def test_the_advice_is_the_least_change_that_fits(changes, setting, less):
    """One byte less than what it takes now: the cheapest change that helps is enough."""
    sizes = sizes_of(num_slots=0, **changes)
    room = Budget(estimate(sizes).updating - 1)
    found = advise(sizes, room)
    assert found is not None
    assert found.settings == (setting,)
    assert found.num_bytes <= room.num_bytes
    assert found.num_bytes == estimate(replace(sizes, **less)).updating


def test_a_sampler_that_does_not_fit_gets_fewer_copies_and_at_last_the_trainers_layout():
    sampler = {"data": 8, "fsdp": 1, "tensor": 1}
    sizes = sizes_of(data=1, fsdp=8, num_rows=8, remat="full", vocab_chunk_tokens=64, num_slots=8, sampler_mesh=sampler)
    memory = estimate(sizes)
    assert memory.sampler_weights == 4 * num_parameters(sizes.arch), "float32, and whole on every device"
    assert memory.sampling == memory.always + max(memory.relayout, memory.kv_cache + memory.decoding)
    split = estimate(replace(sizes, sampler_mesh={"data": 4, "fsdp": 1, "tensor": 2}))
    found = advise(sizes, Budget(Budget(0).peak(split)))
    assert found is not None
    assert found.settings == ("rollouts.mesh.data=4 rollouts.mesh.tensor=2",)
    in_place = estimate(replace(sizes, sampler_mesh=None))
    found = advise(sizes, Budget(Budget(0).peak(in_place)))
    assert found is not None
    assert found.settings == ("rollouts.mesh=null",)


def test_advice_adds_up_where_no_change_is_enough_and_gives_up_where_none_helps():
    sizes = sizes_of(num_slots=0, data=1, fsdp=4)
    smallest = replace(sizes, num_rows=4, vocab_chunk_tokens=128)
    found = advise(sizes, Budget(estimate(replace(smallest, remat="full")).updating))
    assert found is not None
    assert found.settings == ("train.micro_batch_tokens=256", "model.vocab_chunk_tokens=128", "model.remat=full")
    assert advise(sizes, Budget(1000)) is None


def test_a_compiler_that_holds_more_than_estimated_needs_more_of_a_change():
    sizes = sizes_of(num_slots=0, data=1, fsdp=4)
    memory = estimate(sizes)
    room = memory.updating + memory.passing // 4
    assert Budget(room).peak(memory) <= room
    found = advise(sizes, Budget(room, scale=1.5))
    assert found is not None
    assert found.settings == ("train.micro_batch_tokens=1024",)
