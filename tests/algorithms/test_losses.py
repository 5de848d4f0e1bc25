import dataclasses
import math
from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sgpo_jax.algorithms.losses import (
    LossInputs,
    aggregate,
    combine_metrics,
    kl_loss,
    policy_loss,
    sequence_sums,
    zero_metrics,
)
from sgpo_jax.config import LossConfig

FLOATS = ("logprobs_BT", "entropy_BT", "advantages_BT", "sampler_logprobs_BT", "old_logprobs_BT", "ref_logprobs_BT")


def packed_step(seed, num_rows=4, length=16):
    """A step as float64 NumPy: rows packed with sequences of prompt (untrained) and completion, padding at the end."""
    rng = np.random.default_rng(seed)
    shape = (num_rows, length)
    step = {name: np.full(shape, 7.0) for name in FLOATS} | {"loss_mask_BT": np.zeros(shape, bool)}
    step["sequence_ids_BT"] = np.full(shape, -1)
    next_id = 5
    for row in range(num_rows):
        start = 0
        while start + 4 < length:
            end = start + int(rng.integers(4, 9))
            step["sequence_ids_BT"][row, start:end] = next_id
            step["loss_mask_BT"][row, start + 2 : end] = True
            step["advantages_BT"][row, start:end] = rng.choice([-1.0, 0.0, 1.7])
            start, next_id = end, next_id + 3
    logprobs = -rng.exponential(1.0, shape)
    step["logprobs_BT"] = logprobs
    step["entropy_BT"] = rng.exponential(1.0, shape)
    step["old_logprobs_BT"] = logprobs + rng.normal(0, 0.4, shape)
    step["sampler_logprobs_BT"] = step["old_logprobs_BT"] + rng.normal(0, 0.3, shape)
    step["ref_logprobs_BT"] = logprobs + rng.normal(0, 0.5, shape)
    return step | denominators(step)


def denominators(step):
    mask = step["loss_mask_BT"]
    return {"num_loss_tokens": int(mask.sum()), "num_sequences": len(set(step["sequence_ids_BT"][mask].tolist()))}


def as_inputs(step):
    return LossInputs(**jax.tree.map(lambda value: value if np.isscalar(value) else jnp.asarray(value), step))


def single(step):
    """Float32 inputs, as in a run."""
    with jax.enable_x64(False):
        return as_inputs(step)


def tokens_by_sequence(step):
    """Positions of the trained tokens of each sequence."""
    found = {}
    for row, column in np.ndindex(step["loss_mask_BT"].shape):
        if step["loss_mask_BT"][row, column]:
            found.setdefault(int(step["sequence_ids_BT"][row, column]), []).append((row, column))
    return list(found.values())


def oracle(step, config, *, objective, aggregation, constant_length=None, kl_coef=0.0, kl_kind="k3", frozen=None):
    """The loss by its definition, sequence by sequence. `frozen`: log-probs for what carries no gradient."""
    frozen = step["logprobs_BT"] if frozen is None else frozen
    total = 0.0
    for tokens in tokens_by_sequence(step):
        log_ratios = [step["logprobs_BT"][at] - step["old_logprobs_BT"][at] for at in tokens]
        values = []
        for at, log_ratio in zip(tokens, log_ratios, strict=True):
            advantage = step["advantages_BT"][at]
            if objective == "cispo":
                ratio = math.exp(frozen[at] - step["old_logprobs_BT"][at])
                value = min(ratio, 1 + config.clip_high) * advantage * step["logprobs_BT"][at]
            else:
                ratio = math.exp(sum(log_ratios) / len(tokens) if objective == "gspo" else log_ratio)
                clipped = min(max(ratio, 1 - config.clip_low), 1 + config.clip_high)
                value = min(ratio * advantage, clipped * advantage)
                if config.dual_clip is not None and advantage < 0:
                    value = max(value, config.dual_clip * advantage)
            if config.sampler_weight_cap is not None:
                weight = math.exp(step["old_logprobs_BT"][at] - step["sampler_logprobs_BT"][at])
                value *= min(weight, config.sampler_weight_cap)
            d = step["ref_logprobs_BT"][at] - step["logprobs_BT"][at]
            kl = d * d / 2 if kl_kind == "k2" else math.exp(d) - d - 1
            values.append(value + config.entropy_coef * step["entropy_BT"][at] - kl_coef * kl)
        if aggregation == "token_mean":
            total += sum(values) / step["num_loss_tokens"]
        elif aggregation == "sequence_mean":
            total += sum(values) / len(values) / step["num_sequences"]
        else:
            total += sum(values) / (step["num_sequences"] * constant_length)
    return -total


