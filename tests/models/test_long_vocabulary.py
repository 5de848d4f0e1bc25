"""A real model's vocabulary, 152 k tokens: log-probs, entropy and gradients equal the plain way's, in little memory."""

import math

import jax
import jax.extend
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from helpers import tiny_architecture

from sgpo_jax.models.qwen import Transformer, token_logprobs

VOCABULARY = 152_064  # of Qwen2.5-7B
ROWS, TOKENS, CHUNK = 2, 48, 4
RNG = np.random.default_rng(0)
TOKENS_BT = RNG.integers(0, VOCABULARY, (ROWS, TOKENS)).astype(np.int32)
SEGMENTS_BT = np.repeat([[1, 2], [1, 0]], TOKENS // 2, axis=1)
POSITIONS_BT = np.tile(np.arange(TOKENS // 2), (ROWS, 2))
BATCH = (TOKENS_BT, POSITIONS_BT, SEGMENTS_BT)
WEIGHTS_BT = RNG.normal(size=(ROWS, TOKENS)).astype(np.float32)


@pytest.fixture(scope="module")
def split_model():
    arch = tiny_architecture(
        vocab_size=VOCABULARY, num_layers=1, model_dim=8, num_heads=1, num_kv_heads=1, mlp_dim=8, tie_embeddings=True
    )
    model = Transformer(arch, rngs=nnx.Rngs(0))
    model.embedding[...] = model.embedding[...] * 50  # far from uniform
    return nnx.split(model)


def chunked(graphdef, params):
    found = token_logprobs(nnx.merge(graphdef, params), *BATCH, temperature=0.8, chunk_tokens=CHUNK)
    return found.logprobs_BT, found.entropy_BT


def plain(graphdef, params):
    """All logits at once, in float32."""
    model = nnx.merge(graphdef, params)
    logprobs_BTV = jax.nn.log_softmax(model.logits(model.hidden(*BATCH))[:, :-1] / 0.8)
    chosen_BT = jnp.take_along_axis(logprobs_BTV, TOKENS_BT[:, 1:, None], -1)[..., 0]
    entropy_BT = -jnp.sum(jnp.exp(logprobs_BTV) * logprobs_BTV, -1)
    inside_BT = (SEGMENTS_BT[:, 1:] == SEGMENTS_BT[:, :-1]) & (SEGMENTS_BT[:, 1:] > 0)
    return tuple(jnp.pad(inside_BT * x, ((0, 0), (1, 0))) for x in (chosen_BT, entropy_BT))


def compiled_gradient(way, graphdef, params):
    def loss(params):
        logprobs_BT, entropy_BT = way(graphdef, params)
        return jnp.sum(WEIGHTS_BT * logprobs_BT + 0.3 * entropy_BT), (logprobs_BT, entropy_BT)

    traced = jax.jit(jax.value_and_grad(loss, has_aux=True)).trace(params)
    return traced.jaxpr, traced.lower().compile()


def test_equals_the_plain_way_in_a_fraction_of_its_memory(split_model):
    graphdef, params = split_model
    jaxpr, program = compiled_gradient(chunked, graphdef, params)
    _, plain_program = compiled_gradient(plain, graphdef, params)
    ((_, found), gradient), ((_, wanted), plain_gradient) = program(params), plain_program(params)
    assert np.ptp(wanted[0]) > 5
    for ours, theirs in zip(jax.tree.leaves((found, gradient)), jax.tree.leaves((wanted, plain_gradient)), strict=True):
        np.testing.assert_allclose(ours, theirs, atol=1e-5 * max(1.0, float(jnp.abs(theirs).max())))

    # No array has B x T x V elements: the largest are the embedding and its gradient, twice a chunk of logits.
    assert max(math.prod(shape) for shape in _shapes(jaxpr.jaxpr)) == VOCABULARY * 8
    all_logits = 4 * ROWS * TOKENS * VOCABULARY  # bytes in float32: 58 MB; measured: 7.4 MB, and the plain way 229 MB
    peak, plain_peak = (one.memory_analysis().temp_size_in_bytes for one in (program, plain_program))
    assert plain_peak > all_logits
    assert peak < all_logits / 4


def _shapes(jaxpr):
    for equation in jaxpr.eqns:
        yield from (variable.aval.shape for variable in equation.outvars)
        for inner in jax.extend.core.jaxprs_in_params(equation.params):
            yield from _shapes(inner)
