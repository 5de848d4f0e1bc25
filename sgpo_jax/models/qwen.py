"""A decoder-only transformer of the Qwen2, Qwen3 and Llama families: forward pass, log-probabilities, cached decoding.

Everything is a pure function of (model, arrays), made for jax.jit with nnx.split and nnx.merge around it.
RMS norms, rotary embeddings, softmax and logits are computed in float32, whatever the compute type.
"""

import functools
from collections.abc import Callable
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh, NamedSharding

from sgpo_jax.models.architecture import Architecture
from sgpo_jax.models.attention import Attend, Implementation, attention, packed_attention
from sgpo_jax.models.products import product
from sgpo_jax.models.sharding import constrain, fitting_sharding, num_batch_shards
from sgpo_jax.models.weights import Weight, weight_table, weight_tree

Remat = Literal["none", "dots", "full"]
LayerWeights = dict[str, jax.Array]
LayerBody = Callable[[jax.Array, LayerWeights], tuple[jax.Array, None]]

INIT_STDDEV = 0.02  # of matrices, as the families' initializer_range


class Transformer(nnx.Module):
    """The weights of weights.weight_table, those of all layers stacked under `layers`, and the forward pass.

    rngs: draws fresh weights; None: zeros, for weights that are loaded (see safetensors.load_model).
    param_dtype, compute_dtype: types of the weights, and of activations and matrix products.
    remat: what the backward pass recomputes: nothing, all but matrix products, or everything of a layer.
    attention: what computes it over whole rows; see attention.choose_attention. Decoding is always plain.
    """

    embedding: nnx.Param
    final_norm: nnx.Param
    lm_head: nnx.Param

    def __init__(
        self,
        arch: Architecture,
        *,
        rngs: nnx.Rngs | None,
        param_dtype: jax.typing.DTypeLike = jnp.float32,
        compute_dtype: jax.typing.DTypeLike = jnp.float32,
        remat: Remat = "full",
        attention: Implementation = "plain",
    ) -> None:
        self.arch = arch
        self.compute_dtype = jnp.dtype(compute_dtype)
        self.remat = remat
        self.attention = attention
        self.layers: nnx.Dict[nnx.Param] = nnx.Dict()
        for weight in weight_table(arch):
            *parents, name = weight.path
            module = functools.reduce(getattr, parents, self)
            setattr(module, name, nnx.Param(_initial_value(weight, rngs, param_dtype)))

    def hidden(self, token_ids_BT: jax.Array, positions_BT: jax.Array, segment_ids_BT: jax.Array) -> jax.Array:
        """Activations [B, T, D] after the final norm.

        positions count within a segment. segment_ids: tokens see their own segment only; 0 is padding, whose
        activations mean nothing. Padding may stand left or right.
        """

        def body(x_BTD: jax.Array, weights: LayerWeights) -> tuple[jax.Array, None]:
            return _layer(self.arch, weights, x_BTD, rope, attend)[0], None

        rope = rotary_embedding(positions_BT, self.arch)
        attend = packed_attention(self.attention, segment_ids_BT)
        x_BTD, _ = jax.lax.scan(_rematerialised(body, self.remat), self.embed(token_ids_BT), self.layer_weights())
        return self.normalise(x_BTD)

    def logits(self, hidden: jax.Array) -> jax.Array:
        """Float32 logits [..., V] of activations [..., D]."""
        matrix_VD = self.embedding if self.arch.tie_embeddings else self.lm_head
        logits_XV = product("XD,VD->XV", hidden.reshape(-1, hidden.shape[-1]), matrix_VD[...], jnp.float32)
        return logits_XV.reshape(*hidden.shape[:-1], -1)

    def embed(self, token_ids_BT: jax.Array) -> jax.Array:
        """What enters the first layer, [B, T, D]."""
        x_BTD = self.embedding[...][token_ids_BT].astype(self.compute_dtype)
        return constrain(x_BTD, ("batch", "length", "model"))

    def normalise(self, x_BTD: jax.Array) -> jax.Array:
        """The final norm."""
        return rms_norm(x_BTD, self.final_norm[...], self.arch.rms_norm_eps)

    def layer_weights(self) -> LayerWeights:
        """The stacked weights of all layers, by name."""
        return {name: param[...] for name, param in self.layers.items()}


class TokenLogprobs(NamedTuple):
    """Of each token given those before it in its segment; 0 at a segment's first token and at padding. Float32 [B, T].

    entropy_BT: of the distribution that the token was drawn from, in nats; differentiable.
    """

    logprobs_BT: jax.Array
    entropy_BT: jax.Array