def finite_differences(step, name, loss_of, eps=1e-6):
    grads = np.zeros_like(step[name])
    for at in zip(*np.nonzero(step["loss_mask_BT"]), strict=True):
        sides = []
        for sign in (1, -1):
            moved = step[name].copy()
            moved[at] += sign * eps
            sides.append(loss_of(step | {name: moved}))
        grads[at] = (sides[0] - sides[1]) / (2 * eps)
    return grads


@cache
def program(config, options):
    def loss_of(trained, inputs):
        outputs = policy_loss(dataclasses.replace(inputs, **trained), config, **dict(options))
        return outputs.loss, outputs

    return jax.jit(jax.grad(loss_of, has_aux=True))


def loss_and_grads(inputs, config, **options):
    """The outputs, and the gradients by name of the two arrays that carry any."""
    trained = {"logprobs_BT": inputs.logprobs_BT, "entropy_BT": inputs.entropy_BT}
    grads, outputs = program(config, tuple(options.items()))(trained, inputs)
    return outputs, grads


def grads_of(inputs, config, **options):
    return loss_and_grads(inputs, config, **options)[1]


EVERYTHING = LossConfig(clip_low=0.2, clip_high=0.28, dual_clip=1.5, entropy_coef=0.03, sampler_weight_cap=1.1)
CASES = [
    (LossConfig(), {"objective": "dapo", "aggregation": "token_mean"}),
    (EVERYTHING, {"objective": "dapo", "aggregation": "token_mean"}),
    (EVERYTHING, {"objective": "dapo", "aggregation": "sequence_mean", "kl_coef": 0.1, "kl_kind": "k2"}),
    (EVERYTHING, {"objective": "dapo", "aggregation": "constant", "constant_length": 9, "kl_coef": 0.1}),
    (LossConfig(clip_low=3e-2, clip_high=4e-2), {"objective": "gspo", "aggregation": "sequence_mean"}),
    (EVERYTHING, {"objective": "cispo", "aggregation": "token_mean"}),
]


@pytest.mark.parametrize(("config", "options"), CASES)
def test_loss_and_gradients_equal_the_definition(config, options):
    step = packed_step(seed=1)
    with jax.enable_x64(True):
        inputs = as_inputs(step)
        outputs, grads = loss_and_grads(inputs, config, **options)
        loss = float(outputs.loss)
    definition = partial(oracle, config=config, frozen=step["logprobs_BT"], **options)
    assert loss == pytest.approx(definition(step), rel=1e-12)
    for name, grad in grads.items():
        np.testing.assert_allclose(grad, finite_differences(step, name, definition), atol=1e-9)


@pytest.mark.parametrize(("config", "options"), CASES)
def test_float32_is_close(config, options):
    step = packed_step(seed=2)
    outputs = policy_loss(single(step), config, **options)
    assert outputs.loss.dtype == jnp.float32
    assert float(outputs.loss) == pytest.approx(oracle(step, config, **options), abs=1e-5)


def test_without_old_logprobs_the_policy_is_its_own_old_policy():
    step = packed_step(seed=3) | {"old_logprobs_BT": None, "ref_logprobs_BT": None}
    outputs = policy_loss(single(step), LossConfig())
    mask, advantages = step["loss_mask_BT"], step["advantages_BT"]
    expected = -np.where(mask, advantages, 0) / mask.sum()
    assert float(outputs.loss) == pytest.approx(expected.sum(), abs=1e-6)
    np.testing.assert_allclose(grads_of(single(step), LossConfig())["logprobs_BT"], expected, atol=1e-7)
    assert float(outputs.metrics.ratio_sum) == mask.sum()


def test_advantages_and_weights_carry_no_gradient():
    inputs = single(packed_step(seed=3))
    config = LossConfig(sampler_weight_cap=2.0)

    def loss_of(old_logprobs_BT):
        return policy_loss(dataclasses.replace(inputs, old_logprobs_BT=old_logprobs_BT), config).loss

    assert (jax.grad(loss_of)(inputs.old_logprobs_BT) == 0).all()


@pytest.mark.parametrize("garbage", [np.nan, np.inf, -np.inf, 1e38])
@pytest.mark.parametrize(("config", "options"), CASES)
def test_masked_positions_are_never_read(garbage, config, options):
    step = packed_step(seed=4)
    spoiled = step | {name: np.where(step["loss_mask_BT"], step[name], garbage) for name in FLOATS}
    clean, dirty = (loss_and_grads(single(s), config, **options) for s in (step, spoiled))
    jax.tree.map(np.testing.assert_array_equal, dirty, clean)
    for grad in dirty[1].values():
        assert np.isfinite(grad).all()
        assert (np.asarray(grad)[~step["loss_mask_BT"]] == 0).all()


