"""The compiled update against a plain one: no packing, no micro-batches, NumPy's AdamW."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from helpers import VOCABULARY, make_config, tiny_architecture, tiny_model

from sgpo_jax.data.batching import BatchShape, TrainSequence, pack
from sgpo_jax.models.weights import weight_table
from sgpo_jax.training.state import TrainState, initial_state, learning_rate
from sgpo_jax.training.step import TrainStep, _zeros

SHAPE = BatchShape(num_rows=4, row_length=32)


def make_sequences(group_sizes, seed=0):
    rng = np.random.default_rng(seed)
    sequences = []
    for group, size in enumerate(group_sizes):
        prompt_ids = rng.integers(1, VOCABULARY, rng.integers(2, 8))
        for _ in range(size):
            length = int(rng.integers(1, 16))
            sequences.append(
                TrainSequence(
                    prompt_ids_P=prompt_ids,
                    completion_ids_C=rng.integers(1, VOCABULARY, length),
                    sampler_logprobs_C=rng.normal(-2, 0.5, length).astype(np.float32),
                    advantage=float(rng.normal()),
                    group_id=group,
                )
            )
    return sequences


RATE = 1e-3


def make_step(seed=0, **train):
    model = tiny_model(seed, sharpness=5.0)
    config = make_config(train=train, model={"remat": "full"})
    step = TrainStep(model, config)
    return step, initial_state(nnx.state(model), step.optimizer), nnx.graphdef(model)


def plain_loss(graphdef, params, sequences):
    """DAPO with one update: the ratio is 1 and its gradient the log-probability's; one sequence a call, no chunks."""
    total = 0.0
    for s in sequences:
        ids = jnp.asarray([*s.prompt_ids_P, *s.completion_ids_C])[None]
        length = ids.shape[1]
        model = nnx.merge(graphdef, params)
        logits = model.logits(model.hidden(ids, jnp.arange(length)[None], jnp.ones((1, length), jnp.int32)))[0]
        logprobs = jax.nn.log_softmax(logits[:-1], axis=-1)[jnp.arange(length - 1), ids[0, 1:]]
        completion = logprobs[len(s.prompt_ids_P) - 1 :]
        ratio = jnp.exp(completion - jax.lax.stop_gradient(completion))
        total += jnp.sum(jnp.minimum(ratio * s.advantage, jnp.clip(ratio, 0.8, 1.28) * s.advantage))
    return -total / sum(s.num_loss_tokens for s in sequences)


def flat(state):
    return {
        jax.tree_util.keystr(path): np.asarray(x, np.float64) for path, x in jax.tree_util.tree_leaves_with_path(state)
    }


def adamw(params, grads, *, rate, decays, decay=0.1, b1=0.9, b2=0.999, eps=1e-8):
    """The first AdamW update after a clip of the global norm at 1."""
    norm = np.sqrt(sum((g**2).sum() for g in grads.values()))
    scale = min(1.0, 1.0 / norm)
    updated = {}
    for name, value in params.items():
        g = grads[name] * scale
        m, v = (1 - b1) * g / (1 - b1), (1 - b2) * g**2 / (1 - b2)
        updated[name] = value - rate * (m / (np.sqrt(v) + eps) + (decay * value if decays[name] else 0.0))
    return updated, norm


def test_update_equals_the_plain_one():
    step, state, graphdef = make_step()
    sequences = make_sequences([2, 4, 3, 8])
    loss, grads = jax.value_and_grad(lambda p: plain_loss(graphdef, p, sequences))(state.params)
    matrices = {weight.path[-1] for weight in weight_table(tiny_architecture()) if weight.is_matrix}
    params = flat(state.params)
    decays = {name: any(f"'{matrix}'" in name for matrix in matrices) for name in params}
    assert 0 < sum(decays.values()) < len(decays)
    expected, norm = adamw(params, flat(grads), rate=0.01 / 4, decays=decays)

    batches = pack(sequences, SHAPE)
    assert len(batches) > 1, "several micro-batches"
    state, result = step.update(state, batches, 0.01 / 4)
    np.testing.assert_allclose(result.loss, loss, rtol=1e-4)
    np.testing.assert_allclose(result.grad_norm, norm, rtol=1e-4)
    for name, value in flat(state.params).items():
        np.testing.assert_allclose(value, expected[name], atol=2e-5, err_msg=name)
    assert int(state.num_updates) == 1


