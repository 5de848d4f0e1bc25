"""The policy loss on packed micro-batches: DAPO's (arXiv 2503.14476), and its relatives.

Everything is aligned by token, [B, T]; a row may hold several sequences, told apart by sequence_ids_BT. A micro-batch
is a part of a step: its loss is its part of the step's sum over the whole step's denominators, so that the losses and
gradients of the micro-batches of a step add up to the step's, however it was split (sequences stay whole).

What stands at masked positions is never read: it may be anything, NaN included, without a trace in loss or gradients.
"""

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import chex
import jax
import jax.numpy as jnp
from jax import lax

from sgpo_jax.config import LossConfig

MAX_LOG_RATIO = 20.0  # keeps exp and its products far from overflow in float32

Objective = Literal["dapo", "gspo", "cispo"]
Aggregation = Literal["token_mean", "sequence_mean", "constant"]
KLKind = Literal["k2", "k3"]


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class LossInputs:
    """One micro-batch. Log-probabilities are at the sampling temperature, of the token at the same position.

    logprobs_BT, entropy_BT: float, of the policy that is trained; what the gradient flows through.
    advantages_BT: float, the advantage of the token's rollout.
    loss_mask_BT: bool, True where a token is trained.
    sequence_ids_BT: int, unique within the step; all tokens of a sequence are in one micro-batch.
    sampler_logprobs_BT: float, as the sampler reported them.
    old_logprobs_BT: float, of the policy before the batch's first update; None: this is the first and only update, so
        pi_old is the policy itself, without gradient.
    ref_logprobs_BT: float, of a frozen reference.
    num_loss_tokens, num_sequences: scalars of the WHOLE step, not of this micro-batch: the trained tokens, and the
        sequences that have any.
    """

    logprobs_BT: jax.Array
    entropy_BT: jax.Array
    advantages_BT: jax.Array
    loss_mask_BT: jax.Array
    sequence_ids_BT: jax.Array
    sampler_logprobs_BT: jax.Array
    num_loss_tokens: jax.Array | int
    num_sequences: jax.Array | int
    old_logprobs_BT: jax.Array | None = None
    ref_logprobs_BT: jax.Array | None = None


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class LossMetrics:
    """Scalars over a micro-batch's trained tokens. `combine_metrics` joins them: *_max by maximum, all others by sum.

    A mean over tokens is a sum divided by num_tokens, once all micro-batches are joined.

    num_clipped_low, num_clipped_high: where the clip stops the gradient; num_dual_clipped: where the dual clip does.
    num_weights_capped, weight_sum: the truncated importance weights (1 where off).
    sampler_gap_sum, sampler_gap_max: |logpi_old - logpi_sampler|.
    sampler_kl_sum: KL(sampler || pi_old) estimated on the sampled tokens (k3, no term negative but for rounding).
    ref_kl_sum: KL(policy || reference), likewise; 0 without ref_logprobs_BT.
    """

    num_tokens: jax.Array
    num_clipped_low: jax.Array
    num_clipped_high: jax.Array
    num_dual_clipped: jax.Array
    num_weights_capped: jax.Array
    weight_sum: jax.Array
    ratio_sum: jax.Array
    ratio_max: jax.Array
    entropy_sum: jax.Array
    sampler_gap_sum: jax.Array
    sampler_gap_max: jax.Array
    sampler_kl_sum: jax.Array
    ref_kl_sum: jax.Array


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class LossOutputs:
    """loss: scalar, to be minimised; the micro-batch's part of the step's loss."""

    loss: jax.Array
    metrics: LossMetrics


@dataclass(frozen=True)
class Surrogate:
    """What an objective maximises for each token, and where it clipped (bool)."""

    values_BT: jax.Array
    ratio_BT: jax.Array
    is_clipped_low_BT: jax.Array
    is_clipped_high_BT: jax.Array
    is_dual_clipped_BT: jax.Array


