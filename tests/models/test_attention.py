"""Every implementation of attention against one query at a time, in float64; and which of them a machine gets.

Here are no GPU and no TPU. splash runs in Pallas' interpreter. What cudnn and tokamax are called with is computed by
XLA instead, which shows the call right, not the kernel; that a kernel is called, the lowered program shows.
tools/gpu_smoke.py compares the kernels themselves, on a GPU.
"""

import sys
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from helpers import tiny_architecture
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.experimental.pallas.ops.tpu import splash_attention

from sgpo_jax.models.attention import attention, choose_attention, packed_attention, packed_causal_mask
from sgpo_jax.models.qwen import Transformer, prefill, token_logprobs
from sgpo_jax.types import UserError

CUDNN = "jax._src.cudnn.fused_attention_stablehlo"
SEGMENTS_BT = np.array(
    [[1, 1, 1, 1, 1, 2, 2, 3, 3, 3, 0, 0], [0, 0, 1, 1, 1, 1, 1, 1, 1, 1, 1, 0], [0] * 12]  # the last row: nothing
)


@pytest.fixture(params=["plain", "cudnn", "tokamax", "splash"])
def implementation(request, monkeypatch):
    """The name of an implementation that runs on CPUs now, in float32."""
    by_xla = {"implementation": "xla"}
    if request.param == "cudnn":
        whole = jax.nn.dot_product_attention
        monkeypatch.setattr(jax.nn, "dot_product_attention", lambda *args, **options: whole(*args, **options | by_xla))
    if request.param == "tokamax":
        tokamax = pytest.importorskip("tokamax", reason="the extra tokamax is not installed")
        whole = tokamax.dot_product_attention
        monkeypatch.setattr(tokamax, "dot_product_attention", lambda *args, **options: whole(*args, **options | by_xla))
    if request.param == "splash":
        interpreted = partial(splash_attention.make_splash_mha, interpret=True)
        monkeypatch.setattr(splash_attention, "make_splash_mha", interpreted)
    return request.param


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


def may_see(segments_BT: np.ndarray) -> np.ndarray:
    """bool [B, T, S], from the rule."""
    visible = np.zeros((*segments_BT.shape, segments_BT.shape[1]), bool)
    for b, t, s in np.ndindex(visible.shape):
        visible[b, t, s] = s <= t and segments_BT[b][s] == segments_BT[b][t]
    return visible


def draw_heads(num_heads: int = 4, num_kv_heads: int = 2, head_dim: int = 8) -> list[jax.Array]:
    rng = np.random.default_rng(0)
    counts = num_heads, num_kv_heads, num_kv_heads
    return [jnp.asarray(rng.normal(size=(*SEGMENTS_BT.shape, n, head_dim)), jnp.float32) for n in counts]


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
def test_mask_is_causal_within_segments(segments):
    np.testing.assert_array_equal(packed_causal_mask(jnp.asarray(segments)), may_see(np.array(segments)))


def test_packed_rows_are_exact(implementation):
    """Values against the oracle, gradients against the plain implementation's."""
    heads = draw_heads()
    is_token_BT = SEGMENTS_BT > 0

    def total(name, *heads):
        y_BTNH = packed_attention(name, jnp.asarray(SEGMENTS_BT))(*heads)
        return jnp.sum(jnp.sin(y_BTNH) * is_token_BT[:, :, None, None]), y_BTNH

    value_and_grad = jax.value_and_grad(total, argnums=(1, 2, 3), has_aux=True)
    (_, found_BTNH), gradient = jax.jit(partial(value_and_grad, implementation))(*heads)
    wanted_BTNH = attention_float64(*(np.asarray(x, np.float64) for x in heads), may_see(SEGMENTS_BT))
    np.testing.assert_allclose(found_BTNH[is_token_BT], wanted_BTNH[is_token_BT], atol=1e-5)
    assert np.isfinite(found_BTNH).all()
    for ours, plain in zip(gradient, value_and_grad("plain", *heads)[1], strict=True):
        np.testing.assert_allclose(ours, plain, atol=1e-5)


def test_gradients_show_that_no_token_sees_the_future_or_another_segment(implementation):
    """The derivative of one token's output by every key and value is zero, exactly, but where it may look."""
    q, k, v = draw_heads()

    def output(kv, token):
        y_BTNH = packed_attention(implementation, jnp.asarray(SEGMENTS_BT))(q, *kv)
        return jnp.sum(jnp.sin(3 * y_BTNH[:, token]))

    gradient_of = jax.jit(jax.grad(output))
    for token in range(SEGMENTS_BT.shape[1]):
        reads_key_BT, reads_value_BT = (
            np.abs(np.asarray(gradient_BTKH)).max(axis=(2, 3)) > 0 for gradient_BTKH in gradient_of((k, v), token)
        )
        may_see_BT = may_see(SEGMENTS_BT)[:, token]
        np.testing.assert_array_equal(reads_value_BT, may_see_BT)
        assert not (reads_key_BT & ~may_see_BT).any()
        is_alone_B = may_see_BT.sum(axis=1) == 1  # gives its key the weight 1, whatever the key is, but for rounding
        np.testing.assert_array_equal(reads_key_BT[~is_alone_B], may_see_BT[~is_alone_B])


