"""Bytes of one device by arithmetic, from the table of weights, the mesh and the shapes of a run.

What rests on the device (weights, optimizer, gradients, key-value cache) is exact. What passes (activations, logits) is
an estimate of what a good compiler holds at its worst moment; programs.py says what the compiler at hand holds.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace

from sgpo_jax.models.architecture import Architecture
from sgpo_jax.models.qwen import Remat
from sgpo_jax.models.sharding import RULES
from sgpo_jax.models.weights import Weight, weight_table

_FLOAT32 = 4
_MOMENTS = 2  # of AdamW, each as large as the weights


@dataclass(frozen=True, slots=True)
class Sizes:
    """What memory follows from.

    num_rows, row_length: of the micro-batch, over all devices. compute_bytes: of the type of activations.
    holds_scores: whether attention holds all its scores (the plain one). has_reference: a second copy of the weights.
    num_slots, slot_length: of the JAX engine's cache; 0 where vLLM samples. sampler_mesh: its sizes by axis where it is
    another than the trainer's.
    """

    arch: Architecture
    data: int
    fsdp: int
    tensor: int
    num_rows: int
    row_length: int
    vocab_chunk_tokens: int
    remat: Remat
    compute_bytes: int
    holds_scores: bool
    has_reference: bool
    num_slots: int
    slot_length: int
    sampler_mesh: Mapping[str, int] | None = None

    @property
    def sampling(self) -> "Sizes":
        """As the JAX engine has them."""
        mesh = self.sampler_mesh
        if mesh is None:
            return self
        return replace(self, data=mesh["data"], fsdp=mesh["fsdp"], tensor=mesh["tensor"], sampler_mesh=None)

    @property
    def num_devices(self) -> int:
        return self.data * self.fsdp * self.tensor

    @property
    def batch_shards(self) -> int:
        return self.data * self.fsdp

    @property
    def tokens_on_device(self) -> int:
        """Of a micro-batch."""
        return self.num_rows * self.row_length // self.batch_shards


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes of one device by kind.

    weights, optimizer: float32, always there, as are the reference and, in the compute type, the sampler_weights.
    gradients: what micro-batches are summed into. micro_gradients: of one of them. cast_weights: the trainer's weights
    in the compute type, while it computes. activations: those kept for the backward pass. layer: one layer's, while it
    is at work, with its weights gathered. logits: of one chunk, with the gathered matrix that makes them; they are gone
    when the layers' backward pass begins. relayout: while the sampler_weights are made, where the JAX engine has a
    layout of its own. kv_cache, decoding: while it samples.
    """

    weights: int
    optimizer: int
    gradients: int
    micro_gradients: int
    cast_weights: int
    activations: int
    layer: int
    logits: int
    reference: int
    sampler_weights: int
    relayout: int
    kv_cache: int
    decoding: int

    @property
    def always(self) -> int:
        return self.weights + self.optimizer + self.reference + self.sampler_weights

    @property
    def passing(self) -> int:
        """What one micro-batch needs beside what rests: see `Memory`."""
        return self.micro_gradients + self.cast_weights + self.activations + max(self.layer, self.logits)

    @property
    def updating(self) -> int:
        return self.always + self.gradients + self.passing

    @property
    def sampling(self) -> int:
        return self.always + max(self.relayout, self.kv_cache + self.decoding)

    def to_dict(self) -> dict[str, int]:
        return {field.name: getattr(self, field.name) for field in fields(self)}


def estimate(sizes: Sizes) -> Memory:
    """The memory of every device: all hold the same."""
    weights = _weights(sizes, _FLOAT32)
    sampling, has_cache, is_cast = sizes.sampling, sizes.num_slots > 0, sizes.compute_bytes != _FLOAT32
    has_layout = sizes.sampler_mesh is not None
    has_copy = has_cache and (is_cast or has_layout)
    return Memory(
        weights=weights,
        optimizer=_MOMENTS * weights,
        gradients=weights,
        micro_gradients=weights,
        cast_weights=_matrices(sizes) if is_cast else 0,
        activations=_kept(sizes),
        layer=_layer(sizes),
        logits=_logits(sizes),
        reference=weights if sizes.has_reference else 0,
        sampler_weights=_matrices(sampling) + _weights(sampling, _FLOAT32, matrices=False) if has_copy else 0,
        relayout=_relayout(sampling) + (_matrices(sizes) if is_cast else 0) if has_cache and has_layout else 0,
        kv_cache=_kv_cache(sampling) if has_cache else 0,
        decoding=_decoding(sampling) if has_cache else 0,
    )


def kv_bytes_per_token(arch: Architecture, compute_bytes: int) -> int:
    """Keys and values of one token in all layers."""
    return 2 * arch.num_layers * arch.num_kv_heads * arch.head_dim * compute_bytes


def _weights(sizes: Sizes, itemsize: int, *, matrices: bool = True) -> int:
    """All weights, or all but the matrices."""
    return sum(_elements(w, sizes) * itemsize for w in weight_table(sizes.arch) if matrices or not w.is_matrix)


def _matrices(sizes: Sizes) -> int:
    return sum(_elements(w, sizes) * sizes.compute_bytes for w in weight_table(sizes.arch) if w.is_matrix)


