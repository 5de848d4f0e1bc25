"""One token from a row of logits: greedy, or by the inverse of the cumulative distribution, whole or top-p."""

from typing import NamedTuple

import jax
import jax.numpy as jnp

_BLOCK = 512  # the cumulative sum runs over blocks, then inside one: cheap and precise for 152 k tokens


class SampledTokens(NamedTuple):
    """token_ids_B: int32. logprobs_B: float32, at the sampling temperature (greedy: 1), before any top-p cut."""

    token_ids_B: jax.Array
    logprobs_B: jax.Array


def sample_tokens(
    logits_BV: jax.Array, uniforms_B: jax.Array, *, temperature: jax.Array | float, top_p: float, greedy: bool
) -> SampledTokens:
    """Draw one token a row.

    logits_BV: float32. uniforms_B: float32 in [0, 1), one a row, all the randomness there is.
    top_p and greedy are static; top_p = 1 keeps the whole distribution and costs nothing.
    """
    scaled_BV = logits_BV if greedy else logits_BV / temperature
    logprobs_BV = jax.nn.log_softmax(scaled_BV, axis=-1)
    if greedy:
        token_ids_B = jnp.argmax(logits_BV, axis=-1)
    else:
        probs_BV = jnp.exp(logprobs_BV)
        if top_p < 1.0:
            probs_BV = keep_top_p(probs_BV, top_p)
        token_ids_B = jax.vmap(_inverse_cdf)(probs_BV, uniforms_B)
    logprobs_B = jnp.take_along_axis(logprobs_BV, token_ids_B[:, None], axis=-1)[:, 0]
    return SampledTokens(token_ids_B.astype(jnp.int32), logprobs_B)


def keep_top_p(probs_BV: jax.Array, top_p: float) -> jax.Array:
    """Zero all but the nucleus: the most probable tokens whose mass reaches top_p (arXiv 1904.09751, section 3.1).

    Tokens as probable as the last one kept are kept too. No sort: the smallest kept probability is found by bisection
    over the bits of a non-negative float32, whose order is that of its values: exact after 31 halvings.
    """
    bits_BV = jax.lax.bitcast_convert_type(probs_BV, jnp.int32)

    def halve(_: int, bounds: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        low_B, high_B = bounds  # the mass at or above low reaches top_p, that at or above high does not
        middle_B = low_B + (high_B - low_B) // 2
        mass_B = jnp.sum(jnp.where(bits_BV >= middle_B[:, None], probs_BV, 0.0), axis=-1)
        reaches_B = mass_B >= top_p
        return jnp.where(reaches_B, middle_B, low_B), jnp.where(reaches_B, high_B, middle_B)

    lowest_B = jnp.zeros(probs_BV.shape[0], jnp.int32)
    above_one_B = jnp.full_like(lowest_B, 0x40000000)  # the bits of 2.0
    threshold_B, _ = jax.lax.fori_loop(0, 31, halve, (lowest_B, above_one_B))
    return jnp.where(bits_BV >= threshold_B[:, None], probs_BV, 0.0)


def _inverse_cdf(probs_V: jax.Array, uniform: jax.Array) -> jax.Array:
    blocks = jnp.pad(probs_V, (0, -probs_V.size % _BLOCK)).reshape(-1, _BLOCK)
    block_cdf = jnp.cumsum(jnp.sum(blocks, axis=-1))
    target = uniform * block_cdf[-1]
    block = _first_above(block_cdf, target)
    before = jnp.where(block > 0, block_cdf[block - 1], 0.0)
    return block * _BLOCK + _first_above(jnp.cumsum(blocks[block]), jnp.maximum(target - before, 0.0))


def _first_above(cdf: jax.Array, target: jax.Array) -> jax.Array:
    """First index whose cumulative sum exceeds target; rounding never leads past the last one with any mass."""
    return jnp.argmax(cdf > jnp.minimum(target, jnp.nextafter(cdf[-1], 0.0)))
