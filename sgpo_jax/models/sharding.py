"""Where arrays live: one table from logical axis names to the axes of the device mesh."""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from flax import nnx
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from sgpo_jax.config import LayoutConfig
from sgpo_jax.models.architecture import Architecture
from sgpo_jax.models.weights import Weight, weight_table, weight_tree
from sgpo_jax.types import UserError

MESH_AXES = ("data", "fsdp", "tensor")
_AXIS_TYPES = (AxisType.Auto,) * 3
_LAYOUTS_SHOWN = 6  # of those that would fit, in an error

# A logical axis that is not named here is replicated.
RULES: dict[str, str | tuple[str, ...]] = {
    "batch": ("data", "fsdp"),  # sequences
    "embed": "fsdp",  # the model dimension of weights (that of activations is "model", and whole)
    "vocab": "tensor",
    "heads": "tensor",
    "kv_heads": "tensor",
    "mlp": "tensor",
}


def make_mesh(
    config: LayoutConfig, devices: Sequence[jax.Device] | None = None, *, arch: Architecture | None = None
) -> Mesh:
    """The trainer's mesh, of these devices (all by default).

    Raises UserError where the sizes do not multiply to their number, or do not divide `arch`, where that is known.
    """
    devices = jax.devices() if devices is None else devices
    sizes = _sizes(config, len(devices), arch, "mesh")
    return jax.make_mesh(sizes, MESH_AXES, axis_types=_AXIS_TYPES, devices=devices)


def sampler_mesh(config: LayoutConfig | None, trainer: Mesh, *, arch: Architecture | None = None) -> Mesh:
    """The devices of the trainer's mesh, in their order, in the layout of rollouts.mesh; None: the trainer's.

    Raises UserError as `make_mesh` does.
    """
    sizes = tuple(trainer.shape.values()) if config is None else _sizes(config, trainer.size, arch, "rollouts.mesh")
    if sizes == tuple(trainer.shape.values()):
        return trainer
    return Mesh(trainer.devices.reshape(sizes), MESH_AXES, axis_types=_AXIS_TYPES)


def _sizes(config: LayoutConfig, num_devices: int, arch: Architecture | None, key: str) -> tuple[int, ...]:
    """Of the axes, -1 filled in. key: the section of the configuration, for errors."""
    sizes = [config.data, config.fsdp, config.tensor]
    fixed = math.prod(size for size in sizes if size != -1)
    if -1 in sizes and num_devices % fixed == 0:
        sizes[sizes.index(-1)] = num_devices // fixed
    if math.prod(sizes) != num_devices:
        wanted = ", ".join(f"{key}.{axis}={size}" for axis, size in zip(MESH_AXES, sizes, strict=True))
        raise UserError(
            f"{wanted}: the sizes must multiply to the number of devices, {num_devices}; "
            f"{_what_would_fit(sizes, num_devices, arch)}"
        )
    if arch is not None:
        _check_sizes(arch, dict(zip(MESH_AXES, sizes, strict=True)), key)
    return tuple(sizes)


