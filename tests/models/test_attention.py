import jax.numpy as jnp
import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from sgpo_jax.models.attention import attention, packed_causal_mask


def attention_float64(q_BTNH, k_BSKH, v_BSKH, mask_BTS):
    """One query, one head at a time."""
    result = np.zeros(q_BTNH.shape)
    queries_per_key = q_BTNH.shape[2] // k_BSKH.shape[2]
    for b, t, n in np.ndindex(q_BTNH.shape[:3]):
        visible = mask_BTS[b, t]
        scores = k_BSKH[b, visible, n // queries_per_key] @ q_BTNH[b, t, n] / np.sqrt(q_BTNH.shape[3])
        weights = np.exp(scores - scores.max())
        result[b, t, n] = weights @ v_BSKH[b, visible, n // queries_per_key] / weights.sum()
    return result


@settings(max_examples=8, deadline=None)
@given(st.integers(0, 2**16), st.sampled_from([(1, 1), (4, 2), (6, 2), (3, 3)]), st.sampled_from([(1, 5), (4, 4)]))
def test_equals_one_query_at_a_time(seed, heads, tokens):
    rng = np.random.default_rng(seed)
    (num_heads, num_kv_heads), (num_queries, num_keys) = heads, tokens
    q = rng.normal(size=(2, num_queries, num_heads, 4))
    k, v = rng.normal(size=(2, 2, num_keys, num_kv_heads, 4))
    mask = rng.random((2, num_queries, num_keys)) < 0.6
    mask[:, :, 0] = True
    found = attention(*(jnp.asarray(x, jnp.float32) for x in (q, k, v)), jnp.asarray(mask))
    np.testing.assert_allclose(found, attention_float64(q, k, v, mask), atol=1e-5)


def test_large_scores_and_blind_queries_stay_finite():
    q = jnp.full((1, 2, 1, 4), 1e4)
    mask = jnp.array([[[True, False], [False, False]]])
    found = attention(q, q, jnp.arange(8.0).reshape(1, 2, 1, 4), mask)
    np.testing.assert_array_equal(found[0, 0, 0], [0, 1, 2, 3])
    assert np.isfinite(found).all()


@settings(max_examples=20, deadline=None)
@given(st.lists(st.lists(st.integers(0, 3), min_size=6, max_size=6), min_size=1, max_size=3))
def test_mask_is_causal_within_segments_and_blind_to_padding(segments):
    mask_BTT = np.asarray(packed_causal_mask(jnp.asarray(segments)))
    for b, t, s in np.ndindex(mask_BTT.shape):
        assert mask_BTT[b, t, s] == (s <= t and segments[b][s] == segments[b][t] and segments[b][s] > 0)
