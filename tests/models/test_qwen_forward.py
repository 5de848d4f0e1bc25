"""The forward pass against transformers: its recorded logits, and live where torch is installed."""

import importlib.util
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from sgpo_jax.models.architecture import read_architecture
from sgpo_jax.models.qwen import Transformer, decode_step, empty_cache, from_bits, prefill
from sgpo_jax.models.safetensors import export_model, load_model

FIXTURES = Path(__file__).parent.parent / "fixtures" / "models"
MODELS = sorted(path.name for path in FIXTURES.iterdir())


def load(name: str, **options) -> Transformer:
    return load_model(FIXTURES / name, **{"compute_dtype": "float32", "remat": "none", **options})


def reference(name: str) -> dict[str, np.ndarray]:
    return dict(np.load(FIXTURES / name / "reference.npz"))


@jax.jit
def logits_of(model: Transformer, token_ids_BT, positions_BT, segment_ids_BT):
    return model.logits(model.hidden(token_ids_BT, positions_BT, segment_ids_BT))


def forward(model: Transformer, token_ids_BT: np.ndarray, mask_BT: np.ndarray) -> np.ndarray:
    """Logits of rows whose tokens are where the mask is set, counted from there."""
    positions_BT = np.maximum(np.cumsum(mask_BT, axis=1) - 1, 0)
    return np.asarray(logits_of(model, token_ids_BT, positions_BT, mask_BT.astype(np.int32)))


def test_fixtures_cover_every_family_and_feature():
    architectures = [read_architecture(FIXTURES / name) for name in MODELS]
    assert {arch.family for arch in architectures} == {"qwen2", "qwen3", "llama"}
    for feature in ("tie_embeddings", "qkv_bias", "output_bias", "qk_norm"):
        assert {getattr(arch, feature) for arch in architectures} == {True, False}
    assert any(arch.head_dim * arch.num_heads != arch.model_dim for arch in architectures)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("padding", ["whole", "right", "left"])
def test_logits_equal_recorded_ones_of_transformers(name, padding):
    recorded = reference(name)
    mask_BT = recorded.get(f"{padding}_mask", np.ones((2, 10), bool))
    logits_BTV = forward(load(name), recorded["token_ids"], mask_BT)
    difference = np.abs(logits_BTV - recorded[f"{padding}_logits"])[mask_BT]
    assert np.abs(recorded[f"{padding}_logits"]).max() > 1
    assert difference.max() < 1e-4


@pytest.mark.parametrize("name", MODELS)
def test_bfloat16_compute_stays_near_float32(name):
    recorded = reference(name)
    logits_BTV = forward(load(name, compute_dtype="bfloat16"), recorded["token_ids"], np.ones((2, 10), bool))
    assert logits_BTV.dtype == np.float32
    scale = np.abs(recorded["whole_logits"]).max()
    assert 0 < np.abs(logits_BTV - recorded["whole_logits"]).max() < 0.05 * scale


@pytest.mark.parametrize("name", MODELS)
def test_two_packed_segments_equal_two_rows(name):
    model, ids_BT = load(name), reference(name)["token_ids"]
    apart_BTV = forward(model, ids_BT, np.ones((2, 10), bool))
    packed_1T = np.concatenate([ids_BT[0], ids_BT[1], [0, 0, 0]])[None]
    positions_1T = np.concatenate([np.arange(10), np.arange(10), [0, 0, 0]])[None]
    segments_1T = np.repeat([1, 2, 0], [10, 10, 3])[None]
    packed_TV = logits_of(model, packed_1T, positions_1T, segments_1T)[0]
    np.testing.assert_allclose(packed_TV[:20].reshape(apart_BTV.shape), apart_BTV, atol=1e-5)


@pytest.mark.parametrize("name", MODELS)
def test_cached_decode_equals_full_forward(name):
    """Prompts of different lengths side by side, each slot at its own position."""
    model, ids_BT = load(name), reference(name)["token_ids"]
    full_BTV = forward(model, ids_BT, np.ones((2, 10), bool))
    lengths_B = np.array([4, 2])
    prompts_BP = np.where(np.arange(4) < lengths_B[:, None], ids_BT[:, :4], 0)
    cache = empty_cache(model.arch, 2, 10, jnp.float32)
    prompts = prefill(model, prompts_BP, lengths_B)
    cache = jax.tree.map(lambda whole, part: whole.at[:, :, :4].set(part), cache, prompts)
    step = jax.jit(decode_step)
    for ahead in range(6):
        positions_B = lengths_B - 1 + ahead  # the last prompt token goes through the first step
        logits_BV, cache = step(model, cache, ids_BT[[0, 1], positions_B], positions_B)
        np.testing.assert_allclose(logits_BV, full_BTV[[0, 1], positions_B], atol=1e-5)