def policy_loss(
    inputs: LossInputs,
    config: LossConfig,
    *,
    objective: Objective = "dapo",
    aggregation: Aggregation = "token_mean",
    constant_length: int | None = None,
    kl_coef: float = 0.0,
    kl_kind: KLKind = "k3",
) -> LossOutputs:
    """minus [weight · surrogate + entropy_coef · entropy - kl_coef · KL], aggregated over the step.

    The defaults are DAPO's objective (arXiv 2503.14476, section 3; sGPO, arXiv 2606.08854, section 4.4): token mean
    over the whole step, no KL. The weight is min(pi_old / pi_sampler, config.sampler_weight_cap), without gradient.
    constant_length: tokens, for the aggregation "constant". GSPO wants aggregation "sequence_mean", and clip ranges
    near 3e-4 and 4e-4.
    Raises ValueError: kl_coef without ref_logprobs_BT, or "constant" without constant_length.
    """
    _check(inputs)
    inputs = _without_masked(inputs)
    old_logprobs_BT = inputs.logprobs_BT if inputs.old_logprobs_BT is None else inputs.old_logprobs_BT
    old_logprobs_BT = lax.stop_gradient(old_logprobs_BT)

    surrogate = _SURROGATES[objective](inputs, old_logprobs_BT, config)
    weight_BT = sampler_weights(old_logprobs_BT, inputs.sampler_logprobs_BT, config.sampler_weight_cap)
    values_BT = weight_BT * surrogate.values_BT + config.entropy_coef * inputs.entropy_BT
    if kl_coef:
        if inputs.ref_logprobs_BT is None:
            raise ValueError("kl_coef needs ref_logprobs_BT")
        values_BT -= kl_coef * kl_loss(inputs.logprobs_BT, inputs.ref_logprobs_BT, kl_kind)
    loss = -aggregate(values_BT, inputs, aggregation, constant_length=constant_length)
    return LossOutputs(loss, _metrics(inputs, surrogate, old_logprobs_BT, weight_BT, config.sampler_weight_cap))


def clipped_surrogate(ratio_BT: jax.Array, advantages_BT: jax.Array, config: LossConfig) -> Surrogate:
    """min(ρ A, clip(ρ, 1 - low, 1 + high) A), and with the dual clip at least c A where A < 0.

    PPO's clip with DAPO's two ranges (arXiv 2503.14476, section 3.1); the dual clip is arXiv 1912.09729.
    """
    low, high, dual = 1 - config.clip_low, 1 + config.clip_high, config.dual_clip
    values_BT = jnp.minimum(ratio_BT * advantages_BT, jnp.clip(ratio_BT, low, high) * advantages_BT)
    is_negative_BT = advantages_BT < 0
    is_dual_clipped_BT = jnp.zeros_like(is_negative_BT)
    if dual is not None:
        is_dual_clipped_BT = is_negative_BT & (ratio_BT > dual)
        values_BT = jnp.where(is_dual_clipped_BT, dual * advantages_BT, values_BT)
    return Surrogate(
        values_BT=values_BT,
        ratio_BT=ratio_BT,
        is_clipped_low_BT=is_negative_BT & (ratio_BT < low),
        is_clipped_high_BT=(advantages_BT > 0) & (ratio_BT > high),
        is_dual_clipped_BT=is_dual_clipped_BT,
    )


def cispo_surrogate(
    ratio_BT: jax.Array, advantages_BT: jax.Array, logprobs_BT: jax.Array, config: LossConfig
) -> Surrogate:
    """sg(min(ρ, 1 + clip_high)) · A · logπ: CISPO (arXiv 2506.13585, section 3.1), without a lower clip.

    Its gradient is what matters; its value is not a measure of anything.
    """
    high = 1 + config.clip_high
    weight_BT = lax.stop_gradient(jnp.minimum(ratio_BT, high))
    never_BT = jnp.zeros(ratio_BT.shape, bool)
    return Surrogate(weight_BT * advantages_BT * logprobs_BT, ratio_BT, never_BT, ratio_BT > high, never_BT)


def sequence_ratio(log_ratio_BT: jax.Array, loss_mask_BT: jax.Array, sequence_ids_BT: jax.Array) -> jax.Array:
    """exp(mean_t log ρ) of the token's sequence, at each of its tokens: GSPO (arXiv 2507.18071, equation 7)."""
    num_tokens_BT = sequence_sums(loss_mask_BT.astype(log_ratio_BT.dtype), loss_mask_BT, sequence_ids_BT)
    sums_BT = sequence_sums(log_ratio_BT, loss_mask_BT, sequence_ids_BT)
    return jnp.exp(_clamped(sums_BT / jnp.maximum(num_tokens_BT, 1)))


