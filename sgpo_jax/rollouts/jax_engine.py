"""The in-process engine: prefill and KV-cached decode on the trainer's own devices.

A fixed number of slots decodes side by side; a slot whose completion has ended takes the next sample, so a long tail
does not idle the batch. What a slot computes does not depend on its neighbours: prompts are read in buckets of their
own length, the cache has one length for each sampling, and each sample draws from a key of its own.
"""

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh

from sgpo_jax.config import RolloutsConfig
from sgpo_jax.hosts.messages import lead
from sgpo_jax.models.qwen import (
    KVCache,
    Transformer,
    cache_sharding,
    decode_step,
    decoding_params,
    empty_cache,
    prefill,
)
from sgpo_jax.models.relayout import relayout
from sgpo_jax.models.sharding import abstract_results, everywhere, param_shardings
from sgpo_jax.rollouts.engine import Probe, sample_seed, to_values
from sgpo_jax.rollouts.sampling import sample_tokens
from sgpo_jax.types import Completion, CompletionGroup, FinishReason, GroupRequest, SamplingParams, UserError

_SMALLEST_BUCKET = 16


@dataclass(frozen=True, slots=True)
class _Sample:
    """One completion to draw: which request, which of its samples."""

    request: int
    index: int
    seed: int


class _Slots(NamedTuple):
    """The device's side of the slots. A slot's next step feeds token_B at position_B.

    count_B: tokens drawn so far; completions_BC and logprobs_BC hold them. keys_B2: each sample's own random key.
    """

    cache: KVCache
    token_B: jax.Array
    position_B: jax.Array
    count_B: jax.Array
    active_B: jax.Array
    keys_B2: jax.Array
    completions_BC: jax.Array
    logprobs_BC: jax.Array


class _Arrivals(NamedTuple):
    """Samples that enter slots: row_B is the prompt each slot takes (-1: none). NumPy on the host, JAX when traced."""

    prompts_RP: Any
    lengths_R: Any
    row_B: Any
    keys_B2: Any


