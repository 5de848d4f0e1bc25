"""What training changes, and the optimizer that changes it."""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx

from sgpo_jax.config import OptimizerConfig
from sgpo_jax.models.architecture import Architecture
from sgpo_jax.models.weights import weight_tree


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class TrainState:
    """params: float32, the Transformer's nnx.State. num_updates: int32 scalar, updates made, skipped ones left out."""

    params: nnx.State
    opt_state: Any
    num_updates: jax.Array


def learning_rate_schedule(config: OptimizerConfig, num_updates: int) -> optax.Schedule:
    """A linear warm-up whose first update has rate / warmup_steps, then constant, or linear to the last update."""
    rate, warmup = config.learning_rate, config.warmup_steps
    end = rate if config.schedule == "constant" else rate * config.final_frac
    rest = optax.linear_schedule(rate, end, max(1, num_updates - 1 - warmup))
    if not warmup:
        return rest
    return optax.join_schedules([optax.linear_schedule(rate / warmup, rate, max(1, warmup - 1)), rest], [warmup])


def make_optimizer(config: OptimizerConfig, arch: Architecture, num_updates: int) -> optax.GradientTransformation:
    """AdamW after a clip of the global norm; weight decay on matrices only (sGPO, arXiv 2606.08854, appendix)."""
    return optax.chain(
        optax.clip_by_global_norm(config.clip_norm),
        optax.adamw(
            learning_rate_schedule(config, num_updates),
            b1=config.beta1,
            b2=config.beta2,
            eps=config.eps,
            weight_decay=config.weight_decay,
            mask=nnx.State(weight_tree(arch, lambda weight: weight.is_matrix)),
        ),
    )


def initial_state(params: nnx.State, optimizer: optax.GradientTransformation) -> TrainState:
    """The optimizer's state has the sharding of the parameters, which a jitted init would lose."""
    return TrainState(params, optimizer.init(params), jnp.zeros((), jnp.int32))