def sampler_weights(old_logprobs_BT: jax.Array, sampler_logprobs_BT: jax.Array, cap: float | None) -> jax.Array:
    """min(pi_old / pi_sampler, cap), or 1 where cap is None: truncated importance sampling (see LossConfig)."""
    if cap is None:
        return jnp.ones_like(old_logprobs_BT)
    return jnp.minimum(_ratio(old_logprobs_BT, sampler_logprobs_BT), cap)


def kl_loss(logprobs_BT: jax.Array, ref_logprobs_BT: jax.Array, kind: KLKind) -> jax.Array:
    """Estimates of KL(policy || reference) for each token, with d = logπ_ref - logπ: k2 = d²/2, k3 = e^d - d - 1.

    k3 is GRPO's (arXiv 2402.03300, equation 4). k1 = -d is missing on purpose: see `advantages.k1_reward_penalty`.
    """
    d_BT = _clamped(ref_logprobs_BT - logprobs_BT)
    return d_BT**2 / 2 if kind == "k2" else jnp.expm1(d_BT) - d_BT  # expm1: d is often far below 1


def aggregate(
    values_BT: jax.Array, inputs: LossInputs, how: Aggregation, *, constant_length: int | None = None
) -> jax.Array:
    """The micro-batch's part of the step's mean, a scalar; reads mask, sequence ids and denominators of `inputs`.

    token_mean: over all tokens of the step (DAPO). sequence_mean: over sequences, of their means over tokens (GRPO,
    arXiv 2402.03300, equation 3). constant: token sum / (num_sequences · constant_length) (Dr. GRPO, arXiv 2503.20783).
    A step without trained tokens gives 0. Raises ValueError: "constant" without constant_length.
    """
    mask_BT = inputs.loss_mask_BT
    if how == "token_mean":
        return _masked_sum(values_BT, mask_BT) / jnp.maximum(inputs.num_loss_tokens, 1)
    num_sequences = jnp.maximum(inputs.num_sequences, 1)
    if how == "sequence_mean":
        num_tokens_BT = sequence_sums(mask_BT.astype(values_BT.dtype), mask_BT, inputs.sequence_ids_BT)
        return _masked_sum(values_BT / jnp.maximum(num_tokens_BT, 1), mask_BT) / num_sequences
    if constant_length is None:
        raise ValueError("the aggregation 'constant' needs constant_length")
    return _masked_sum(values_BT, mask_BT) / (num_sequences * constant_length)


def sequence_sums(values_BT: jax.Array, loss_mask_BT: jax.Array, sequence_ids_BT: jax.Array) -> jax.Array:
    """Sum over the trained tokens of each sequence, at every token of the sequence: [B, T]."""
    _, index = jnp.unique(sequence_ids_BT, return_inverse=True, size=sequence_ids_BT.size)
    index_BT = index.reshape(sequence_ids_BT.shape)
    sums = jnp.zeros(sequence_ids_BT.size, values_BT.dtype).at[index_BT].add(jnp.where(loss_mask_BT, values_BT, 0))
    return sums[index_BT]


def zero_metrics() -> LossMetrics:
    """The neutral element of `combine_metrics`."""
    names = [field.name for field in dataclasses.fields(LossMetrics)]
    return LossMetrics(**{name: jnp.zeros((), jnp.int32 if name.startswith("num_") else jnp.float32) for name in names})


def combine_metrics(left: LossMetrics, right: LossMetrics) -> LossMetrics:
    """Join the metrics of two micro-batches: *_max by maximum, all others by sum."""

    def joined(name: str) -> jax.Array:
        join = jnp.maximum if name.endswith("_max") else jnp.add
        return join(getattr(left, name), getattr(right, name))

    return LossMetrics(**{field.name: joined(field.name) for field in dataclasses.fields(LossMetrics)})


def _dapo(inputs: LossInputs, old_logprobs_BT: jax.Array, config: LossConfig) -> Surrogate:
    return clipped_surrogate(_ratio(inputs.logprobs_BT, old_logprobs_BT), inputs.advantages_BT, config)


def _gspo(inputs: LossInputs, old_logprobs_BT: jax.Array, config: LossConfig) -> Surrogate:
    log_ratio_BT = inputs.logprobs_BT - old_logprobs_BT
    ratio_BT = sequence_ratio(log_ratio_BT, inputs.loss_mask_BT, inputs.sequence_ids_BT)
    return clipped_surrogate(ratio_BT, inputs.advantages_BT, config)