def test_gradient_is_the_slope_of_the_loss():
    """A finite difference along a random direction, with the ratio's reference held fixed (old log-probs)."""
    step, state, _ = make_step()
    batches = step.old_logprobs(state.params, pack(make_sequences([4, 4], seed=3), BatchShape(12, 32)))
    direction = jax.tree.map(lambda x: jax.random.normal(jax.random.key(x.size), x.shape), state.params)

    def loss_at(distance):
        moved = jax.tree.map(lambda x, d: x + distance * d, state.params, direction)
        total = step._accumulate(_zeros(moved), moved, batches[0])
        return float(total.loss), total.grads

    assert len(batches) == 1
    _, grads = loss_at(0.0)
    slope = sum(jax.tree.leaves(jax.tree.map(lambda g, d: float(jnp.vdot(g, d)), grads, direction)))
    epsilon = 2e-4
    difference = (loss_at(epsilon)[0] - loss_at(-epsilon)[0]) / (2 * epsilon)
    np.testing.assert_allclose(slope, difference, rtol=0.02)


def test_packing_and_splitting_do_not_change_the_gradient():
    sequences = make_sequences([2, 8, 4], seed=1)
    norms, losses = [], []
    for shape in (BatchShape(2, 32), BatchShape(14, 24), BatchShape(3, 96)):
        step, state, _ = make_step()
        _, result = step.update(state, pack(sequences, shape), RATE)
        norms.append(result.grad_norm)
        losses.append(result.loss)
    np.testing.assert_allclose(norms, norms[0], rtol=1e-5)
    np.testing.assert_allclose(losses, losses[0], rtol=1e-4)


def test_one_compilation_serves_every_group_size_and_epoch():
    step, state, _ = make_step()
    compiled = []
    for epoch in range(2):
        for group_size in (2, 4, 8):
            state, _ = step.update(state, pack(make_sequences([group_size] * 5, seed=epoch), SHAPE), RATE)
            compiled.append(step.num_compilations)
    assert compiled == [3] * 6  # zeros, accumulate, apply


def test_an_argument_of_another_shape_is_refused_not_compiled():
    step, state, _ = make_step()
    state, _ = step.update(state, pack(make_sequences([2]), SHAPE), RATE)
    with pytest.raises(TypeError):
        step.update(state, pack(make_sequences([2]), BatchShape(2, 32)), RATE)


@pytest.mark.parametrize("poison", ["advantage", "sampler"])
def test_update_that_is_not_finite_changes_nothing(poison):
    step, state, _ = make_step(loss={"sampler_weight_cap": 2.0})
    state, _ = step.update(state, pack(make_sequences([4, 4]), SHAPE), RATE)
    before = jax.tree.map(np.array, state)
    sequences = make_sequences([4, 4], seed=2)
    bad = sequences[0]
    values = (
        {"advantage": float("nan")}
        if poison == "advantage"
        else {"sampler_logprobs_C": bad.sampler_logprobs_C * np.nan}
    )
    sequences[0] = TrainSequence(**{**{f: getattr(bad, f) for f in bad.__dataclass_fields__}, **values})
    state, result = step.update(state, pack(sequences, SHAPE), RATE)
    assert not result.is_finite
    jax.tree.map(np.testing.assert_array_equal, before, state)
    state, result = step.update(state, pack(make_sequences([4, 4]), SHAPE), RATE)
    assert result.is_finite
    assert int(state.num_updates) == 2


def test_several_updates_use_the_policy_before_the_first():
    step, state, _ = make_step()
    batches = step.old_logprobs(state.params, pack(make_sequences([8]), SHAPE))
    state, first = step.update(state, batches, 0.05)
    state, second = step.update(state, batches, 0.05)
    num_tokens = int(first.metrics.num_tokens)
    np.testing.assert_allclose(first.metrics.ratio_sum / num_tokens, 1.0, atol=1e-5)
    assert abs(float(second.metrics.ratio_sum) / num_tokens - 1) > 1e-3


def test_learning_rate_rises_then_stays_or_falls():
    optimizer = make_config(train={"optimizer": {"learning_rate": 2.0, "warmup_steps": 4}}).train.optimizer
    rates = [learning_rate(optimizer, i, progress=0.5) for i in (0, 1, 3, 4, 50)]
    np.testing.assert_allclose(rates, [0.5, 1, 2, 2, 2], rtol=1e-6)
    linear = optimizer.model_copy(update={"schedule": "linear", "final_frac": 0.1})
    rates = [learning_rate(linear, i, progress) for i, progress in ((1, 0.1), (30, 0.5), (30, 1.0))]
    np.testing.assert_allclose(rates, [0.91, 1.1, 0.2], rtol=1e-6)
    assert learning_rate(optimizer.model_copy(update={"warmup_steps": 0}), 0, 0.1) == 2.0


def test_state_is_a_pytree():
    _, state, _ = make_step()
    assert isinstance(jax.tree.map(lambda x: x, state), TrainState)