def token_logprobs(
    model: Transformer,
    token_ids_BT: jax.Array,
    positions_BT: jax.Array,
    segment_ids_BT: jax.Array,
    *,
    temperature: float,
    chunk_tokens: int,
) -> TokenLogprobs:
    """log p(token | the ones before it in its segment) at `temperature`; logprobs[b, t] belongs to token_ids[b, t].

    Logits exist for about chunk_tokens tokens of a device at a time (never fewer than one column of the batch), in the
    forward and in the backward pass, which computes them again.
    """
    hidden_BTD = model.hidden(token_ids_BT, positions_BT, segment_ids_BT)
    has_logprob_BT = (segment_ids_BT == _shift_right(segment_ids_BT)) & (segment_ids_BT > 0)
    num_rows, num_tokens = token_ids_BT.shape
    # Chunks are columns of the batch: each then has rows of every device.
    width = min(max(1, chunk_tokens * num_batch_shards() // num_rows), num_tokens)
    chunks = _columns(_shift_right(hidden_BTD), width), _columns(token_ids_BT, width)

    @jax.checkpoint
    def of_chunk(chunk: tuple[jax.Array, jax.Array]) -> TokenLogprobs:
        hidden_BCD, token_ids_BC = chunk
        logits_BCV = constrain(model.logits(hidden_BCD), ("batch", "length", "vocab")) / temperature
        return _logprobs_of(logits_BCV, token_ids_BC)

    found = jax.lax.map(of_chunk, chunks)
    return TokenLogprobs(*(jnp.where(has_logprob_BT, _rows(x, num_tokens), 0.0) for x in found))


class KVCache(NamedTuple):
    """Keys (rotated) and values of every layer, slot and position: [L, B, S, K, H]; bfloat16 as bits, see `to_bits`."""

    keys_LBSKH: jax.Array
    values_LBSKH: jax.Array


_CACHE_AXES = ("layers", "batch", "length", "kv_heads", "head")


def empty_cache(arch: Architecture, batch: int, length: int, dtype: jax.typing.DTypeLike) -> KVCache:
    """A cache of `batch` slots for up to `length` tokens each."""
    shape = (arch.num_layers, batch, length, arch.num_kv_heads, arch.head_dim)
    return KVCache(*(constrain(to_bits(jnp.zeros(shape, dtype)), _CACHE_AXES) for _ in range(2)))


def cache_sharding(arch: Architecture, batch: int, mesh: Mesh) -> NamedSharding:
    """Of the keys and of the values of `empty_cache`, whatever its length."""
    return fitting_sharding((arch.num_layers, batch, 1, arch.num_kv_heads, arch.head_dim), _CACHE_AXES, mesh)


def decoding_params(params: nnx.State, arch: Architecture, dtype: jax.typing.DTypeLike) -> nnx.State:
    """What to decode with: the matrices cast to `dtype` once, not at every token; float32 stays as it is.

    Norms and biases keep their type, so that decoding computes what the trainer's forward pass does. The stacked
    matrices become bits where `dtype` is bfloat16.
    """
    if jnp.dtype(dtype) == jnp.float32:
        return params

    def cast(weight: Weight, x: jax.Array) -> jax.Array:
        if not weight.is_matrix:
            return x
        return to_bits(x.astype(dtype)) if weight.is_stacked else x.astype(dtype)

    return jax.tree.map(cast, nnx.State(weight_tree(arch, lambda weight: weight)), params)


def prefill(model: Transformer, token_ids_RP: jax.Array, lengths_R: jax.Array) -> KVCache:
    """Keys and values [L, R, P, K, H] of right-padded prompts at positions 0, 1, ...; those of padding mean nothing."""
    positions_RP = jnp.broadcast_to(jnp.arange(token_ids_RP.shape[1]), token_ids_RP.shape)
    rope = rotary_embedding(positions_RP, model.arch)
    attend = packed_attention(model.attention, (positions_RP < lengths_R[:, None]).astype(jnp.int32))

    def body(x_RPD: jax.Array, weights: LayerWeights) -> tuple[jax.Array, KVCache]:
        weights = jax.tree.map(from_bits, weights)
        x_RPD, k_RPKH, v_RPKH = _layer(model.arch, weights, x_RPD, rope, attend)
        return x_RPD, KVCache(to_bits(k_RPKH), to_bits(v_RPKH))

    return jax.lax.scan(body, model.embed(token_ids_RP), model.layer_weights())[1]


def decode_step(
    model: Transformer, cache: KVCache, token_ids_B: jax.Array, positions_B: jax.Array
) -> tuple[jax.Array, KVCache]:
    """Feed one token to every slot: float32 logits [B, V] of the next, and the cache with its key and value written.

    A token at position p overwrites what its slot holds there and sees positions 0..p. Donate the cache, or carry it
    through a loop, and it is updated in place. A position beyond the cache's length is not written.
    """
    rope = rotary_embedding(positions_B[:, None], model.arch)
    mask_B1S = (jnp.arange(cache.keys_LBSKH.shape[2]) <= positions_B[:, None])[:, None]
    slots_B = jnp.arange(len(token_ids_B))

    def write(cache_LBSKH: jax.Array, layer: jax.Array, new_B1KH: jax.Array) -> jax.Array:
        new_BKH = to_bits(new_B1KH[:, 0].astype(model.compute_dtype))
        return cache_LBSKH.at[layer, slots_B, positions_B].set(new_BKH)

    def body(carry: tuple[jax.Array, KVCache], scanned: tuple[jax.Array, LayerWeights]) -> tuple:
        x_B1D, cache = carry
        layer, weights = scanned[0], jax.tree.map(from_bits, scanned[1])
        q_B1NH, k_B1KH, v_B1KH = _project_qkv(model.arch, weights, x_B1D, rope)
        cache = KVCache(write(cache.keys_LBSKH, layer, k_B1KH), write(cache.values_LBSKH, layer, v_B1KH))
        k_BSKH, v_BSKH = (from_bits(cache_LBSKH[layer]) for cache_LBSKH in cache)
        attended_B1NH = attention(q_B1NH, k_BSKH, v_BSKH, mask_B1S)
        return (_finish_layer(model.arch, weights, x_B1D, attended_B1NH), cache), None

    layers = jnp.arange(model.arch.num_layers), model.layer_weights()
    (x_B1D, cache), _ = jax.lax.scan(body, (model.embed(token_ids_B[:, None]), cache), layers)
    return model.logits(model.normalise(x_B1D)[:, 0]), cache


class Rotary(NamedTuple):
    """Cosines and sines of every position and frequency, float32 [B, T, 1, H/2]."""

    cos: jax.Array
    sin: jax.Array


def rotary_embedding(positions_BT: jax.Array, arch: Architecture) -> Rotary:
    """Angles of the rotary position embedding (arXiv 2104.09864)."""
    exponents = jnp.arange(0, arch.head_dim, 2, dtype=jnp.float32) / arch.head_dim
    angles = positions_BT[..., None, None].astype(jnp.float32) / arch.rope_theta**exponents
    return Rotary(jnp.cos(angles), jnp.sin(angles))


def rotate(x_BTNH: jax.Array, rope: Rotary) -> jax.Array:
    """Rotate the pairs (i, i + H/2) of the head dimension, as Hugging Face lays them out."""
    first, second = jnp.split(x_BTNH.astype(jnp.float32), 2, axis=-1)
    rotated = first * rope.cos - second * rope.sin, second * rope.cos + first * rope.sin
    return jnp.concatenate(rotated, axis=-1).astype(x_BTNH.dtype)


def rms_norm(x: jax.Array, scale: jax.Array, eps: float) -> jax.Array:
    """x / sqrt(mean(x^2) + eps) * scale over the last dimension, in float32, returned in the type of `x`."""
    x32 = x.astype(jnp.float32)
    normed = x32 * jax.lax.rsqrt(jnp.mean(jnp.square(x32), axis=-1, keepdims=True) + eps)
    return (normed * scale).astype(x.dtype)


def _layer(
    arch: Architecture, weights: LayerWeights, x_BTD: jax.Array, rope: Rotary, attend: Attend
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """One decoder layer over whole sequences: its output, and the keys and values that a cache needs."""
    q_BTNH, k_BTKH, v_BTKH = _project_qkv(arch, weights, x_BTD, rope)
    attended_BTNH = attend(q_BTNH, k_BTKH, v_BTKH)
    return _finish_layer(arch, weights, x_BTD, attended_BTNH), k_BTKH, v_BTKH


def _project_qkv(
    arch: Architecture, weights: LayerWeights, x_BTD: jax.Array, rope: Rotary
) -> tuple[jax.Array, jax.Array, jax.Array]:
    x_BTD = rms_norm(x_BTD, weights["attention_norm"], arch.rms_norm_eps)

    def project(name: str, axis: str) -> jax.Array:
        x_BTNH = _linear(weights, name, x_BTD).reshape(*x_BTD.shape[:2], -1, arch.head_dim)
        return constrain(x_BTNH, ("batch", "length", axis, "head"))

    q_BTNH, k_BTKH, v_BTKH = project("q_proj", "heads"), project("k_proj", "kv_heads"), project("v_proj", "kv_heads")
    if arch.qk_norm:
        q_BTNH = rms_norm(q_BTNH, weights["q_norm"], arch.rms_norm_eps)
        k_BTKH = rms_norm(k_BTKH, weights["k_norm"], arch.rms_norm_eps)
    return rotate(q_BTNH, rope), rotate(k_BTKH, rope), v_BTKH


def _finish_layer(arch: Architecture, weights: LayerWeights, x_BTD: jax.Array, attended_BTNH: jax.Array) -> jax.Array:
    """Output projection and gated MLP, each added to the residual stream."""
    x_BTD = x_BTD + _linear(weights, "o_proj", attended_BTNH.reshape(*x_BTD.shape[:2], -1))
    x_BTD = constrain(x_BTD, ("batch", "length", "model"))
    normed_BTD = rms_norm(x_BTD, weights["mlp_norm"], arch.rms_norm_eps)
    gated_BTF = jax.nn.silu(_linear(weights, "gate_proj", normed_BTD)) * _linear(weights, "up_proj", normed_BTD)
    gated_BTF = constrain(gated_BTF, ("batch", "length", "mlp"))
    return constrain(x_BTD + _linear(weights, "down_proj", gated_BTF), ("batch", "length", "model"))


def _linear(weights: LayerWeights, name: str, x_BTI: jax.Array) -> jax.Array:
    """x @ weight (+ bias, where the model has one), in the type of `x`."""
    y_BTO = product("BTI,IO->BTO", x_BTI, weights[name], x_BTI.dtype)
    bias_O = weights.get(f"{name}_bias")
    return y_BTO if bias_O is None else y_BTO + bias_O.astype(x_BTI.dtype)


def _rematerialised(body: LayerBody, remat: Remat) -> LayerBody:
    if remat == "none":
        return body
    policies = jax.checkpoint_policies
    policy = policies.dots_with_no_batch_dims_saveable if remat == "dots" else policies.nothing_saveable
    # A scan already keeps the compiler from undoing the recomputation.
    return jax.checkpoint(body, policy=policy, prevent_cse=False)


def _initial_value(weight: Weight, rngs: nnx.Rngs | None, dtype: jax.typing.DTypeLike) -> jax.Array:
    if rngs is None or weight.init == "zeros":
        return jnp.zeros(weight.shape, dtype)
    if weight.init == "ones":
        return jnp.ones(weight.shape, dtype)
    return INIT_STDDEV * jax.random.normal(rngs.params(), weight.shape, dtype)


def _logprobs_of(logits_BCV: jax.Array, token_ids_BC: jax.Array) -> TokenLogprobs:
    logprobs_BCV = jax.nn.log_softmax(logits_BCV)
    chosen_BC = jnp.take_along_axis(logprobs_BCV, token_ids_BC[..., None], axis=-1)[..., 0]
    return TokenLogprobs(chosen_BC, -jnp.sum(jnp.exp(logprobs_BCV) * logprobs_BCV, axis=-1))


def to_bits(x: jax.Array) -> jax.Array:
    """bfloat16 as uint16; it has no gradient, so for decoding only.

    XLA:CPU (jax 0.10) slices and scatters bfloat16 by way of a float32 copy of the whole array, such as the cache in
    every layer, but integers in place. So what a loop over layers slices is kept as bits, and only slices are turned
    back. Elsewhere it costs nothing.
    """
    return jax.lax.bitcast_convert_type(x, jnp.uint16) if x.dtype == jnp.bfloat16 else x


def from_bits(x: jax.Array) -> jax.Array:
    """The inverse of `to_bits`."""
    return jax.lax.bitcast_convert_type(x, jnp.bfloat16) if x.dtype == jnp.uint16 else x


def _shift_right(x_BT: jax.Array) -> jax.Array:
    """What stands one token to the left; zero at the first."""
    padding = [(0, 0), (1, 0)] + [(0, 0)] * (x_BT.ndim - 2)
    return jnp.pad(x_BT, padding)[:, :-1]


def _columns(x_BT: jax.Array, width: int) -> jax.Array:
    """[B, T, ...] -> [T / width, B, width, ...], padded with zeros."""
    num_chunks = -(-x_BT.shape[1] // width)
    padding = [(0, 0), (0, num_chunks * width - x_BT.shape[1])] + [(0, 0)] * (x_BT.ndim - 2)
    padded = jnp.pad(x_BT, padding)
    return jnp.moveaxis(padded.reshape(len(x_BT), num_chunks, width, *x_BT.shape[2:]), 1, 0)


def _rows(chunks_XBC: jax.Array, num_tokens: int) -> jax.Array:
    """The inverse of `_columns`: [X, B, C] -> [B, T]."""
    num_rows = chunks_XBC.shape[1]
    return jnp.moveaxis(chunks_XBC, 0, 1).reshape(num_rows, -1)[:, :num_tokens]