def fitting_layouts(num_devices: int, arch: Architecture | None) -> list[tuple[int, int, int]]:
    """All (data, fsdp, tensor) of this many devices that divide the model, where it is known; fewest copies first."""
    divisors = [size for size in range(1, num_devices + 1) if num_devices % size == 0]
    layouts = [
        (data, num_devices // (data * tensor), tensor)
        for data in divisors
        for tensor in divisors
        if num_devices % (data * tensor) == 0
    ]
    return [
        layout
        for layout in layouts
        if arch is None or _not_divided(arch, dict(zip(MESH_AXES, layout, strict=True))) is None
    ]


def _what_would_fit(wanted: Sequence[int], num_devices: int, arch: Architecture | None) -> str:
    """The layouts nearest to the sizes that were wanted, -1 of which are free."""

    def distance(layout: Sequence[int]) -> float:
        return sum(abs(math.log(size / want)) for size, want in zip(layout, wanted, strict=True) if want > 0)

    fitting = sorted(fitting_layouts(num_devices, arch), key=distance)
    shown = ", ".join("x".join(map(str, layout)) for layout in fitting[:_LAYOUTS_SHOWN])
    more = f" and {len(fitting) - _LAYOUTS_SHOWN} more" if len(fitting) > _LAYOUTS_SHOWN else ""
    model = "" if arch is None else "this model "
    return f"on {num_devices} device{'s' * (num_devices > 1)} {model}would fit as data x fsdp x tensor = {shown}{more}"


def param_shardings(arch: Architecture, mesh: Mesh) -> nnx.State:
    """The sharding of every parameter, shaped as the Transformer's state (a prefix of it, for jit's shardings).

    Raises UserError where the mesh does not divide the model.
    """
    check_divisible(arch, mesh)
    return nnx.State(weight_tree(arch, lambda weight: weight_sharding(weight, mesh)))


def weight_sharding(weight: Weight, mesh: Mesh) -> NamedSharding:
    return NamedSharding(mesh, partition_spec(weight.axes))


def check_divisible(arch: Architecture, mesh: AbstractMesh | Mesh, *, key: str = "mesh") -> None:
    """Raises UserError naming what of the model the mesh does not divide, and what would fit.

    key: the section of the configuration that the mesh is from.
    """
    _check_sizes(arch, mesh.shape, key)


def _check_sizes(arch: Architecture, sizes: Mapping[str, int], key: str) -> None:
    found = _not_divided(arch, sizes)
    if found is None:
        return
    axis, count = found
    rule = RULES[axis]
    assert isinstance(rule, str)
    fits = _what_would_fit([sizes[name] for name in MESH_AXES], math.prod(sizes.values()), arch)
    raise UserError(f"{key}.{rule}={sizes[rule]} does not divide the model's {axis}={count}; {fits}")


def _not_divided(arch: Architecture, sizes: Mapping[str, int]) -> tuple[str, int] | None:
    """A logical axis of the weights that the sizes of the mesh do not divide, with what there is of it."""
    counts = {axis: size for weight in weight_table(arch) for axis, size in zip(weight.axes, weight.shape, strict=True)}
    counts |= {"heads": arch.num_heads, "kv_heads": arch.num_kv_heads}  # a head is never split
    for axis, count in sorted(counts.items()):
        rule = RULES.get(axis)
        if isinstance(rule, str) and count % sizes[rule]:
            return axis, count
    return None


def partition_spec(axes: Sequence[str]) -> PartitionSpec:
    """The mesh axes of an array with these logical axes."""
    return PartitionSpec(*(RULES.get(axis) for axis in axes))


def constrain(x: jax.Array, axes: Sequence[str]) -> jax.Array:
    """Tell the compiler where `x` lives, under the mesh of jax.set_mesh; without one, `x` as it is.

    A dimension that the mesh does not divide (a batch of one, say) is left to the compiler.
    """
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty:
        return x
    spec = partition_spec(axes)
    fits = (size % shards_of(mesh, rule) == 0 for size, rule in zip(x.shape, spec, strict=True))
    where = (rule if fit else PartitionSpec.UNCONSTRAINED for rule, fit in zip(spec, fits, strict=True))
    return jax.lax.with_sharding_constraint(x, PartitionSpec(*where))


def abstract_results(program: jax.stages.Traced) -> Any:
    """What a program gives, as shapes, types and the shardings that it compiles to."""
    compiled = program.lower().compile()
    return jax.tree.map(
        lambda value, sharding: jax.ShapeDtypeStruct(value.shape, value.dtype, sharding=sharding),
        compiled.out_info,
        compiled.output_shardings,
    )


def fitting_sharding(shape: Sequence[int], axes: Sequence[str], mesh: Mesh) -> NamedSharding:
    """Of an array with these logical axes; a dimension that the mesh does not divide is whole on every device."""
    rules = zip(shape, partition_spec(axes), strict=True)
    fitting = (rule if size % shards_of(mesh, rule) == 0 else None for size, rule in rules)
    return NamedSharding(mesh, PartitionSpec(*fitting))


def everywhere() -> NamedSharding | None:
    """Whole on every device of the mesh of jax.set_mesh, so that every process can read it; without a mesh, None."""
    mesh = jax.sharding.get_mesh()
    return None if mesh.empty else NamedSharding(mesh, PartitionSpec())


def put(array: Any, sharding: NamedSharding) -> jax.Array:
    """An array of the host, the same in every process, on the devices."""
    if sharding.is_fully_addressable:
        return jax.device_put(array, sharding)
    host = np.asarray(array)  # device_put would compare it between the processes first
    return jax.make_array_from_callback(host.shape, sharding, lambda index: host[index])


def num_batch_shards() -> int:
    """Over how many devices a batch is spread, under the mesh of jax.set_mesh; without one, 1."""
    mesh = jax.sharding.get_abstract_mesh()
    return 1 if mesh.empty else shards_of(mesh, RULES["batch"])


def shards_of(mesh: AbstractMesh | Mesh, rule: str | tuple[str, ...] | None) -> int:
    """Into how many parts a dimension with this rule of RULES is split."""
    axes = (rule,) if isinstance(rule, str) else rule or ()
    return math.prod(mesh.shape[axis] for axis in axes)


_PARKED = "pinned_host"


def park(arrays: Any) -> Any:
    """A pytree with its arrays in the host's memory, pinned there, and none of them on its devices any more.

    Scalars stay where they are. No program works on such arrays: `unpark` brings them back.
    """
    return _move(arrays, is_due=lambda array: not _is_parked(array), kind=lambda _: _PARKED)


def unpark(arrays: Any) -> Any:
    """A pytree with its parked arrays back on their devices, and no longer in the host's memory."""
    return _move(arrays, is_due=_is_parked, kind=_device_memory)


def on_devices(array: jax.Array) -> jax.Array:
    """A copy on its devices of an array that is parked; any other as it is."""
    return _with_memory(array, _device_memory(array)) if _is_parked(array) else array


def _move(arrays: Any, is_due: Callable[[jax.Array], bool], kind: Callable[[jax.Array], str]) -> Any:
    """A pytree whose due arrays are in another kind of memory; the old ones are deleted, whoever else holds them."""
    old = [array for array in jax.tree.leaves(arrays) if array.ndim and is_due(array)]
    new = jax.block_until_ready([_with_memory(array, kind(array)) for array in old])
    replaced = {id(array): copy for array, copy in zip(old, new, strict=True)}
    arrays = jax.tree.map(lambda array: replaced.get(id(array), array), arrays)
    for array in old:
        array.delete()
    return arrays


def _with_memory(array: jax.Array, kind: str) -> jax.Array:
    return jax.device_put(array, array.sharding.with_memory_kind(kind))


def _is_parked(array: jax.Array) -> bool:
    return array.sharding.memory_kind == _PARKED


def _device_memory(array: jax.Array) -> str:
    device: Any = next(iter(array.sharding.device_set))  # whose type says less than it has
    return device.default_memory().kind
