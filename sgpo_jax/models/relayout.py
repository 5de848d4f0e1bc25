"""Weights from the trainer's mesh to the sampler's: the one place where they change layout.

Left to itself, the compiler may go from one layout to another by way of a whole copy of every weight. So the way is
laid down: each layer is first spread over all devices, in the trainer's mesh and then in the sampler's, where a device
sends and receives one share of it; only then is it gathered, and only as far as the sampler's layout has copies. Layers
go one after another: on the way beside the weights that stay is one layer, or one matrix of the vocabulary.
"""

from collections.abc import Iterator, Sequence

import jax
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from sgpo_jax.models.architecture import Architecture
from sgpo_jax.models.qwen import from_bits, to_bits
from sgpo_jax.models.sharding import RULES, partition_spec, shards_of
from sgpo_jax.models.weights import Weight, weight_tree


def relayout(params: nnx.State, arch: Architecture, source: Mesh, target: Mesh) -> nnx.State:
    """The same values, bit by bit, in `param_shardings(arch, target)`; to be jitted with these as out_shardings.

    params: in those of `source`, of any types. The meshes have the same devices in the same order.
    """
    old, structure = jax.tree.flatten(params)
    table = jax.tree.leaves(nnx.State(weight_tree(arch, lambda weight: weight)))
    stacked = [place for place, weight in enumerate(table) if weight.is_stacked]

    def move_layer(layer: Sequence[jax.Array]) -> list[jax.Array]:
        return [_move(x, table[place], source, target) for place, x in zip(stacked, layer, strict=True)]

    layers = jax.lax.map(move_layer, [old[place] for place in stacked])
    moved = dict(zip(stacked, layers, strict=True))
    new = [moved[place] if place in moved else _move(x, table[place], source, target) for place, x in enumerate(old)]
    return jax.tree.unflatten(structure, new)


def _move(x: jax.Array, weight: Weight, source: Mesh, target: Mesh) -> jax.Array:
    """A weight, or one layer of a stacked one, along its way."""
    bits = to_bits(x)  # else the CPU would send bfloat16 as float32
    for sharding in _way(weight, source, target):
        bits = jax.lax.with_sharding_constraint(bits, sharding)
    return from_bits(bits) if x.dtype != bits.dtype else bits


def _way(weight: Weight, source: Mesh, target: Mesh) -> Iterator[NamedSharding]:
    """Neighbours differ by one kind of exchange: a slice, a permutation, an all-to-all, a gather."""
    axes = weight.axes[1:] if weight.is_stacked else weight.axes
    shape = weight.shape[1:] if weight.is_stacked else weight.shape
    narrow_first, wide_first = ("fsdp", "data"), ("data", "fsdp")  # which of them is the outer one
    for mesh, orders in ((source, (None, narrow_first, wide_first)), (target, (wide_first, narrow_first, None))):
        for order in orders:
            yield NamedSharding(mesh, _spread(shape, axes, mesh, order))


def _spread(shape: Sequence[int], axes: Sequence[str], mesh: Mesh, order: tuple[str, str] | None) -> PartitionSpec:
    """With `order`, what the mesh splits over fsdp is split over data too, where that divides it."""
    if order is None:
        return partition_spec(axes)
    rules = (RULES.get(axis) for axis in axes)
    return PartitionSpec(
        *(
            order if rule == "fsdp" and size % shards_of(mesh, order) == 0 else rule
            for size, rule in zip(shape, rules, strict=True)
        )
    )
