"""Chunked log-probabilities against the plain way: all logits at once, from NumPy in float64."""

import jax
import jax.extend
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from helpers import tiny_architecture, tiny_model

from sgpo_jax.models.qwen import Transformer, token_logprobs

TOKENS_BT = np.random.default_rng(0).integers(1, 16, (3, 11)).astype(np.int32)
SEGMENTS_BT = np.array([[1] * 11, [0] * 3 + [1] * 8, [1] * 4 + [2] * 5 + [0] * 2])
POSITIONS_BT = np.array([list(range(11)), [0] * 3 + list(range(8)), [*range(4), *range(5), 0, 0]])
ROWS = (TOKENS_BT, POSITIONS_BT, SEGMENTS_BT)


def plain_float64(model: Transformer, temperature: float) -> tuple[np.ndarray, np.ndarray]:
    logits_BTV = np.asarray(model.logits(model.hidden(*ROWS)), np.float64) / temperature
    logprobs_BTV = logits_BTV - np.log(np.exp(logits_BTV).sum(-1, keepdims=True))
    logprobs_BT, entropy_BT = np.zeros(TOKENS_BT.shape), np.zeros(TOKENS_BT.shape)
    for b, t in np.ndindex(TOKENS_BT.shape):
        if t > 0 and SEGMENTS_BT[b, t] > 0 and SEGMENTS_BT[b, t] == SEGMENTS_BT[b, t - 1]:
            logprobs_BT[b, t] = logprobs_BTV[b, t - 1, TOKENS_BT[b, t]]
            entropy_BT[b, t] = -np.sum(np.exp(logprobs_BTV[b, t - 1]) * logprobs_BTV[b, t - 1])
    return logprobs_BT, entropy_BT


def plain_loss(model: Transformer, weights_BT: jax.Array, temperature: float) -> jax.Array:
    logprobs_BTV = jax.nn.log_softmax(model.logits(model.hidden(*ROWS)) / temperature)[:, :-1]
    chosen_BT = jnp.take_along_axis(logprobs_BTV, TOKENS_BT[:, 1:, None], -1)[..., 0]
    entropy_BT = -jnp.sum(jnp.exp(logprobs_BTV) * logprobs_BTV, -1)
    inside_BT = (SEGMENTS_BT[:, 1:] == SEGMENTS_BT[:, :-1]) & (SEGMENTS_BT[:, 1:] > 0)
    return jnp.sum(inside_BT * (weights_BT[:, 1:] * chosen_BT + 0.3 * entropy_BT))


def chunked_loss(model: Transformer, weights_BT: jax.Array, temperature: float, chunk_tokens: int = 9) -> jax.Array:
    found = token_logprobs(model, *ROWS, temperature=temperature, chunk_tokens=chunk_tokens)
    return jnp.sum(weights_BT * found.logprobs_BT + 0.3 * found.entropy_BT)


@pytest.mark.parametrize("chunk_tokens", [1, 7, 12, 33, 10_000])
def test_equals_the_plain_way_for_any_chunk(chunk_tokens):
    model = tiny_model()
    found = token_logprobs(model, *ROWS, temperature=0.7, chunk_tokens=chunk_tokens)
    logprobs_BT, entropy_BT = plain_float64(model, temperature=0.7)
    assert np.ptp(logprobs_BT) > 1
    np.testing.assert_allclose(found.logprobs_BT, logprobs_BT, atol=1e-5)
    np.testing.assert_allclose(found.entropy_BT, entropy_BT, atol=1e-5)


def test_first_tokens_and_padding_are_exactly_zero():
    found = token_logprobs(tiny_model(), *ROWS, temperature=1.0, chunk_tokens=8)
    for values_BT in found:
        is_zero = np.asarray(values_BT) == 0
        np.testing.assert_array_equal(is_zero[0], [True] + [False] * 10)
        np.testing.assert_array_equal(is_zero[1], [True] * 4 + [False] * 7)
        np.testing.assert_array_equal(is_zero[2], [True] + [False] * 3 + [True] + [False] * 4 + [True] * 2)


@pytest.mark.parametrize("remat", ["none", "dots", "full"])
def test_gradients_equal_the_plain_way_under_every_remat(remat):
    graphdef, params = nnx.split(tiny_model())
    variant = nnx.merge(graphdef, params)
    variant.remat = remat
    weights_BT = jnp.asarray(np.random.default_rng(1).normal(size=TOKENS_BT.shape), jnp.float32)
    wanted = jax.jit(jax.grad(plain_loss))(nnx.merge(graphdef, params), weights_BT, 1.3)
    found = jax.jit(jax.grad(chunked_loss))(variant, weights_BT, 1.3)
    for ours, plain in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        scale = float(jnp.abs(plain).max())
        assert scale > 0
        np.testing.assert_allclose(ours, plain, atol=1e-5 * max(1.0, scale))


def saved_bytes(remat: str) -> int:
    """What the forward pass keeps for the backward pass, weights left out."""
    model = tiny_model()
    model.remat = remat
    graphdef, params = nnx.split(model)
    residuals = jax.eval_shape(lambda p: jax.vjp(lambda p: nnx.merge(graphdef, p).hidden(*ROWS), p)[1], params)
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(residuals))


def test_each_remat_keeps_less_than_the_one_before():
    assert saved_bytes("full") < saved_bytes("dots") < saved_bytes("none")


@pytest.mark.parametrize(("chunk_tokens", "held"), [(9, 9), (1, 3)])  # of 3 rows; a chunk has tokens of each
def test_no_array_of_all_logits_in_float32_is_ever_made(chunk_tokens, held):
    """Neither in the value nor in the gradient: the largest array with a vocabulary axis is one chunk or a weight."""
    vocab = 61  # no other dimension is as large
    graphdef, params = nnx.split(Transformer(tiny_architecture(vocab_size=vocab), rngs=nnx.Rngs(0)))
    weights_BT = jnp.ones(TOKENS_BT.shape)
    jaxpr = jax.make_jaxpr(jax.grad(lambda p: chunked_loss(nnx.merge(graphdef, p), weights_BT, 1.0, chunk_tokens)))(
        params
    )
    shapes = {shape for shape in _shapes(jaxpr.jaxpr) if vocab in shape}
    assert (held, vocab) in shapes
    model_dim = 32  # what has it as well is a weight or its gradient
    assert max(np.prod(shape) for shape in shapes if model_dim not in shape) == held * vocab


def _shapes(jaxpr):
    for equation in jaxpr.eqns:
        yield from (variable.aval.shape for variable in equation.outvars)
        for inner in jax.extend.core.jaxprs_in_params(equation.params):
            yield from _shapes(inner)