def _cispo(inputs: LossInputs, old_logprobs_BT: jax.Array, config: LossConfig) -> Surrogate:
    ratio_BT = _ratio(inputs.logprobs_BT, old_logprobs_BT)
    return cispo_surrogate(ratio_BT, inputs.advantages_BT, inputs.logprobs_BT, config)


_SURROGATES: dict[Objective, Callable[[LossInputs, jax.Array, LossConfig], Surrogate]] = {
    "dapo": _dapo,
    "gspo": _gspo,
    "cispo": _cispo,
}


def _ratio(logprobs_BT: jax.Array, base_logprobs_BT: jax.Array) -> jax.Array:
    return jnp.exp(_clamped(logprobs_BT - base_logprobs_BT))


def _clamped(log_ratio_BT: jax.Array) -> jax.Array:
    return jnp.clip(log_ratio_BT, -MAX_LOG_RATIO, MAX_LOG_RATIO)


def _masked_sum(values_BT: jax.Array, mask_BT: jax.Array) -> jax.Array:
    return jnp.sum(jnp.where(mask_BT, values_BT, 0))


def _metrics(
    inputs: LossInputs,
    surrogate: Surrogate,
    old_logprobs_BT: jax.Array,
    weight_BT: jax.Array,
    weight_cap: float | None,
) -> LossMetrics:
    mask_BT = inputs.loss_mask_BT
    is_capped_BT = weight_BT == weight_cap if weight_cap is not None else jnp.zeros_like(mask_BT)
    gap_BT = jnp.abs(old_logprobs_BT - inputs.sampler_logprobs_BT)
    ref_BT = inputs.logprobs_BT if inputs.ref_logprobs_BT is None else inputs.ref_logprobs_BT
    return LossMetrics(
        num_tokens=_count(mask_BT),
        num_clipped_low=_count(mask_BT & surrogate.is_clipped_low_BT),
        num_clipped_high=_count(mask_BT & surrogate.is_clipped_high_BT),
        num_dual_clipped=_count(mask_BT & surrogate.is_dual_clipped_BT),
        num_weights_capped=_count(mask_BT & is_capped_BT),
        weight_sum=_masked_sum(weight_BT, mask_BT),
        ratio_sum=_masked_sum(surrogate.ratio_BT, mask_BT),
        ratio_max=jnp.max(jnp.where(mask_BT, surrogate.ratio_BT, 0)),
        entropy_sum=_masked_sum(inputs.entropy_BT, mask_BT),
        sampler_gap_sum=_masked_sum(gap_BT, mask_BT),
        sampler_gap_max=jnp.max(jnp.where(mask_BT, gap_BT, 0)),
        sampler_kl_sum=_masked_sum(kl_loss(inputs.sampler_logprobs_BT, old_logprobs_BT, "k3"), mask_BT),
        ref_kl_sum=_masked_sum(kl_loss(inputs.logprobs_BT, ref_BT, "k3"), mask_BT),
    )


def _count(is_BT: jax.Array) -> jax.Array:
    return jnp.sum(is_BT, dtype=jnp.int32)


def _without_masked(inputs: LossInputs) -> LossInputs:
    """Zeros at masked positions, before anything is computed: a NaN there would come back through the gradient."""
    fields = ("logprobs_BT", "entropy_BT", "advantages_BT", "sampler_logprobs_BT", "old_logprobs_BT", "ref_logprobs_BT")
    present = {name: values_BT for name in fields if (values_BT := getattr(inputs, name)) is not None}
    return dataclasses.replace(
        inputs, **{name: jnp.where(inputs.loss_mask_BT, values_BT, 0) for name, values_BT in present.items()}
    )


def _check(inputs: LossInputs) -> None:
    floats = [inputs.logprobs_BT, inputs.entropy_BT, inputs.advantages_BT, inputs.sampler_logprobs_BT]
    floats += [values_BT for values_BT in (inputs.old_logprobs_BT, inputs.ref_logprobs_BT) if values_BT is not None]
    arrays = [*floats, inputs.loss_mask_BT, inputs.sequence_ids_BT]
    chex.assert_rank(arrays, 2)
    chex.assert_equal_shape(arrays)
    chex.assert_type(floats, float)
    chex.assert_type([inputs.loss_mask_BT, inputs.sequence_ids_BT], [bool, int])
    chex.assert_rank([inputs.num_loss_tokens, inputs.num_sequences], 0)
