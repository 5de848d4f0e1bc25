"""What training changes, and the optimizer that changes it."""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx

from sgpo_jax.checkpoints import Checkpoints, Restored, abstract_like
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

    @property
    def parts(self) -> dict[str, Any]:
        """As checkpoints have it."""
        return {"params": self.params, "optimizer": (self.opt_state, self.num_updates)}


def restore(checkpoints: Checkpoints, state: TrainState) -> tuple[TrainState, Restored]:
    """The newest checkpoint in place of `state`, whose arrays are gone, and all that it holds."""
    abstract = abstract_like(state.parts)
    jax.tree.map(lambda x: x.delete(), state.parts)  # room for what is restored
    restored = checkpoints.restore(abstract)
    return TrainState(restored.arrays["params"], *restored.arrays["optimizer"]), restored


def learning_rate(config: OptimizerConfig, num_updates: int, progress: float) -> float:
    """Of the update that follows `num_updates` updates: a linear warm-up, whose first update has rate / warmup_steps,
    times 1, or times what falls linearly to final_frac.

    progress: share of the schedule that is over after the step. Not a share of the steps, since a method that refills
    does not know their number beforehand.
    """
    warmup = min(1.0, (num_updates + 1) / config.warmup_steps) if config.warmup_steps else 1.0
    fall = 1 - config.final_frac if config.schedule == "linear" else 0.0
    return config.learning_rate * warmup * (1 - fall * progress)


def make_optimizer(config: OptimizerConfig, arch: Architecture) -> optax.GradientTransformation:
    """AdamW after a clip of the global norm; weight decay on matrices only (sGPO, arXiv 2606.08854, appendix).

    Its updates are for a learning rate of 1, and are to be scaled.
    """
    return optax.chain(
        optax.clip_by_global_norm(config.clip_norm),
        optax.adamw(
            1.0,
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
