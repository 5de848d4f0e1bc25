"""Grouped-query attention over packed rows: one signature, several implementations. Every mask here is causal.

`packed_attention` is what a forward pass over whole rows calls, in training and in prefill; `choose_attention` says
which implementation that is. Decoding, one query a row against a cache, is plain everywhere: its scores, [B, N, 1, S],
are too few to be worth a kernel that never holds them.
"""

from sgpo_jax.models.attention.choice import Choice, choose_attention
from sgpo_jax.models.attention.packed import Attend, Implementation, packed_attention
from sgpo_jax.models.attention.plain import attention, packed_causal_mask

__all__ = [
    "Attend",
    "Choice",
    "Implementation",
    "attention",
    "choose_attention",
    "packed_attention",
    "packed_causal_mask",
]
