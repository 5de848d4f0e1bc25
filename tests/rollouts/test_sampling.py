import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sgpo_jax.rollouts.sampling import keep_top_p, sample_tokens


def nucleus(probs_V: np.ndarray, top_p: float) -> set[int]:
    """Sort, then take the shortest prefix whose mass reaches top_p."""
    order = np.argsort(-probs_V, kind="stable")
    count = int(np.searchsorted(np.cumsum(probs_V[order]), top_p)) + 1
    return set(order[:count].tolist())


@pytest.mark.parametrize("top_p", [0.1, 0.5, 0.7, 0.95])
def test_top_p_keeps_the_same_tokens_as_a_sort(top_p):
    logits_BV = np.random.default_rng(0).normal(scale=3, size=(20, 1000))
    probs_BV = np.exp(logits_BV) / np.exp(logits_BV).sum(-1, keepdims=True)
    kept_BV = np.asarray(keep_top_p(jnp.asarray(probs_BV, jnp.float32), top_p))
    for probs_V, kept_V in zip(probs_BV, kept_BV, strict=True):
        assert set(np.flatnonzero(kept_V).tolist()) == nucleus(probs_V, top_p)


@pytest.mark.parametrize("vocabulary", [5, 512, 1300])
@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_draws_are_the_inverse_of_the_cumulative_distribution(vocabulary, temperature):
    rng = np.random.default_rng(1)
    logits_BV = rng.normal(scale=2, size=(300, vocabulary)).astype(np.float32)
    uniforms_B = rng.uniform(size=300).astype(np.float32)
    drawn = sample_tokens(
        jnp.asarray(logits_BV), jnp.asarray(uniforms_B), temperature=temperature, top_p=1.0, greedy=False
    )
    scaled_BV = logits_BV.astype(np.float64) / temperature
    logprobs_BV = scaled_BV - np.log(np.exp(scaled_BV).sum(-1, keepdims=True))
    cdf_BV = np.cumsum(np.exp(logprobs_BV), axis=-1)
    expected_B = (cdf_BV <= uniforms_B[:, None]).sum(-1)
    margin_B = np.abs(cdf_BV - uniforms_B[:, None]).min(-1)
    safe_B = margin_B > 1e-5  # nearer to a border, float32 may fall on either side
    assert safe_B.mean() > 0.9
    np.testing.assert_array_equal(np.asarray(drawn.token_ids_B)[safe_B], expected_B[safe_B])
    own_B = logprobs_BV[np.arange(300), np.asarray(drawn.token_ids_B)]
    np.testing.assert_allclose(drawn.logprobs_B, own_B, atol=1e-5)


def test_frequencies_are_the_probabilities():
    probs_V = np.array([0.5, 0.25, 0.2, 0.05, 0.0])
    logits_BV = jnp.broadcast_to(jnp.log(jnp.asarray(probs_V, jnp.float32)), (100_000, 5))
    uniforms_B = jax.random.uniform(jax.random.key(0), 100_000)
    drawn = sample_tokens(logits_BV, uniforms_B, temperature=1.0, top_p=1.0, greedy=False)
    frequencies_V = np.bincount(drawn.token_ids_B, minlength=5) / 100_000
    np.testing.assert_allclose(frequencies_V, probs_V, atol=5 * np.sqrt(0.25 / 100_000))
    assert frequencies_V[4] == 0


@pytest.mark.parametrize("uniform", [0.0, np.nextafter(np.float32(1), np.float32(0))])
def test_the_ends_of_the_unit_interval_give_tokens_with_mass(uniform):
    logits_BV = jnp.asarray([[-jnp.inf, 0.0, -1.0, -jnp.inf], [-jnp.inf, -jnp.inf, -jnp.inf, 2.0]], jnp.float32)
    drawn = sample_tokens(logits_BV, jnp.full(2, uniform, jnp.float32), temperature=1.0, top_p=1.0, greedy=False)
    assert np.isfinite(np.asarray(drawn.logprobs_B)).all()


def test_top_p_never_leaves_the_nucleus():
    logits_BV = np.random.default_rng(2).normal(scale=2, size=(1, 600)).astype(np.float32)
    probs_V = np.exp(logits_BV[0].astype(np.float64))
    allowed = nucleus(probs_V / probs_V.sum(), 0.7)
    many_BV = jnp.broadcast_to(jnp.asarray(logits_BV), (5000, 600))
    uniforms_B = jax.random.uniform(jax.random.key(3), 5000)
    drawn = sample_tokens(many_BV, uniforms_B, temperature=1.0, top_p=0.7, greedy=False)
    assert set(np.asarray(drawn.token_ids_B).tolist()) <= allowed


def test_greedy_takes_the_largest_logit_with_its_logprob_at_temperature_one():
    logits_BV = jnp.asarray([[0.0, 3.0, 1.0]], jnp.float32)
    drawn = sample_tokens(logits_BV, jnp.zeros(1), temperature=0.0, top_p=1.0, greedy=True)
    assert drawn.token_ids_B.tolist() == [1]
    np.testing.assert_allclose(drawn.logprobs_B[0], 3 - np.log(np.exp([0, 3, 1]).sum()), rtol=1e-6)