def test_decode_ignores_what_an_earlier_occupant_left():
    model, ids_BT = load("qwen3"), reference("qwen3")["token_ids"]
    fresh = empty_cache(model.arch, 2, 10, jnp.float32)
    stale = jax.tree.map(lambda x: x + 3.0, fresh)
    positions_B = np.zeros(2, np.int32)
    logits_BV, _ = decode_step(model, fresh, ids_BT[:, 0], positions_B)
    stale_logits_BV, written = decode_step(model, stale, ids_BT[:, 0], positions_B)
    np.testing.assert_array_equal(logits_BV, stale_logits_BV)
    assert (np.asarray(written.keys_LBSKH[:, :, 1:]) == 3.0).all()  # nothing else was touched


def test_bfloat16_decode_writes_the_cache_that_prefill_writes():
    model, ids_BT = load("qwen2_tied", compute_dtype="bfloat16"), reference("qwen2_tied")["token_ids"]
    whole = prefill(model, ids_BT, np.array([10, 10]))
    cache = empty_cache(model.arch, 2, 10, jnp.bfloat16)
    step = jax.jit(decode_step)
    for position in range(10):
        _, cache = step(model, cache, ids_BT[:, position], np.full(2, position))
    for decoded, prefilled in zip(cache, whole, strict=True):
        assert decoded.dtype == prefilled.dtype == jnp.uint16
        np.testing.assert_allclose(*(from_bits(x).astype(np.float32) for x in (decoded, prefilled)), atol=0.1)


def test_gradients_show_that_no_token_sees_the_future_or_another_segment():
    """The derivative of one token's activations by every token's embedding is non-zero exactly where it may look."""
    model = load("qwen3")
    graphdef, params = nnx.split(model)
    table_VD = params["embedding"][...]
    num_tokens = 8
    positions_1T = np.array([[0, 1, 2, 3, 0, 1, 2, 0]])
    segments_1T = np.array([[1, 1, 1, 1, 2, 2, 2, 0]])

    def activation(embeddings_TD: jax.Array, token: int) -> jax.Array:
        # Every token has an embedding row of its own.
        params["embedding"] = params["embedding"].replace(table_VD.at[:num_tokens].set(embeddings_TD))
        hidden = nnx.merge(graphdef, params).hidden(np.arange(num_tokens)[None], positions_1T, segments_1T)
        return jnp.sum(jnp.sin(3 * hidden[0, token]))

    gradient_of = jax.jit(jax.grad(activation))
    for token in range(7):
        gradient_TD = gradient_of(table_VD[:num_tokens], token)
        sees = np.asarray(jnp.abs(gradient_TD).max(axis=1) > 0)
        may_see = (segments_1T[0] == segments_1T[0, token]) & (np.arange(num_tokens) <= token)
        np.testing.assert_array_equal(sees, may_see)


def test_padding_is_never_nan():
    logits_BTV = forward(load("qwen3"), np.zeros((2, 10), np.int32), np.zeros((2, 10), bool))
    assert np.isfinite(logits_BTV).all()


@pytest.mark.parametrize("name", MODELS)
def test_export_gives_transformers_the_same_logits(name, tmp_path):
    for module in ("torch", "transformers"):
        if importlib.util.find_spec(module) is None:
            pytest.skip(f"LIVE COMPARISON NOT RUN: {module} is not installed")
    import torch
    from transformers import AutoModelForCausalLM

    model, ids_BT = load(name), reference(name)["token_ids"]
    export_model(model, model.arch, FIXTURES / name, tmp_path / "out", dtype="float32", max_shard_bytes=20_000)
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32)
    with torch.no_grad():
        theirs_BTV = theirs(torch.tensor(ids_BT, dtype=torch.long)).logits.numpy()
    np.testing.assert_allclose(forward(model, ids_BT, np.ones((2, 10), bool)), theirs_BTV, atol=1e-4)