class JaxEngine:
    """Samples from the trainer's parameters: in float32 and in their own layout in place, else from a copy, whose
    matrices are of the compute type.

    model: gives the architecture and the first parameters; an abstract one (safetensors.abstract_model) makes an engine
    that only `trace` works on. stop_ids: token ids that end a completion. mesh: the layout to sample in, of the devices
    of jax.set_mesh in their order, in whose layout the parameters come; None: that one. Raises UserError where `mesh`
    does not divide the model.
    """

    def __init__(
        self,
        model: Transformer,
        *,
        stop_ids: Sequence[int],
        max_prompt_tokens: int,
        config: RolloutsConfig,
        run_seed: int,
        mesh: Mesh | None = None,
    ) -> None:
        self._graphdef, params = nnx.split(model)
        trainer = jax.sharding.get_mesh()
        self._mesh = None if mesh == trainer else mesh
        self._arch = model.arch
        self._decoding_params = jax.jit(
            partial(self._to_decode_with, trainer),
            out_shardings=None if self._mesh is None else param_shardings(model.arch, self._mesh),
        )
        self._cache_dtype = model.compute_dtype
        self._stop_ids = np.array(sorted(stop_ids), np.int32)
        self._max_prompt_tokens = max_prompt_tokens
        self._config = config
        self._run_seed = run_seed
        if not any(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in jax.tree.leaves(params)):
            self._take(params, 0)
        with self._in_layout():
            out = self._slot_shardings()
        # Compiled, so that a cache that is spread over devices is never whole on one.
        self._open = jax.jit(self._empty_slots, static_argnums=0, out_shardings=out)
        self._admit = jax.jit(self._admit_arrivals, donate_argnums=1, out_shardings=out)
        self._decode = jax.jit(
            self._decode_some, donate_argnums=1, static_argnames=("top_p", "greedy"), out_shardings=out
        )

    def update_weights(self, params: Any, version: int, probe: Probe | None) -> Mapping[str, float]:
        """Sample from `params` (the trainer's nnx.State) from now on. They need no probe: they are the trainer's own
        arrays, or made of them in this process.
        """
        lead("weights", {"version": version})
        self._take(params, version)
        return {}

    def _take(self, params: nnx.State, version: int) -> None:
        self._params: Any = nnx.State({})  # an earlier copy is gone before there is another
        if self._has_copy:
            # Waited for: of several processes, each may run what comes next beside it, and they would then send in
            # different orders.
            self._params = jax.block_until_ready(self._decoding_params(params))
        else:
            self._params = params
        self._version = version

    @property
    def _has_copy(self) -> bool:
        """Whether what is sampled from is another than the trainer's own arrays."""
        return self._mesh is not None or self._cache_dtype != jnp.float32

    def _to_decode_with(self, trainer: Mesh, params: nnx.State) -> nnx.State:
        """The trainer's parameters in the compute type, then in the engine's layout."""
        cast = decoding_params(params, self._arch, self._cache_dtype)
        return cast if self._mesh is None else relayout(cast, self._arch, trainer, self._mesh)

    def _in_layout(self) -> AbstractContextManager[Any]:
        """For as long as one program is called: what runs between two of them is the trainer's."""
        return nullcontext() if self._mesh is None else jax.set_mesh(self._mesh)

    def close(self) -> None:
        """Drop the parameters; the programs go with the engine."""
        self._params = nnx.State({})

    def generate(self, requests: Sequence[GroupRequest], sampling: SamplingParams) -> Iterator[CompletionGroup]:
        """Give every request's group as soon as its last sample has ended.

        Raises UserError for a prompt that is empty or longer than max_prompt_tokens.
        """
        for request in requests:
            self._check(request)
        if not requests:
            return  # a step may have all it needs from the one before
        lead("generate", {"requests": to_values(requests), "sampling": asdict(sampling)})
        finished: dict[int, list[Completion]] = {i: [] for i in range(len(requests))}
        for sample, completion in self._run(requests, sampling):
            group = finished[sample.request]
            group.append(completion)
            request = requests[sample.request]
            if len(group) == request.num_samples:
                yield CompletionGroup(request, tuple(sorted(group, key=lambda c: c.sample_index)))

    def trace(self, params: nnx.State, sampling: SamplingParams) -> dict[str, jax.stages.Traced]:
        """The programs of `update_weights` and `generate` by name, for the longest prompts; none of them is run.

        Of the parameters, shapes, types and shardings suffice (jax.ShapeDtypeStruct).
        """
        programs: dict[str, jax.stages.Traced] = {}
        if self._has_copy:
            programs["decoding_params"] = self._decoding_params.trace(params)
            params = abstract_results(programs["decoding_params"])
        bucket = _bucket(self._max_prompt_tokens)
        arrivals = _no_arrivals(self._num_rows(bucket), bucket, self._config.batch_size)
        with self._in_layout():
            programs["empty_slots"] = self._open.trace(sampling)
            slots = abstract_results(programs["empty_slots"])
            programs["admit"] = self._admit.trace(params, slots, arrivals)
            programs["decode"] = self._decode.trace(params, slots, **_decoding(sampling))
        return programs

    def _check(self, request: GroupRequest) -> None:
        length = len(request.query.prompt_ids)
        if not 0 < length <= self._max_prompt_tokens:
            raise UserError(
                f"query {request.query.query_id}: a prompt of {length} tokens; "
                f"allowed are 1 to {self._max_prompt_tokens} (data.max_prompt_tokens)"
            )

    def _run(self, requests: Sequence[GroupRequest], sampling: SamplingParams) -> Iterator[tuple[_Sample, Completion]]:
        """The host's loop: fill free slots, decode a few tokens, take what has ended."""
        waiting = deque(self._samples(requests))
        with self._in_layout():
            slots = self._open(sampling)
        taken: list[_Sample | None] = [None] * self._config.batch_size
        decode = partial(self._decode, **_decoding(sampling))
        while waiting or any(taken):
            with self._in_layout():
                while _worth_filling(taken, waiting):
                    slots = self._admit(self._params, slots, self._next_arrivals(requests, waiting, taken))
                slots = decode(self._params, slots)
            active_B = np.asarray(slots.active_B)
            ended = [b for b, sample in enumerate(taken) if sample is not None and not active_B[b]]
            for b, completion in zip(ended, self._read(slots, ended, taken), strict=True):
                sample, taken[b] = taken[b], None
                assert sample is not None
                yield sample, completion

    def _samples(self, requests: Sequence[GroupRequest]) -> list[_Sample]:
        """All samples, those of one prompt side by side, prompts of one bucket after another."""
        order = sorted(range(len(requests)), key=lambda i: _bucket(len(requests[i].query.prompt_ids)))
        return [
            _Sample(i, index, sample_seed(self._run_seed, requests[i], index))
            for i in order
            for index in range(requests[i].first_sample, requests[i].first_sample + requests[i].num_samples)
        ]

    def _slot_shardings(self) -> Any:
        """On a mesh, as _Slots: the cache spread over it, and all that the host reads whole on every device."""
        mesh = jax.sharding.get_mesh()
        if mesh.empty:
            return None
        cache: Any = cache_sharding(self._arch, self._config.batch_size, mesh)
        whole: Any = everywhere()
        return _Slots(KVCache(cache, cache), *[whole] * (len(_Slots._fields) - 1))

    def _empty_slots(self, sampling: SamplingParams) -> _Slots:
        num_slots, max_tokens = self._config.batch_size, sampling.max_completion_tokens
        length = _bucket(self._max_prompt_tokens) + max_tokens
        return _Slots(
            cache=empty_cache(self._arch, num_slots, length, self._cache_dtype),
            token_B=jnp.zeros(num_slots, jnp.int32),
            position_B=jnp.zeros(num_slots, jnp.int32),
            count_B=jnp.zeros(num_slots, jnp.int32),
            active_B=jnp.zeros(num_slots, bool),
            keys_B2=jnp.zeros((num_slots, 2), jnp.uint32),
            completions_BC=jnp.zeros((num_slots, max_tokens), jnp.int32),
            logprobs_BC=jnp.zeros((num_slots, max_tokens), jnp.float32),
        )

    def _next_arrivals(
        self, requests: Sequence[GroupRequest], waiting: deque[_Sample], taken: list[_Sample | None]
    ) -> _Arrivals:
        """Move samples from `waiting` into free slots of `taken`: as many prompts of one bucket as one call reads."""
        bucket = _bucket(len(requests[waiting[0].request].query.prompt_ids))
        num_rows = self._num_rows(bucket)
        arrivals = _no_arrivals(num_rows, bucket, len(taken))
        rows: dict[int, int] = {}
        for slot in (b for b, sample in enumerate(taken) if sample is None):
            if not waiting or not _fits(requests[waiting[0].request], waiting[0].request, rows, num_rows, bucket):
                break
            sample = waiting.popleft()
            row = rows.setdefault(sample.request, len(rows))
            prompt_ids = requests[sample.request].query.prompt_ids
            arrivals.prompts_RP[row, : len(prompt_ids)] = prompt_ids
            arrivals.lengths_R[row] = len(prompt_ids)
            arrivals.row_B[slot] = row
            arrivals.keys_B2[slot] = (sample.seed >> 32, sample.seed & 0xFFFFFFFF)
            taken[slot] = sample
        return arrivals

    def _num_rows(self, bucket: int) -> int:
        """Prompts that one call reads."""
        return max(1, self._config.prefill_tokens // bucket)

    def _admit_arrivals(self, params: nnx.State, slots: _Slots, arrivals: _Arrivals) -> _Slots:
        """Read the prompts into the caches of their slots. The last prompt token is left for the first decode step."""
        model = nnx.merge(self._graphdef, params)
        keys_LRPKH, values_LRPKH = prefill(model, arrivals.prompts_RP, arrivals.lengths_R)
        enters_B = arrivals.row_B >= 0
        row_B = jnp.maximum(arrivals.row_B, 0)
        prompt_length = arrivals.prompts_RP.shape[1]

        def enter(cache_LBSKH: jax.Array, prompt_LRPKH: jax.Array) -> jax.Array:
            old = cache_LBSKH[:, :, :prompt_length]
            new = jnp.where(enters_B[None, :, None, None, None], prompt_LRPKH[:, row_B], old)
            return cache_LBSKH.at[:, :, :prompt_length].set(new)

        last_R = arrivals.lengths_R - 1
        last_token_R = jnp.take_along_axis(arrivals.prompts_RP, last_R[:, None], axis=1)[:, 0]
        return slots._replace(
            cache=KVCache(enter(slots.cache.keys_LBSKH, keys_LRPKH), enter(slots.cache.values_LBSKH, values_LRPKH)),
            token_B=jnp.where(enters_B, last_token_R[row_B], slots.token_B),
            position_B=jnp.where(enters_B, last_R[row_B], slots.position_B),
            count_B=jnp.where(enters_B, 0, slots.count_B),
            active_B=enters_B | slots.active_B,
            keys_B2=jnp.where(enters_B[:, None], arrivals.keys_B2, slots.keys_B2),
        )

    def _decode_some(
        self, params: nnx.State, slots: _Slots, *, temperature: jax.Array | float, top_p: float, greedy: bool
    ) -> _Slots:
        """Up to decode_steps tokens for every active slot; ends early when none is."""
        model = nnx.merge(self._graphdef, params)
        step = partial(_decode_one, model, self._stop_ids, temperature=temperature, top_p=top_p, greedy=greedy)

        def unfinished(state: tuple[jax.Array, _Slots]) -> jax.Array:
            return (state[0] < self._config.decode_steps) & jnp.any(state[1].active_B)

        _, slots = jax.lax.while_loop(unfinished, lambda s: (s[0] + 1, step(s[1])), (jnp.int32(0), slots))
        return slots

    def _read(self, slots: _Slots, ended: Sequence[int], taken: Sequence[_Sample | None]) -> Iterator[Completion]:
        if not ended:
            return
        counts_B, tokens_BC, logprobs_BC = jax.device_get((slots.count_B, slots.completions_BC, slots.logprobs_BC))
        stop_ids = set(self._stop_ids.tolist())
        for b in ended:
            sample, count = taken[b], counts_B[b]
            assert sample is not None
            token_ids_C = tokens_BC[b, :count].copy()
            reason = FinishReason.STOP if int(token_ids_C[-1]) in stop_ids else FinishReason.LENGTH
            yield Completion(sample.index, token_ids_C, logprobs_BC[b, :count].copy(), reason, self._version)


def _no_arrivals(num_rows: int, bucket: int, num_slots: int) -> _Arrivals:
    return _Arrivals(
        prompts_RP=np.zeros((num_rows, bucket), np.int32),
        lengths_R=np.ones(num_rows, np.int32),
        row_B=np.full(num_slots, -1, np.int32),
        keys_B2=np.zeros((num_slots, 2), np.uint32),
    )


def _decoding(sampling: SamplingParams) -> dict[str, Any]:
    return {"temperature": sampling.temperature, "top_p": sampling.top_p, "greedy": sampling.temperature == 0}


def _decode_one(
    model: Transformer,
    stop_ids: np.ndarray,
    slots: _Slots,
    *,
    temperature: jax.Array | float,
    top_p: float,
    greedy: bool,
) -> _Slots:
    logits_BV, cache = decode_step(model, slots.cache, slots.token_B, slots.position_B)
    uniforms_B = jax.vmap(_uniform)(slots.keys_B2, slots.count_B)
    drawn = sample_tokens(logits_BV, uniforms_B, temperature=temperature, top_p=top_p, greedy=greedy)
    active_B, max_tokens = slots.active_B, slots.completions_BC.shape[1]
    # Idle slots write past the end, which a scatter drops.
    place = (jnp.arange(active_B.size), jnp.where(active_B, slots.count_B, max_tokens))
    count_B = slots.count_B + active_B
    ended_B = jnp.isin(drawn.token_ids_B, stop_ids) | (count_B >= max_tokens)
    return _Slots(
        cache=cache,
        token_B=jnp.where(active_B, drawn.token_ids_B, slots.token_B),
        position_B=slots.position_B + (active_B & ~ended_B),
        count_B=count_B,
        active_B=active_B & ~ended_B,
        keys_B2=slots.keys_B2,
        completions_BC=slots.completions_BC.at[place].set(drawn.token_ids_B, mode="drop"),
        logprobs_BC=slots.logprobs_BC.at[place].set(drawn.logprobs_B, mode="drop"),
    )


def _uniform(key_2: jax.Array, count: jax.Array) -> jax.Array:
    key = jax.random.wrap_key_data(key_2, impl="threefry2x32")
    return jax.random.uniform(jax.random.fold_in(key, count))


def _bucket(num_tokens: int) -> int:
    """The smallest power of two that holds a prompt: prompts of one bucket share a compiled prefill."""
    return max(_SMALLEST_BUCKET, 1 << (num_tokens - 1).bit_length())


def _worth_filling(taken: Sequence[_Sample | None], waiting: Sequence[_Sample]) -> bool:
    """Whether enough slots are free to pay for reading prompts: an eighth, or all that is left to draw."""
    free = sum(sample is None for sample in taken)
    return len(waiting) > 0 and free >= min(len(waiting), max(1, len(taken) // 8))


def _fits(request: GroupRequest, number: int, rows: dict[int, int], num_rows: int, bucket: int) -> bool:
    return number in rows or (len(rows) < num_rows and _bucket(len(request.query.prompt_ids)) == bucket)
