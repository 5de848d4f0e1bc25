"""One optimizer update as two compiled programs: accumulate a micro-batch's gradient, apply the sum.

The micro-batch has one shape in the whole run, and how many of them make a step is data: each program is compiled once.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.sharding import Mesh, NamedSharding

from sgpo_jax.algorithms.losses import LossInputs, LossMetrics, combine_metrics, policy_loss, zero_metrics
from sgpo_jax.algorithms.objectives import RECIPES
from sgpo_jax.config import Config
from sgpo_jax.data.batching import Batch, to_arrays, with_old_logprobs, with_ref_logprobs
from sgpo_jax.hosts.messages import lead
from sgpo_jax.models.qwen import Transformer, token_logprobs
from sgpo_jax.models.sharding import abstract_results, everywhere, partition_spec, put
from sgpo_jax.training.state import TrainState, make_optimizer


class Gradient(NamedTuple):
    """What micro-batches add up to: float32 gradients (nnx.State), the loss (scalar), its LossMetrics; or shardings."""

    grads: Any
    loss: Any
    metrics: Any


@dataclass(frozen=True, slots=True)
class UpdateResult:
    """loss: of the whole update. grad_norm: before clipping. is_finite: False where the update changed nothing."""

    loss: float
    grad_norm: float
    is_finite: bool
    learning_rate: float
    metrics: LossMetrics


class TrainStep:
    """The policy update of one model and run, by default DAPO's (arXiv 2503.14476, section 3; sGPO, arXiv 2606.08854,
    section 4.4)."""

    def __init__(self, model: Transformer, config: Config) -> None:
        self._graphdef = nnx.graphdef(model)
        self._config = config
        self.optimizer = make_optimizer(config.train.optimizer, model.arch)
        self._programs: dict[str, jax.stages.Compiled] = {}

    @property
    def num_compilations(self) -> int:
        """Programs compiled so far; grows no more after the first step."""
        return len(self._programs)

    def logprobs(
        self, params: nnx.State, batches: Sequence[Batch], *, of: Literal["policy", "reference"] = "policy"
    ) -> list[jax.Array]:
        """Of the batches' tokens, [B, T] each. The batches carry neither old nor reference log-probs yet.

        of: which parameters `params` are, to the processes that follow this one.
        """
        lead("logprobs", {"of": of}, to_arrays(batches))
        return [self._run("logprobs", self._logprobs_program, params, _on_mesh(batch)) for batch in batches]

    def old_logprobs(self, params: nnx.State, batches: Sequence[Batch]) -> list[Batch]:
        """The batches with the log-probs of `params`, where several updates are made on one batch of rollouts."""
        return _joined(batches, self.logprobs(params, _bare(batches)), with_old_logprobs)

    def ref_logprobs(self, reference: nnx.State, batches: Sequence[Batch]) -> list[Batch]:
        """The batches with the log-probs of the frozen reference."""
        return _joined(batches, self.logprobs(reference, _bare(batches), of="reference"), with_ref_logprobs)

    def update(
        self, state: TrainState, batches: Sequence[Batch], learning_rate: float
    ) -> tuple[TrainState, UpdateResult]:
        """One optimizer update from all its micro-batches (none: the gradient is zero). `state` is donated: use the one
        that comes back.

        With a loss or gradient that is not finite, the state comes back unchanged, counters and schedule included.
        """
        lead("update", {"learning_rate": learning_rate}, to_arrays(batches))
        total = self._run("zeros", _zeros_program, state.params)
        for batch in batches:
            total = self._run("accumulate", self._accumulate_program, total, state.params, _on_mesh(batch))
        args = state, total.grads, total.loss, np.float32(learning_rate)
        state, grad_norm, is_finite = self._run("apply", self._apply_program, *args)
        loss, metrics, grad_norm, is_finite = jax.device_get((total.loss, total.metrics, grad_norm, is_finite))
        return state, UpdateResult(float(loss), float(grad_norm), bool(is_finite), learning_rate, metrics)

    def trace(self, state: TrainState, batch: Batch) -> dict[str, jax.stages.Traced]:
        """The programs that `update` and `logprobs` run on such arguments, by name; none of them is run.

        The arguments' shapes, types and shardings suffice: jax.ShapeDtypeStruct, with `batch_sharding` on a mesh.
        """
        zeros = _zeros_program(state.params).trace(state.params)
        total = abstract_results(zeros)
        learning_rate = jax.ShapeDtypeStruct((), np.float32)
        return {
            "zeros": zeros,
            "accumulate": self._accumulate_program(total).trace(total, state.params, batch),
            "apply": self._apply_program(state).trace(state, total.grads, total.loss, learning_rate),
            "logprobs": self._logprobs_program(state.params).trace(state.params, replace(batch, **_NO_LOGPROBS)),
        }

    def _accumulate_program(self, total: Gradient, *_: Any) -> Any:
        return jax.jit(self._accumulate, donate_argnums=0, out_shardings=_shardings(total))

    def _apply_program(self, state: TrainState, *_: Any) -> Any:
        return jax.jit(self._apply, donate_argnums=0, out_shardings=(_shardings(state), None, None))

    def _logprobs_program(self, *_: Any) -> Any:
        return jax.jit(self._logprobs, out_shardings=everywhere())

    def _logprobs(self, params: nnx.State, batch: Batch) -> jax.Array:
        return self._forward(params, batch).logprobs_BT

    def _forward(self, params: nnx.State, batch: Batch) -> Any:
        return token_logprobs(
            nnx.merge(self._graphdef, params),
            batch.token_ids_BT,
            batch.positions_BT,
            batch.segment_ids_BT,
            temperature=self._config.rollouts.temperature,
            chunk_tokens=self._config.model.vocab_chunk_tokens,
        )

    def _accumulate(self, total: Gradient, params: nnx.State, batch: Batch) -> Gradient:
        config, recipe = self._config.train.loss, RECIPES[self._config.train.loss.objective]

        def loss_of(params: nnx.State) -> tuple[jax.Array, LossMetrics]:
            forward = self._forward(params, batch)
            inputs = LossInputs(
                logprobs_BT=forward.logprobs_BT,
                entropy_BT=forward.entropy_BT,
                advantages_BT=batch.advantages_BT,
                loss_mask_BT=batch.loss_mask_BT,
                sequence_ids_BT=batch.sequence_ids_BT,
                sampler_logprobs_BT=batch.sampler_logprobs_BT,
                num_loss_tokens=batch.num_loss_tokens,
                num_sequences=batch.num_sequences,
                old_logprobs_BT=batch.old_logprobs_BT,
                ref_logprobs_BT=batch.ref_logprobs_BT,
            )
            outputs = policy_loss(
                inputs,
                config,
                objective=recipe.surrogate,
                aggregation=recipe.aggregation,
                constant_length=self._config.rollouts.max_completion_tokens,
                kl_coef=0.0 if config.kl_kind == "k1" else config.kl_coef,
                kl_kind="k2" if config.kl_kind == "k2" else "k3",
            )
            return outputs.loss, outputs.metrics

        (loss, metrics), grads = jax.value_and_grad(loss_of, has_aux=True)(params)
        return Gradient(
            jax.tree.map(jnp.add, total.grads, grads), total.loss + loss, combine_metrics(total.metrics, metrics)
        )

    def _apply(
        self, state: TrainState, grads: nnx.State, loss: jax.Array, learning_rate: jax.Array
    ) -> tuple[TrainState, jax.Array, jax.Array]:
        grad_norm = optax.tree.norm(grads)
        is_finite = jnp.isfinite(grad_norm) & jnp.isfinite(loss)
        updates, opt_state = self.optimizer.update(grads, state.opt_state, state.params)
        updates = optax.tree.scale(learning_rate, updates)
        updated = TrainState(optax.apply_updates(state.params, updates), opt_state, state.num_updates + 1)
        return jax.tree.map(partial(jnp.where, is_finite), updated, state), grad_norm, is_finite

    def _run(self, name: str, program: Callable[..., Any], *args: Any) -> Any:
        """Call a program, compiled ahead of its first call: an argument of another shape is then an error, never a
        second compilation. program(*args): what jax.jit makes of it for such arguments."""
        if name not in self._programs:
            self._programs[name] = program(*args).lower(*args).compile()
        return self._programs[name](*args)


def _bare(batches: Sequence[Batch]) -> list[Batch]:
    """Without log-probs: what the program that makes them reads, whatever else was made before."""
    return [replace(batch, **_NO_LOGPROBS) for batch in batches]


_NO_LOGPROBS: dict[str, Any] = {"old_logprobs_BT": None, "ref_logprobs_BT": None}


def _joined(
    batches: Sequence[Batch], arrays: Sequence[jax.Array], join: Callable[[Batch, jax.Array], Batch]
) -> list[Batch]:
    return [join(batch, array) for batch, array in zip(batches, arrays, strict=True)]


def _zeros_program(params: nnx.State) -> Any:
    return jax.jit(_zeros, out_shardings=Gradient(_shardings(params), None, None))


def _zeros(params: nnx.State) -> Gradient:
    return Gradient(jax.tree.map(jnp.zeros_like, params), jnp.zeros(()), zero_metrics())


def _shardings(arrays: Any) -> Any:
    return jax.tree.map(lambda x: x.sharding, arrays)


def _on_mesh(batch: Batch) -> Batch:
    """Rows spread over the devices that share the batch."""
    mesh = jax.sharding.get_mesh()
    if mesh.empty:
        return batch

    return jax.tree.map(lambda array: put(array, batch_sharding(np.ndim(array), mesh)), batch)


def batch_sharding(num_dims: int, mesh: Mesh) -> NamedSharding:
    """Of one array of a micro-batch: rows spread over the devices that share the batch, scalars everywhere."""
    return NamedSharding(mesh, partition_spec(("batch", "length") if num_dims == 2 else ()))