def _elements(weight: Weight, sizes: Sizes) -> int:
    """Of a weight on one device."""
    return math.prod(size // _shards(axis, sizes) for size, axis in zip(weight.shape, weight.axes, strict=True))


def _shards(axis: str, sizes: Sizes) -> int:
    rule = RULES.get(axis)
    names = (rule,) if isinstance(rule, str) else rule or ()
    return math.prod(getattr(sizes, name) for name in names)


def _kept(sizes: Sizes) -> int:
    """What each layer leaves for the backward pass, and the hidden states that the logits are made of."""
    arch, tensor = sizes.arch, sizes.tensor
    per_token = arch.model_dim
    scores = 0
    if sizes.remat != "full":  # the results of the matrix products with weights
        per_token += 2 * arch.model_dim + (_heads(arch) + 2 * arch.mlp_dim) // tensor
    if sizes.remat == "none":  # norms, rotated heads, the gated product
        per_token += 2 * arch.model_dim + (_heads(arch) + 2 * arch.mlp_dim) // tensor
        scores = _scores(sizes) * (_FLOAT32 + sizes.compute_bytes)
    hidden = 3 * sizes.tokens_on_device * arch.model_dim * sizes.compute_bytes
    return arch.num_layers * (sizes.tokens_on_device * per_token * sizes.compute_bytes + scores) + hidden


def _layer(sizes: Sizes) -> int:
    """The backward pass of one layer: what it computes (again), its cotangents, its gathered weights."""
    arch, tensor = sizes.arch, sizes.tensor
    per_token = 4 * arch.model_dim + 2 * (_heads(arch) + 3 * arch.mlp_dim) // tensor
    computed = sizes.tokens_on_device * per_token * sizes.compute_bytes
    attention = _scores(sizes) * (2 * _FLOAT32 + sizes.compute_bytes)
    mask = sizes.num_rows // sizes.batch_shards * sizes.row_length**2 * (1 + sizes.compute_bytes)
    layer = sum(math.prod(w.shape[1:]) for w in weight_table(arch) if w.is_stacked) // tensor
    gathered = layer * (sizes.compute_bytes + _FLOAT32) if sizes.fsdp > 1 else 0
    return computed + attention + mask + gathered


def _heads(arch: Architecture) -> int:
    """Elements of one token's queries, keys and values."""
    return (arch.num_heads + 2 * arch.num_kv_heads) * arch.head_dim


def _scores(sizes: Sizes) -> int:
    """Elements of one layer's attention scores, where they are held."""
    rows = sizes.num_rows // sizes.batch_shards
    return rows * sizes.arch.num_heads // sizes.tensor * sizes.row_length**2 if sizes.holds_scores else 0


def _logits(sizes: Sizes) -> int:
    """Logits, log-probabilities and their gradient of one chunk; the matrix and its gradient, gathered."""
    arch = sizes.arch
    columns = min(max(1, sizes.vocab_chunk_tokens * sizes.batch_shards // sizes.num_rows), sizes.row_length)
    chunk = columns * sizes.num_rows // sizes.batch_shards
    vocab = arch.vocab_size // sizes.tensor
    matrix = vocab * arch.model_dim * (sizes.compute_bytes + _FLOAT32) if sizes.fsdp > 1 else 0
    return 3 * chunk * vocab * _FLOAT32 + matrix


def _relayout(sampling: Sizes) -> int:
    """What is on its way at a time: a layer, or a matrix of the vocabulary, as it leaves and as it arrives."""
    table = weight_table(sampling.arch)
    layer = sum(_elements(w, sampling) for w in table if w.is_stacked) // sampling.arch.num_layers
    vocabulary = max(_elements(w, sampling) for w in table if w.is_matrix and not w.is_stacked)
    return 2 * max(layer, vocabulary) * sampling.compute_bytes


def _kv_cache(sizes: Sizes) -> int:
    tokens = sizes.num_slots * sizes.slot_length // _cache_shards(sizes)
    return tokens * kv_bytes_per_token(sizes.arch, sizes.compute_bytes) // sizes.tensor


def _cache_shards(sizes: Sizes) -> int:
    """A number of slots that the devices do not divide is left to the compiler: taken as not spread."""
    return sizes.batch_shards if sizes.num_slots % sizes.batch_shards == 0 else 1


def _decoding(sizes: Sizes) -> int:
    """One layer's keys, values and scores at work; logits, probabilities and their sums; the gathered weights."""
    arch = sizes.arch
    slots = sizes.num_slots // _cache_shards(sizes)
    scores = slots * arch.num_heads // sizes.tensor * sizes.slot_length * 2 * _FLOAT32
    logits = 4 * slots * arch.vocab_size // sizes.tensor * _FLOAT32
    layer = sum(math.prod(w.shape[1:]) for w in weight_table(arch) if w.is_stacked)
    largest = max(layer, arch.vocab_size * arch.model_dim)
    gathered = largest // sizes.tensor * sizes.compute_bytes if sizes.fsdp > 1 else 0
    return _kv_cache(sizes) // arch.num_layers + scores + logits + gathered
