"""Which settings would make a run fit, worked out by the same arithmetic that says it does not."""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from sgpo_jax.check.memory import Memory, Sizes, estimate
from sgpo_jax.models.sharding import fitting_layouts

_FEWEST_CHUNK_TOKENS = 128
_MOST_DEVICES = 1024


@dataclass(frozen=True, slots=True)
class Budget:
    """num_bytes: what the trainer may take of a device. scale: what the compiler holds of passing memory, as a multiple
    of the estimate; 1 where only the estimate is to go by.
    """

    num_bytes: int
    scale: float = 1.0

    def updating(self, memory: Memory) -> int:
        return memory.always + memory.gradients + round(self.scale * memory.passing)

    def peak(self, memory: Memory) -> int:
        return max(self.updating(memory), memory.sampling)


@dataclass(frozen=True, slots=True)
class Advice:
    """settings: `key=value`, all of them together. num_bytes: what a device then holds at most."""

    settings: tuple[str, ...]
    num_bytes: int


Step = tuple[str, Sizes]
"""A change of a setting, and the sizes that it leads to."""


def advise(sizes: Sizes, budget: Budget) -> Advice | None:
    """The first kind of change that makes a run fit, no larger than need be, those that cost least time first; where
    none is enough, as much as can be had of one after the other. None where nothing makes it fit.
    """
    alone = (_first_that_fits(change(sizes), budget) for change in _CHANGES)
    if found := next((advice for advice in alone if advice is not None), None):
        return found
    settings: tuple[str, ...] = ()
    for change in _CHANGES:
        steps = list(change(sizes))
        if found := _first_that_fits(steps, budget):
            return replace(found, settings=(*settings, *found.settings))
        if steps:
            setting, sizes = steps[-1]
            settings = (*settings, setting)
    return None


def _first_that_fits(steps: Iterator[Step] | list[Step], budget: Budget) -> Advice | None:
    peaks = ((setting, budget.peak(estimate(sizes))) for setting, sizes in steps)
    return next((Advice((setting,), peak) for setting, peak in peaks if peak <= budget.num_bytes), None)


def _shard_weights(sizes: Sizes) -> Iterator[Step]:
    """Copies of the model become shards of it, on the same devices."""
    data, fsdp = sizes.data, sizes.fsdp
    while data % 2 == 0 and sizes.arch.model_dim % (2 * fsdp) == 0:
        data, fsdp = data // 2, 2 * fsdp
        yield f"mesh.data={data} mesh.fsdp={fsdp}", replace(sizes, data=data, fsdp=fsdp)


def _split_sampler(sizes: Sizes) -> Iterator[Step]:
    """Fewer copies of the weights in the JAX engine's layout; at last the trainer's, where it has shards of them."""
    mesh = sizes.sampler_mesh
    if mesh is None:
        return
    for data, fsdp, tensor in reversed(fitting_layouts(sizes.num_devices, sizes.arch)):
        if fsdp == mesh["fsdp"] and tensor > mesh["tensor"]:
            changed = {"data": data, "fsdp": fsdp, "tensor": tensor}
            yield f"rollouts.mesh.data={data} rollouts.mesh.tensor={tensor}", replace(sizes, sampler_mesh=changed)
    yield "rollouts.mesh=null", replace(sizes, sampler_mesh=None)


def _smaller_chunks(sizes: Sizes) -> Iterator[Step]:
    tokens = sizes.vocab_chunk_tokens
    while tokens >= 2 * _FEWEST_CHUNK_TOKENS:
        tokens //= 2
        yield f"model.vocab_chunk_tokens={tokens}", replace(sizes, vocab_chunk_tokens=tokens)


def _smaller_micro_batches(sizes: Sizes) -> Iterator[Step]:
    """Down to one row a device."""
    rows = sizes.num_rows // sizes.batch_shards
    while rows > 1:
        rows //= 2
        num_rows = rows * sizes.batch_shards
        yield f"train.micro_batch_tokens={num_rows * sizes.row_length}", replace(sizes, num_rows=num_rows)


def _fewer_slots(sizes: Sizes) -> Iterator[Step]:
    """Down to one slot a device, or a group of devices that has one copy of the weights."""
    slots = sizes.num_slots
    while slots >= 2 * sizes.sampling.batch_shards:
        slots //= 2
        yield f"rollouts.batch_size={slots}", replace(sizes, num_slots=slots)


def _rematerialise(sizes: Sizes) -> Iterator[Step]:
    if sizes.remat != "full":
        yield "model.remat=full", replace(sizes, remat="full")


def _more_devices(sizes: Sizes) -> Iterator[Step]:
    """Rows a device stay what they are, where that is possible."""
    rows = max(1, sizes.num_rows // sizes.batch_shards)
    while 2 * sizes.num_devices <= _MOST_DEVICES and sizes.arch.model_dim % (2 * sizes.fsdp) == 0:
        sizes = replace(sizes, fsdp=2 * sizes.fsdp)
        sizes = replace(sizes, num_rows=rows * sizes.batch_shards)
        sampler = ""
        if mesh := sizes.sampler_mesh:
            sizes = replace(sizes, sampler_mesh={**mesh, "data": 2 * mesh["data"]})
            sampler = f" rollouts.mesh.data={2 * mesh['data']}"
        yield f"mesh.fsdp={sizes.fsdp}{sampler} (on {sizes.num_devices} devices)", sizes


_CHANGES = (
    _shard_weights,
    _split_sampler,
    _smaller_micro_batches,
    _smaller_chunks,
    _fewer_slots,
    _rematerialise,
    _more_devices,
)