@pytest.mark.parametrize(("config", "options"), CASES)
@settings(max_examples=8, deadline=None)
@given(parts=st.lists(st.integers(0, 2), min_size=6, max_size=6), seed=st.integers(0, 50))
def test_micro_batches_add_up_to_the_step(config, options, parts, seed):
    step = packed_step(seed, num_rows=6)
    whole, whole_grads = loss_and_grads(single(step), config, **options)
    loss, metrics = 0.0, zero_metrics()
    for part in range(3):
        # Rows of other parts are padding here: one shape, as in training.
        is_here = (np.array(parts) == part)[:, None]
        inputs = single(step | {"loss_mask_BT": step["loss_mask_BT"] & is_here})
        outputs, grads = loss_and_grads(inputs, config, **options)
        loss, metrics = loss + outputs.loss, combine_metrics(metrics, outputs.metrics)
        for name, grad in grads.items():
            np.testing.assert_allclose(grad, np.where(is_here, whole_grads[name], 0), atol=1e-6)
    assert float(loss) == pytest.approx(float(whole.loss), abs=1e-5)
    jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-5), metrics, whole.metrics)


@pytest.mark.parametrize(("config", "options"), CASES)
def test_packing_does_not_matter(config, options):
    """The same sequences, one a row."""
    step = packed_step(seed=6)
    sequences = tokens_by_sequence(step)
    shape = len(sequences), 16
    rows = {name: np.zeros(shape, step[name].dtype) for name in (*FLOATS, "loss_mask_BT", "sequence_ids_BT")}
    for row, tokens in enumerate(sequences):
        for name, values_BT in rows.items():
            values_BT[row, : len(tokens)] = [step[name][at] for at in tokens]
    losses = [policy_loss(single(s), config, **options).loss for s in (step, rows | denominators(rows))]
    assert float(losses[0]) == pytest.approx(float(losses[1]), abs=1e-5)


def test_groups_without_advantage_may_stay_out():
    """Left out of the backward pass, with the denominators of the full batch: the same gradient."""
    step = packed_step(seed=7)
    less = step | {"loss_mask_BT": step["loss_mask_BT"] & (step["advantages_BT"] != 0)}
    assert less["loss_mask_BT"].sum() < step["loss_mask_BT"].sum()
    for aggregation in ("token_mean", "sequence_mean"):
        full, part = (grads_of(single(s), LossConfig(), aggregation=aggregation)["logprobs_BT"] for s in (step, less))
        np.testing.assert_allclose(full, part, atol=1e-8)


def test_log_ratio_is_clamped():
    step = packed_step(seed=8)
    step["old_logprobs_BT"] = step["logprobs_BT"] - 500
    step["advantages_BT"][:] = -1.0
    outputs = policy_loss(single(step), LossConfig())
    assert float(outputs.loss) == pytest.approx(math.exp(20), rel=1e-5)
    assert float(policy_loss(single(step), LossConfig(dual_clip=10.0)).loss) == pytest.approx(10.0)
    for objective in ("dapo", "gspo", "cispo"):
        assert np.isfinite(grads_of(single(step), LossConfig(), objective=objective)["logprobs_BT"]).all()


def test_a_micro_batch_without_trained_tokens():
    step = packed_step(seed=9)
    nothing = step | {"loss_mask_BT": np.zeros_like(step["loss_mask_BT"]), "num_loss_tokens": 0, "num_sequences": 0}
    for config, options in CASES:
        outputs, grads = loss_and_grads(single(nothing), config, **options)
        assert float(outputs.loss) == 0
        jax.tree.map(partial(np.testing.assert_array_equal, strict=True), outputs.metrics, zero_metrics())
        assert all((grad == 0).all() for grad in grads.values())


