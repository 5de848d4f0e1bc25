"""Kernels that never hold the scores: cuDNN's and tokamax's on GPUs, splash on TPUs. All are exact attention.

Each `*_attend` takes what its `prepare` made of the segment ids, and one device's rows and heads.
"""

import jax
import jax.numpy as jnp

from sgpo_jax.models.attention.plain import packed_causal_mask

SPLASH_LANES = 128  # of a TPU's vector unit; the kernel's blocks are multiples of it


def prepare_mask(segment_ids_BT: jax.Array) -> jax.Array:
    """bool [B, 1, T, T], one mask for all heads."""
    return packed_causal_mask(segment_ids_BT)[:, None]


def cudnn_attend(q_BTNH: jax.Array, k_BTKH: jax.Array, v_BTKH: jax.Array, mask_B1TT: jax.Array) -> jax.Array:
    """jax.nn.dot_product_attention by cuDNN (bfloat16; FlashAttention-2, arXiv 2307.08691).

    The mask becomes a bias of 0 and about -2e12 in bfloat16, whose exponential is exactly 0. is_causal says again what
    the mask says, so that the kernel skips the future. (Offsets of packed segments, which need no mask, are not in
    JAX's public interface.)
    """
    return jax.nn.dot_product_attention(q_BTNH, k_BTKH, v_BTKH, mask=mask_B1TT, is_causal=True, implementation="cudnn")


def tokamax_attend(q_BTNH: jax.Array, k_BTKH: jax.Array, v_BTKH: jax.Array, mask_B1TT: jax.Array) -> jax.Array:
    """tokamax.dot_product_attention by its kernels for NVIDIA GPUs: Mosaic on those it is written for, else Triton."""
    import tokamax  # an extra of this project
    from absl import flags

    if not flags.FLAGS.is_parsed():
        flags.FLAGS.mark_as_parsed()  # or tokamax 0.0.12 would parse the arguments of this program as its own
    return tokamax.dot_product_attention(
        q_BTNH, k_BTKH, v_BTKH, mask=mask_B1TT, is_causal=True, implementation=("mosaic", "triton")
    )


def splash_attend(q_BTNH: jax.Array, k_BTKH: jax.Array, v_BTKH: jax.Array, segment_ids_BT: jax.Array) -> jax.Array:
    """JAX's Pallas kernel for TPUs, which takes segment ids as they are. T is a multiple of SPLASH_LANES."""
    from jax.experimental.pallas.ops.tpu import splash_attention as splash  # slow to import, and not for every platform

    num_tokens, num_heads, head_dim = q_BTNH.shape[1:]
    mask = splash.MultiHeadMask([splash.CausalMask((num_tokens, num_tokens))] * num_heads)
    block = next(size for size in (512, 256, SPLASH_LANES) if num_tokens % size == 0)
    blocks = splash.BlockSizes(
        block_q=block,
        block_kv=block,
        block_kv_compute=block,
        block_q_dkv=block,
        block_kv_dkv=block,
        block_kv_dkv_compute=block,
        block_q_dq=block,
        block_kv_dq=block,
    )
    kernel = splash.make_splash_mha(mask, block_sizes=blocks, head_shards=1, q_seq_shards=1)

    def of_row(q_NTH: jax.Array, k_KTH: jax.Array, v_KTH: jax.Array, segment_ids_T: jax.Array) -> jax.Array:
        return kernel(q_NTH, k_KTH, v_KTH, segment_ids=splash.SegmentIds(segment_ids_T, segment_ids_T))

    scaled_BTNH = (q_BTNH.astype(jnp.float32) * head_dim**-0.5).astype(q_BTNH.dtype)  # the kernel does not scale
    q_BNTH, k_BKTH, v_BKTH = (jnp.swapaxes(x, 1, 2) for x in (scaled_BTNH, k_BTKH, v_BTKH))
    return jnp.swapaxes(jax.vmap(of_row)(q_BNTH, k_BKTH, v_BKTH, segment_ids_BT), 1, 2)
