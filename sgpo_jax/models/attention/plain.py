"""The reference: attention in plain JAX, on every platform, and the mask that says who may see whom."""

import jax
import jax.numpy as jnp

from sgpo_jax.models.products import product


def packed_causal_mask(segment_ids_BT: jax.Array) -> jax.Array:
    """bool [B, T, T]: a token sees itself and the earlier tokens of its own segment, and no token sees nothing.

    Earlier is earlier in the row, whatever the positions say, so that no input can look into the future. Padding,
    segment 0, sees padding and is seen by nothing else.
    """
    num_tokens = segment_ids_BT.shape[1]
    same = segment_ids_BT[:, :, None] == segment_ids_BT[:, None, :]
    return same & jnp.tril(jnp.ones((num_tokens, num_tokens), bool))


def attention(q_BTNH: jax.Array, k_BSKH: jax.Array, v_BSKH: jax.Array, mask_BTS: jax.Array) -> jax.Array:
    """Scaled dot-product attention of N query heads over K key-value heads, N a multiple of K. Softmax in float32.

    Returns [B, T, N, H] in the type of `v`. A query that sees nothing gets a finite mean, never NaN.
    """
    batch, num_queries, _, head_dim = q_BTNH.shape
    num_keys, num_kv_heads = k_BSKH.shape[1:3]
    # Batch dimensions first, the G heads that share keys beside the queries: two plain batched matrix products.
    # (Left to XLA:CPU, the same transposes cost more than the products.)
    q_BTKGH = q_BTNH.reshape(batch, num_queries, num_kv_heads, -1, head_dim)
    q_BKXH = q_BTKGH.transpose(0, 2, 3, 1, 4).reshape(batch, num_kv_heads, -1, head_dim)  # X = G T
    k_BKSH, v_BKSH = k_BSKH.transpose(0, 2, 1, 3), v_BSKH.transpose(0, 2, 1, 3)
    scores_BKXS = product("BKXH,BKSH->BKXS", q_BKXH, k_BKSH, jnp.float32)
    scores_BKGTS = scores_BKXS.reshape(batch, num_kv_heads, -1, num_queries, num_keys) * head_dim**-0.5
    scores_BKGTS = jnp.where(mask_BTS[:, None, None], scores_BKGTS, jnp.finfo(jnp.float32).min)
    probs_BKXS = jax.nn.softmax(scores_BKGTS, axis=-1).astype(v_BSKH.dtype).reshape(scores_BKXS.shape)
    y_BKXH = product("BKXS,BKSH->BKXH", probs_BKXS, v_BKSH, v_BSKH.dtype)
    y_BKGTH = y_BKXH.reshape(batch, num_kv_heads, -1, num_queries, head_dim)
    return y_BKGTH.transpose(0, 3, 1, 2, 4).reshape(q_BTNH.shape)
