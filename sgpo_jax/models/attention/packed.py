"""What the layers of a model call, whichever implementation computes it."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Literal, Protocol

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from sgpo_jax.models.attention import fused
from sgpo_jax.models.attention.plain import attention, packed_causal_mask
from sgpo_jax.models.sharding import RULES, num_batch_shards

Implementation = Literal["plain", "cudnn", "tokamax", "splash"]


class Attend(Protocol):
    """Causal attention within segments: [B, T, N, H] of N query heads over K key-value heads, N a multiple of K.

    Queries are scaled by H^-1/2. What padding gets means nothing, and is finite.
    """

    def __call__(self, q_BTNH: jax.Array, k_BTKH: jax.Array, v_BTKH: jax.Array, /) -> jax.Array: ...


@dataclass(frozen=True, slots=True)
class _Kernel:
    """prepare: segment ids [B, T] -> [B, ...], what of them all layers share; attend(q, k, v, that).

    multiple: of which T must be. is_partitioned: the compiler itself spreads it over a mesh.
    """

    prepare: Callable[[jax.Array], jax.Array]
    attend: Callable[[jax.Array, jax.Array, jax.Array, jax.Array], jax.Array]
    multiple: int = 1
    is_partitioned: bool = False


_KERNELS: dict[Implementation, _Kernel] = {
    "plain": _Kernel(packed_causal_mask, attention, is_partitioned=True),
    "cudnn": _Kernel(fused.prepare_mask, fused.cudnn_attend, multiple=8),  # even, and rows of the mask aligned
    "tokamax": _Kernel(fused.prepare_mask, fused.tokamax_attend, multiple=8),
    "splash": _Kernel(lambda segment_ids_BT: segment_ids_BT, fused.splash_attend, multiple=fused.SPLASH_LANES),
}


def packed_attention(implementation: Implementation, segment_ids_BT: jax.Array) -> Attend:
    """Attention for rows with these segments: a token sees itself and the earlier tokens of its segment, nothing else.

    Segment 0 is padding, which may stand left, right or between. Under the mesh of jax.set_mesh every device computes
    its own rows and heads.
    """
    kernel = _KERNELS[implementation]
    num_tokens = segment_ids_BT.shape[1]
    surplus = -num_tokens % kernel.multiple
    prepared = kernel.prepare(_pad(segment_ids_BT, surplus))

    def attend(q_BTNH: jax.Array, k_BTKH: jax.Array, v_BTKH: jax.Array, /) -> jax.Array:
        q_BTNH, k_BTKH, v_BTKH = (_pad(x, surplus) for x in (q_BTNH, k_BTKH, v_BTKH))
        call = kernel.attend if kernel.is_partitioned else partial(_on_each_device, kernel.attend)
        return call(q_BTNH, k_BTKH, v_BTKH, prepared)[:, :num_tokens]

    return attend


def _pad(x_BT: jax.Array, surplus: int) -> jax.Array:
    """With `surplus` zeros (segment 0: padding) at the end of every row."""
    return jnp.pad(x_BT, [(0, 0), (0, surplus)] + [(0, 0)] * (x_BT.ndim - 2)) if surplus else x_BT


def _on_each_device(
    attend: Callable[..., jax.Array], q_BTNH: jax.Array, k_BTKH: jax.Array, v_BTKH: jax.Array, prepared: jax.Array
) -> jax.Array:
    """A kernel is opaque to the compiler, which would gather its operands: so each device calls it on what it has.

    Rows that the devices cannot share evenly (a prompt or two) are computed by all of them.
    """
    if jax.sharding.get_abstract_mesh().empty:
        return attend(q_BTNH, k_BTKH, v_BTKH, prepared)
    batch = RULES["batch"] if len(q_BTNH) % num_batch_shards() == 0 else None
    heads = PartitionSpec(batch, None, RULES["heads"], None)  # sharding.check_divisible: they always fit
    specs = (heads, heads, heads, PartitionSpec(batch))
    # check_vma: Pallas kernels do not say over which axes of the mesh their results vary.
    return jax.shard_map(attend, in_specs=specs, out_specs=heads, check_vma=False)(q_BTNH, k_BTKH, v_BTKH, prepared)
