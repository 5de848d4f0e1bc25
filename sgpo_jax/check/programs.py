"""The programs of a run, traced from abstract values and compiled for devices that need not be there."""

import time
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from sgpo_jax.check.collectives import Collective, collectives
from sgpo_jax.check.flops import matmul_flops
from sgpo_jax.config import Config
from sgpo_jax.data.batching import Batch, BatchShape
from sgpo_jax.models.architecture import Architecture
from sgpo_jax.models.attention import Implementation
from sgpo_jax.models.safetensors import abstract_model
from sgpo_jax.models.sharding import check_divisible, weight_sharding
from sgpo_jax.models.weights import weight_tree
from sgpo_jax.rollouts.jax_engine import JaxEngine
from sgpo_jax.telemetry import say
from sgpo_jax.training.state import TrainState
from sgpo_jax.training.step import TrainStep, batch_sharding
from sgpo_jax.types import SamplingParams

_ENDS = (0,)  # a completion's end; which tokens end one changes no program


@dataclass(frozen=True, slots=True)
class Inputs:
    """What the programs of a run follow from, beside its configuration.

    attention: the implementation that they are compiled with.
    """

    arch: Architecture
    shape: BatchShape
    longest_prompt: int
    attention: Implementation


@dataclass(frozen=True, slots=True)
class Compiled:
    """One program. Bytes are of one device, as the compiler has them: temporaries at their worst moment, aliased of
    the results that take the place of arguments. flops: of one call, over all devices. failure: why it has no more.
    """

    flops: int
    seconds: float
    arguments: int = 0
    results: int = 0
    aliased: int = 0
    temporaries: int = 0
    collectives: tuple[Collective, ...] = ()
    failure: str = ""

    @property
    def peak(self) -> int:
        return self.arguments + self.results - self.aliased + self.temporaries


def compile_programs(
    config: Config, inputs: Inputs, mesh: Mesh | None, sampler_mesh: Mesh | None
) -> dict[str, Compiled]:
    """By name: those of TrainStep and, where it samples, of the JAX engine.

    mesh, sampler_mesh: as open_run has them: no mesh on one device, no other one where the engine samples in the
    trainer's layout. Raises UserError where they do not divide the model. A program that the compiler finds too large
    has a `failure`.
    """
    if mesh is not None:
        check_divisible(inputs.arch, mesh)
    programs = trace_programs(config, inputs, mesh, sampler_mesh)
    counted = programs
    if inputs.attention != "plain":  # whose kernels hide their products
        plain = Inputs(inputs.arch, inputs.shape, inputs.longest_prompt, "plain")
        counted = trace_programs(config, plain, mesh, sampler_mesh)
    steps = config.rollouts.decode_steps
    found = {}
    for name, program in programs.items():
        found[name] = _compile(program, matmul_flops(counted[name].jaxpr, while_trips=steps))
        say(f"check: compiled {name} in {found[name].seconds:.0f} s")
    return found


def trace_programs(
    config: Config, inputs: Inputs, mesh: Mesh | None, sampler_mesh: Mesh | None = None
) -> dict[str, jax.stages.Traced]:
    """By name; nothing is compiled but what says where results lie, and nothing allocated."""
    model = abstract_model(
        inputs.arch,
        compute_dtype=config.model.compute_dtype,
        remat=config.model.remat,
        attention=inputs.attention,
    )
    step = TrainStep(model, config)
    rollouts = config.rollouts
    state = abstract_state(inputs.arch, step.optimizer, mesh)
    batch = abstract_batch(inputs.shape, config, mesh)
    with _under(mesh):
        programs = step.trace(state, batch)
        if rollouts.engine == "jax":
            engine = JaxEngine(
                model,
                stop_ids=_ENDS,
                max_prompt_tokens=inputs.longest_prompt,
                config=rollouts,
                run_seed=config.seed,
                mesh=sampler_mesh,
            )
            sampling = SamplingParams(rollouts.max_completion_tokens, rollouts.temperature, rollouts.top_p)
            programs |= engine.trace(state.params, sampling)
    return programs


def abstract_state(arch: Architecture, optimizer: optax.GradientTransformation, mesh: Mesh | None) -> TrainState:
    """A TrainState of shapes and shardings, as `initial_state` and loading make it."""
    params = nnx.State(
        weight_tree(
            arch,
            lambda w: nnx.Param(_abstract(w.shape, jnp.float32, None if mesh is None else weight_sharding(w, mesh))),
        )
    )
    everywhere = None if mesh is None else NamedSharding(mesh, PartitionSpec())
    opt_state = optax.tree.map_params(
        optimizer,
        lambda moment, param: _abstract(moment.shape, moment.dtype, param.sharding),
        jax.eval_shape(optimizer.init, params),
        params,
        transform_non_params=lambda value: _abstract(value.shape, value.dtype, everywhere),
    )
    return TrainState(params, opt_state, _abstract((), jnp.int32, everywhere))


def abstract_batch(shape: BatchShape, config: Config, mesh: Mesh | None) -> Batch:
    """A micro-batch as the update of this configuration gets it."""
    loss = config.train.loss

    def array(dtype: jax.typing.DTypeLike, *sizes: int) -> Any:
        return _abstract(sizes, dtype, None if mesh is None else batch_sharding(len(sizes), mesh))

    size = shape.num_rows, shape.row_length
    ids, floats, scalar = array(jnp.int32, *size), array(jnp.float32, *size), array(jnp.float32)
    has_old = loss.old_logprobs == "sampler" or config.train.num_updates > 1
    has_ref = loss.kl_coef > 0 and loss.kl_kind != "k1"
    return Batch(
        token_ids_BT=ids,
        positions_BT=ids,
        segment_ids_BT=ids,
        loss_mask_BT=array(jnp.bool_, *size),
        advantages_BT=floats,
        sampler_logprobs_BT=floats,
        sequence_ids_BT=ids,
        group_ids_BT=ids,
        num_loss_tokens=scalar,
        num_sequences=scalar,
        old_logprobs_BT=floats if has_old else None,
        ref_logprobs_BT=floats if has_ref else None,
    )


def _abstract(shape: tuple[int, ...], dtype: jax.typing.DTypeLike, sharding: NamedSharding | None) -> Any:
    return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)


def _under(mesh: Mesh | None) -> AbstractContextManager[Any]:
    return nullcontext() if mesh is None else jax.set_mesh(mesh)


def _compile(program: jax.stages.Traced, flops: int) -> Compiled:
    begun = time.monotonic()
    try:
        compiled = program.lower().compile()
    except jax.errors.JaxRuntimeError as error:
        message = " ".join(str(error).split())
        if "RESOURCE_EXHAUSTED" not in message:
            raise
        return Compiled(flops, time.monotonic() - begun, failure=message[:300])
    stats = compiled.memory_analysis()
    return Compiled(
        flops,
        time.monotonic() - begun,
        arguments=stats.argument_size_in_bytes,
        results=stats.output_size_in_bytes,
        aliased=stats.alias_size_in_bytes,
        temporaries=stats.temp_size_in_bytes,
        collectives=collectives(compiled.as_text() or ""),
    )