@pytest.mark.parametrize("implementation", ["cudnn", "tokamax", "splash"], indirect=True)
def test_models_compute_the_same_with_every_implementation(implementation):
    """Through layers that are scanned and recomputed: log-probs, their gradient, and prefill."""
    batch = (SEGMENTS_BT * 3 + 1, np.tile(np.arange(12), (3, 1)), SEGMENTS_BT)
    graphdef, params = nnx.split(Transformer(tiny_architecture(), rngs=nnx.Rngs(0), remat="full"))

    def everything(name):
        def loss(params):
            model = nnx.merge(graphdef, params)
            model.attention = name
            found = token_logprobs(model, *batch, temperature=1.0, chunk_tokens=8)
            cache = prefill(model, batch[0], np.array([12, 7, 1]))
            seen = (np.arange(12) < np.array([[12], [7], [1]]))[None, :, :, None, None]
            return jnp.sum(found.logprobs_BT), (found, [x * seen for x in cache])

        return jax.jit(jax.value_and_grad(loss, has_aux=True))(params)

    ours, plain = everything(implementation), everything("plain")
    for one, other in zip(jax.tree.leaves(ours), jax.tree.leaves(plain), strict=True):
        np.testing.assert_allclose(one, other, atol=1e-5 * max(1.0, float(jnp.abs(other).max())))


def gradient_program(name: str) -> jax.stages.Traced:
    """Of shapes as in training."""

    def total(q, k, v, segment_ids):
        return jnp.sum(packed_attention(name, segment_ids)(q, k, v).astype(jnp.float32))

    q, kv = (jax.ShapeDtypeStruct((3, 256, count, 64), jnp.bfloat16) for count in (4, 2))
    segment_ids = jax.ShapeDtypeStruct((3, 256), jnp.int32)
    return jax.jit(jax.grad(total, argnums=(0, 1, 2))).trace(q, kv, kv, segment_ids)


def test_cudnn_is_what_runs_on_cuda(monkeypatch):
    monkeypatch.setattr(f"{CUDNN}.check_cudnn_version", lambda: 91000)
    text = gradient_program("cudnn").lower(lowering_platforms=("cuda",)).as_text()
    forward, backward = (line for line in text.splitlines() if "__cudnn$fmha" in line)
    assert "fmhaScaleBiasSoftmaxBackward" in backward
    for line in forward, backward:
        assert r"\22mask_type\22: \22CAUSAL\22" in line or '"mask_type": "CAUSAL"' in line
        assert r"\22fmha_scale\22: 0.125" in line or '"fmha_scale": 0.125' in line
        assert "tensor<3x1x256x256xbf16>" in line  # one mask for all heads
        assert "3x4x256x256" not in line.split("operand_layouts")[1]  # never the scores


def test_tokamax_is_asked_for_a_kernel(monkeypatch):
    tokamax = pytest.importorskip("tokamax", reason="the extra tokamax is not installed")
    whole = tokamax.dot_product_attention
    triton = {"implementation": "triton"}  # the one of the two that needs no device to ask
    monkeypatch.setattr(tokamax, "dot_product_attention", lambda *args, **options: whole(*args, **options | triton))
    with tokamax.config.cross_compile(True):
        text = str(gradient_program("tokamax").jaxpr)
    assert text.count("= pallas_call[") == 2  # forward and backward
    assert "[3,4,256,256]" not in text  # never the scores


def choose(wanted="auto", dtype="bfloat16", **changes):
    return choose_attention(wanted, tiny_architecture(**changes), dtype)


def test_a_cpu_computes_plainly_and_refuses_the_rest():
    assert choose().implementation == choose("plain").implementation == "plain"
    assert choose().reason == "auto, on cpu"
    for name, needs in (("cudnn", "an NVIDIA GPU"), ("tokamax", "an NVIDIA GPU"), ("splash", "a TPU")):
        with pytest.raises(UserError, match=rf"^model\.attention={name} cannot run here: JAX runs on cpu; .*{needs}.*"):
            choose(name)


def test_auto_is_cudnn_on_gpus_where_it_takes_the_model(monkeypatch):
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    assert choose().implementation == "plain"
    assert "cudnn cannot: cuDNN is not detected; cudnn needs" in choose().reason
    monkeypatch.setattr(f"{CUDNN}.check_cudnn_version", lambda: 91000)
    assert choose().implementation == "cudnn"
    for refused, words in (({"dtype": "float32"}, "dtype"), ({"head_dim": 12}, "multiple of 8")):
        choice = choose(**refused)
        assert choice.implementation == "plain"
        assert "cudnn cannot:" in choice.reason
        assert words in choice.reason
        with pytest.raises(UserError, match=rf"model\.attention=cudnn .*{words}.*takes plain here"):
            choose("cudnn", **refused)


def test_tokamax_is_asked_for_by_name_and_must_be_installed(monkeypatch):
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setitem(sys.modules, "tokamax", None)
    with pytest.raises(UserError, match=r"tokamax .*pip install 'sgpo-jax\[tokamax\]'"):
        choose("tokamax")


def test_auto_is_splash_on_tpus(monkeypatch):
    monkeypatch.setattr(jax, "default_backend", lambda: "tpu")
    assert choose().implementation == choose(dtype="float32", head_dim=64).implementation == "splash"