def test_metrics_equal_the_definition():
    step = packed_step(seed=12, num_rows=12)
    config = LossConfig(dual_clip=1.3, sampler_weight_cap=1.1)
    expected = dict.fromkeys((field.name for field in dataclasses.fields(zero_metrics())), 0.0)
    for at in (at for tokens in tokens_by_sequence(step) for at in tokens):
        ratio, advantage = math.exp(step["logprobs_BT"][at] - step["old_logprobs_BT"][at]), step["advantages_BT"][at]
        gap = step["old_logprobs_BT"][at] - step["sampler_logprobs_BT"][at]
        to_ref = step["ref_logprobs_BT"][at] - step["logprobs_BT"][at]
        expected["num_tokens"] += 1
        expected["num_clipped_low"] += advantage < 0 and ratio < 0.8
        expected["num_clipped_high"] += advantage > 0 and ratio > 1.28
        expected["num_dual_clipped"] += advantage < 0 and ratio > 1.3
        expected["num_weights_capped"] += math.exp(gap) > 1.1
        expected["weight_sum"] += min(math.exp(gap), 1.1)
        expected["ratio_sum"] += ratio
        expected["ratio_max"] = max(expected["ratio_max"], ratio)
        expected["entropy_sum"] += step["entropy_BT"][at]
        expected["sampler_gap_sum"] += abs(gap)
        expected["sampler_gap_max"] = max(expected["sampler_gap_max"], abs(gap))
        expected["sampler_kl_sum"] += math.exp(gap) - gap - 1
        expected["ref_kl_sum"] += math.exp(to_ref) - to_ref - 1
    measured = dataclasses.asdict(policy_loss(single(step), config).metrics)
    assert min(expected.values()) > 0  # each of them is exercised
    assert {name: float(value) for name, value in measured.items()} == pytest.approx(expected, rel=1e-5)


def test_metrics_of_what_is_off():
    step = packed_step(seed=10) | {"ref_logprobs_BT": None}
    metrics = policy_loss(single(step), LossConfig()).metrics
    assert float(metrics.weight_sum) == float(metrics.num_tokens)
    assert float(metrics.num_weights_capped) == float(metrics.num_dual_clipped) == float(metrics.ref_kl_sum) == 0


def test_sampler_kl_estimates_the_divergence():
    """Over tokens drawn from the sampler, the mean of the metric is KL(sampler || policy)."""
    rng = np.random.default_rng(0)
    sampler, policy = rng.dirichlet(np.ones(5)), rng.dirichlet(np.ones(5))
    tokens = rng.choice(5, size=(1, 200_000), p=sampler)
    estimate = kl_loss(jnp.log(sampler[tokens]), jnp.log(policy[tokens]), "k3").mean()
    assert float(estimate) == pytest.approx(float(np.sum(sampler * np.log(sampler / policy))), rel=0.02)


@pytest.mark.parametrize("d", [1e-3, -1e-3, 0.1])
def test_k3_of_close_policies_is_not_lost_to_rounding(d):
    estimate = kl_loss(jnp.float32(0.0), jnp.float32(d), "k3")
    assert float(estimate) == pytest.approx(math.exp(d) - d - 1, rel=1e-3)


def test_sequence_sums():
    ids = jnp.array([[4, 4, 9, 9], [9, 2, 2, 0]])
    mask = jnp.array([[True, True, True, False], [True, True, False, False]])
    sums = sequence_sums(jnp.arange(1.0, 9.0).reshape(2, 4), mask, ids)
    np.testing.assert_array_equal(sums, [[3, 3, 8, 8], [8, 6, 6, 0]])


def test_programs_are_compiled_once():
    """Everything that changes from step to step is data."""
    compiled = jax.jit(lambda inputs: policy_loss(inputs, LossConfig()).loss)
    for seed in range(3):
        step = packed_step(seed)
        step |= {name: jnp.asarray(value) for name, value in denominators(step).items()}
        compiled(single(step))
    assert compiled._cache_size() == 1


@pytest.mark.parametrize(
    "spoil",
    [
        {"loss_mask_BT": np.ones((4, 16), np.float32)},
        {"logprobs_BT": np.zeros((4, 15))},
        {"advantages_BT": np.zeros((4, 16), int)},
        {"sequence_ids_BT": np.zeros((4, 16))},
        {"old_logprobs_BT": np.zeros(4)},
        {"num_loss_tokens": np.ones(1)},
    ],
    ids=lambda spoil: next(iter(spoil)),
)
def test_malformed_inputs_are_refused(spoil):
    with pytest.raises(AssertionError):
        policy_loss(single(packed_step(seed=0) | spoil), LossConfig())


def test_what_an_option_needs():
    inputs = single(packed_step(seed=0) | {"ref_logprobs_BT": None})
    with pytest.raises(ValueError, match="ref_logprobs_BT"):
        policy_loss(inputs, LossConfig(), kl_coef=0.1)
    with pytest.raises(ValueError, match="constant_length"):
        aggregate(inputs.logprobs_BT, inputs, "constant")
