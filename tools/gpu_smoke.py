"""One GPU put to the test, in under 5 minutes: kernels against plain attention, a real training step, decoding.

    bash tools/gpu_smoke.sh            on the GPU; see there for an image without this project's requirements
    python tools/gpu_smoke.py --toy    the script itself, on any machine, with a toy model

The model is the largest Qwen2.5 whose training state fits, with random weights; step, packing and sampler are the
product's own, in bfloat16. Prints a line a figure, then all of them as one line of JSON. Exit code 1: a kernel is
missing, or wrong, or a step or a sampled log-probability is; 2: there is no GPU.
"""

import argparse
import faulthandler
import json
import os
import platform
import sys
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from typing import Any, cast, get_args

import jax
import jax.extend
import jax.numpy as jnp
import numpy as np
from flax import nnx

from sgpo_jax.config import Config, RolloutsConfig, parse_config
from sgpo_jax.data.batching import Batch, TrainSequence, batch_shape, completions_of, pack, padding_frac
from sgpo_jax.hardware import DEVICES
from sgpo_jax.models.architecture import Architecture
from sgpo_jax.models.attention import Implementation, choose_attention, packed_attention
from sgpo_jax.models.qwen import Transformer
from sgpo_jax.models.weights import num_parameters
from sgpo_jax.rollouts.jax_engine import JaxEngine
from sgpo_jax.training.state import TrainState, initial_state
from sgpo_jax.training.step import TrainStep
from sgpo_jax.types import Completion, GroupRequest, MachineError, Purpose, Query, SamplingParams, UserError

LIMIT_S = 285  # the process ends by itself after that, wherever it is
DECODE_BY_S = 200  # and does not begin to decode later than that

PACKAGES = (
    *("jax", "jaxlib", "jax-cuda12-plugin", "jax-cuda13-plugin", "nvidia-cudnn-cu12", "nvidia-cudnn-cu13"),
    *("flax", "optax", "chex", "orbax-checkpoint", "safetensors", "numpy", "pydantic", "tokamax"),
)

# The peaks of hardware.DEVICES are those of these modules.
KINDS = {
    "NVIDIA A100-SXM4-40GB": "a100-40gb",
    "NVIDIA A100-SXM4-80GB": "a100-80gb",
    "NVIDIA H100 80GB HBM3": "h100-80gb",
    "NVIDIA H200": "h200",
    "NVIDIA B200": "b200",
}


def qwen(vocab_size: int, layers: int, model: int, heads: int, kv_heads: int, mlp: int, *, tied: bool) -> Architecture:
    """A Qwen2.5, as its config.json on the Hugging Face hub describes it."""
    return Architecture(
        family="qwen2",
        vocab_size=vocab_size,
        num_layers=layers,
        model_dim=model,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=model // heads,
        mlp_dim=mlp,
        rope_theta=1e6,
        rms_norm_eps=1e-6,
        tie_embeddings=tied,
        qkv_bias=True,
        output_bias=False,
        qk_norm=False,
        max_positions=32768,
    )


MODELS = {
    "Qwen2.5-7B": qwen(152_064, 28, 3584, 28, 4, 18_944, tied=False),
    "Qwen2.5-3B": qwen(151_936, 36, 2048, 16, 2, 11_008, tied=True),
    "Qwen2.5-1.5B": qwen(151_936, 28, 1536, 12, 2, 8_960, tied=True),
    "Qwen2.5-0.5B": qwen(151_936, 24, 896, 14, 2, 4_864, tied=True),
}

# Float32 parameters, two moments of Adam, the summed gradient, and a micro-batch's gradient beside it.
BYTES_PER_PARAM = 4 * (1 + 2 + 1 + 1)
# Of a micro-batch of FULL, all but those gradients: compiled for a TPU v5p with splash, Qwen2.5-3B takes 8.9 GB.
ACTIVATION_BYTES = 9 * 10**9


@dataclass(frozen=True)
class Scale:
    """max_prompt, max_completion: in tokens. num_queries: of a step, with group_size rollouts each. decode_slots,
    decode_tokens: completions side by side, and their length."""

    max_prompt: int
    max_completion: int
    micro_batch_tokens: int
    num_queries: int
    group_size: int
    num_steps: int
    decode_slots: int
    decode_tokens: int
    attention_rows: int


FULL = Scale(256, 1792, 8192, 12, 8, 3, 128, 256, 4)
TOY = Scale(16, 112, 256, 2, 4, 2, 4, 8, 2)
TOY_MODEL = qwen(512, 2, 64, 4, 2, 96, tied=True)

Heads = tuple[jax.Array, jax.Array, jax.Array]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--toy", action="store_true", help="a toy model, on whatever JAX runs on")
    toy = parser.parse_args(arguments).toy
    os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.92")  # JAX's own 0.75 would leave a quarter unused
    if not toy and jax.default_backend() != "gpu":
        print(f"gpu_smoke: JAX runs on {jax.default_backend()}, not on a GPU; --toy tries the script", file=sys.stderr)
        return 2
    faulthandler.dump_traceback_later(LIMIT_S, exit=True)
    figures: dict[str, Any] = {}
    try:
        for name, value in measure(toy):
            figures[name] = value
            print(f"{name}: {f'{value:.4g}' if isinstance(value, float) else value}", flush=True)
    except (MachineError, UserError) as error:
        print(f"gpu_smoke: {error}", file=sys.stderr)
        return 1
    finally:
        faulthandler.cancel_dump_traceback_later()
        print(json.dumps(figures))
    return 0


Figures = Iterator[tuple[str, Any]]


def measure(toy: bool) -> Figures:
    """Everything, figure by figure. Raises MachineError at the first thing that is wrong."""
    start = time.perf_counter()
    yield from describe_machine()
    scale = TOY if toy else FULL
    limit = (jax.devices()[0].memory_stats() or {}).get("bytes_limit", 0)
    name, arch = ("toy", TOY_MODEL) if toy else largest_that_fits(limit)
    yield "model", name
    yield "parameters_millions", num_parameters(arch) / 1e6
    yield from compare_attention(arch, scale)
    choice = choose_attention("auto", arch, "bfloat16")
    yield "model.attention", f"{choice.implementation} ({choice.reason})"
    if not toy and choice.implementation != "cudnn":
        raise MachineError(f"attention is {choice.implementation} on a GPU: {choice.reason}")
    config = make_config(scale)
    model = Transformer(arch, rngs=nnx.Rngs(0), compute_dtype="bfloat16", remat="full", attention=choice.implementation)
    graphdef, params = nnx.split(model)
    del model
    step = TrainStep(nnx.merge(graphdef, params), config)
    state = initial_state(params, step.optimizer)
    params = yield from train(step, state, arch, scale, config)
    del state  # the optimizer's moments make room for the sampler's cache
    spent = time.perf_counter() - start
    if spent < DECODE_BY_S:
        yield from decode(nnx.merge(graphdef, params), step, scale, config)
    else:
        yield "decode", f"left out: {spent:.0f} s were spent before it"
    yield "seconds", time.perf_counter() - start


def describe_machine() -> Figures:
    device = jax.devices()[0]
    yield "python", platform.python_version()
    for package in PACKAGES:
        with suppress(PackageNotFoundError):
            yield package, version(package)
    yield "platform", " ".join(jax.extend.backend.get_backend().platform_version.split())
    yield "device", device.device_kind
    yield "compute_capability", str(getattr(device, "compute_capability", "none"))
    yield "memory_limit_gib", (device.memory_stats() or {}).get("bytes_limit", 0) / 2**30


def largest_that_fits(memory_bytes: int) -> tuple[str, Architecture]:
    """The largest of MODELS whose training state fits beside a micro-batch's activations.

    Raises MachineError where none does.
    """
    for name, arch in MODELS.items():
        if BYTES_PER_PARAM * num_parameters(arch) + ACTIVATION_BYTES <= memory_bytes:
            return name, arch
    raise MachineError(f"no model of {', '.join(MODELS)} fits {memory_bytes / 1e9:.1f} GB of device memory")


def make_config(scale: Scale) -> Config:
    return parse_config(
        {
            "run_dir": "unused",
            "model": {"path": "unused", "compute_dtype": "bfloat16"},
            "data": {"train": [{"path": "unused"}], "max_prompt_tokens": scale.max_prompt},
            "rollouts": {"max_completion_tokens": scale.max_completion},
            "train": {"micro_batch_tokens": scale.micro_batch_tokens},
        },
        "gpu_smoke",
    )


def compare_attention(arch: Architecture, scale: Scale) -> Figures:
    """Each implementation that runs here, in bfloat16, on packed rows: its error against plain attention in float32,
    which must not be far above plain attention's own in bfloat16, what it must not see, and the time of its gradient.
    """
    rng = np.random.default_rng(0)
    length = scale.max_prompt + scale.max_completion
    segment_ids_BT = packed_segments(rng, scale.attention_rows, length)
    counts = arch.num_heads, arch.num_kv_heads, arch.num_kv_heads
    shapes = [(scale.attention_rows, length, count, arch.head_dim) for count in counts]
    heads = cast("Heads", tuple(jnp.asarray(rng.normal(size=shape), jnp.bfloat16) for shape in shapes))
    exact = [x.astype(jnp.float32) for x in heads]
    with jax.default_matmul_precision("highest"):  # not in TF32
        wanted = jax.jit(partial(value_and_gradient, "plain"))(segment_ids_BT, *exact)
    own_errors: dict[str, float] = {}
    for name in get_args(Implementation):
        try:
            choose_attention(name, arch, "bfloat16")
        except UserError as error:
            yield f"attention/{name}", f"not here: {error}"
            continue
        program = jax.jit(partial(value_and_gradient, name))
        errors = relative_errors(program(segment_ids_BT, *heads), wanted)
        own_errors = own_errors or errors  # plain is the first
        for part, value in errors.items():
            yield f"attention/{name}/error_{part}", value
            usual = own_errors[part]
            if not value <= 3 * usual + 1e-3:
                raise MachineError(
                    f"attention/{name}: {part} is off by {value:.3g} of its size; plain is by {usual:.3g}"
                )
        check_blindness(name, segment_ids_BT, heads)
        yield f"attention/{name}/gradient_ms", 1e3 * median_seconds(partial(program, segment_ids_BT, *heads))


def packed_segments(rng: np.random.Generator, num_rows: int, length: int) -> np.ndarray:
    """Rows of a few segments each, and some padding at the end."""
    segment_ids_BT = np.zeros((num_rows, length), np.int32)
    for row_T in segment_ids_BT:
        ends = np.sort(rng.choice(np.arange(1, length), 4, replace=False))
        row_T[: ends[-1]] = 1 + np.searchsorted(ends[:-1], np.arange(ends[-1]), side="right")
    return segment_ids_BT


def value_and_gradient(name: Implementation, segment_ids_BT: jax.Array, *heads: jax.Array) -> tuple[jax.Array, ...]:
    """Attention's output, 0 at padding, and the gradient of a sum of sines of it by queries, keys and values."""

    def total(*heads: jax.Array) -> tuple[jax.Array, jax.Array]:
        y_BTNH = packed_attention(name, segment_ids_BT)(*cast("Heads", heads)).astype(jnp.float32)
        y_BTNH = y_BTNH * (segment_ids_BT > 0)[:, :, None, None]
        return jnp.sum(jnp.sin(3 * y_BTNH)), y_BTNH

    (_, y_BTNH), gradient = jax.value_and_grad(total, argnums=(0, 1, 2), has_aux=True)(*heads)
    return y_BTNH, *gradient


def relative_errors(found: Sequence[jax.Array], wanted: Sequence[jax.Array]) -> dict[str, float]:
    """By part, the root of the mean squared difference over that of what is wanted."""

    def norm(x: jax.Array) -> float:
        return float(jnp.sqrt(jnp.mean(jnp.square(x.astype(jnp.float32)))))

    parts = "output", "q_gradient", "k_gradient", "v_gradient"
    return {part: norm(x - y) / norm(y) for part, x, y in zip(parts, found, wanted, strict=True)}


def check_blindness(name: Implementation, segment_ids_BT: np.ndarray, heads: Heads) -> None:
    """Raises MachineError where some token's output depends on a key or value of the future or of another segment."""
    length = segment_ids_BT.shape[1]

    @jax.jit
    def gradient(token: jax.Array, q: jax.Array, k: jax.Array, v: jax.Array) -> Any:
        def output(kv: tuple[jax.Array, jax.Array]) -> jax.Array:
            y_BTNH = packed_attention(name, jnp.asarray(segment_ids_BT))(q, *kv)
            return jnp.sum(jnp.sin(3 * y_BTNH[:, token].astype(jnp.float32)))

        return jax.grad(output)((k, v))

    for token in np.linspace(0, length - 1, 7).astype(int):
        may_see_BT = (segment_ids_BT == segment_ids_BT[:, [token]]) & (np.arange(length) <= token)
        for gradient_BTKH in gradient(token, *heads):
            sees_BT = np.asarray(jnp.abs(gradient_BTKH).max(axis=(2, 3))) != 0  # NaN counts
            if (sees_BT & ~may_see_BT).any():
                raise MachineError(f"attention/{name}: token {token} sees the future or another segment")


def median_seconds(call: Callable[[], Any], repeats: int = 5) -> float:
    seconds = []
    for _ in range(repeats):
        start = time.perf_counter()
        jax.block_until_ready(call())
        seconds.append(time.perf_counter() - start)
    return float(np.median(seconds))


def draw_sequences(rng: np.random.Generator, vocab_size: int, scale: Scale) -> list[TrainSequence]:
    """Groups of rollouts, a third of each right; prompts of any length, completions with a long tail."""
    sequences = []
    for group in range(scale.num_queries):
        prompt_ids = rng.integers(0, vocab_size, rng.integers(scale.max_prompt // 4, scale.max_prompt + 1))
        rewards = rng.permutation(np.arange(scale.group_size) % 3 == 0).astype(float)
        for advantage in (rewards - rewards.mean()) / rewards.std():
            length = int(np.clip(scale.max_completion * rng.lognormal(-1.2, 0.7), 2, scale.max_completion))
            completion_ids = rng.integers(0, vocab_size, length).astype(np.int32)
            logprobs = np.full(length, -np.log(vocab_size), np.float32)
            sequences.append(TrainSequence(prompt_ids, completion_ids, logprobs, float(advantage), group))
    return sequences


def pack_rows(sequences: Sequence[TrainSequence], config: Config) -> list[Batch]:
    rollouts = config.rollouts
    shape = batch_shape(
        config.data.max_prompt_tokens, rollouts.max_completion_tokens, config.train.micro_batch_tokens, row_multiple=1
    )
    return pack(sequences, shape)


def train(
    step: TrainStep, state: TrainState, arch: Architecture, scale: Scale, config: Config
) -> Generator[tuple[str, Any], None, nnx.State]:
    """The updates' figures; returns the parameters after them."""
    sequences = draw_sequences(np.random.default_rng(1), arch.vocab_size, scale)
    batches = pack_rows(sequences, config)
    yield "train/micro_batches", len(batches)
    yield "train/row_length", batches[0].token_ids_BT.shape[1]
    yield "train/padding_frac", padding_frac(batches)
    seconds = []
    for number in range(scale.num_steps + 1):  # the first compiles
        start = time.perf_counter()
        state, result = step.update(state, batches, learning_rate=1e-6)
        jax.block_until_ready(state)
        seconds.append(time.perf_counter() - start)
        if not (result.is_finite and result.grad_norm > 0):
            raise MachineError(f"update {number}: loss {result.loss}, gradient norm {result.grad_norm}")
    yield "train/loss", result.loss
    yield "train/grad_norm", result.grad_norm
    yield "train/first_step_s", seconds[0]
    yield "train/step_s", float(np.median(seconds[1:]))
    num_tokens = sum(sequence.num_tokens for sequence in sequences)
    tokens_per_s = num_tokens / float(np.median(seconds[1:]))
    yield "train/tokens", num_tokens
    yield "train/tokens_per_s", tokens_per_s
    yield "train/peak_memory_gib", (jax.devices()[0].memory_stats() or {}).get("peak_bytes_in_use", 0) / 2**30
    kind = jax.devices()[0].device_kind
    if kind in KINDS:  # 6P a token: padding, attention and recomputation are not counted
        peak = DEVICES[KINDS[kind]].bf16_flops_per_s
        yield "train/mfu", 6 * num_parameters(arch) * tokens_per_s / peak
    else:
        yield "train/mfu", f"unknown: no peak is known here for {kind}"
    return state.params


def decode(model: Transformer, step: TrainStep, scale: Scale, config: Config) -> Figures:
    """The sampler's speed, and its log-probs against the trainer's forward pass, which attends in another way."""
    rng = np.random.default_rng(2)
    prompts = rng.integers(0, model.arch.vocab_size, (scale.decode_slots, scale.max_prompt)).tolist()
    queries = [Query(str(i), "", "", "exact", "gpu_smoke", "", tuple(prompt)) for i, prompt in enumerate(prompts)]
    options = RolloutsConfig(batch_size=scale.decode_slots, prefill_tokens=8 * scale.max_prompt)
    engine = JaxEngine(model, stop_ids=(), max_prompt_tokens=scale.max_prompt, config=options, run_seed=0)
    sampling = SamplingParams(scale.decode_tokens)
    completions: list[Completion] = []
    for visit in range(2):  # the first compiles
        start = time.perf_counter()
        requests = [GroupRequest(query, 1, Purpose.EVALUATE, visit) for query in queries]
        groups = sorted(engine.generate(requests, sampling), key=lambda group: int(group.request.query.query_id))
        completions = [group.completions[0] for group in groups]
        seconds = time.perf_counter() - start
    yield "decode/slots", scale.decode_slots
    yield "decode/tokens_per_s", sum(len(one.token_ids_C) for one in completions) / seconds
    sequences = [
        TrainSequence(query.prompt_ids, one.token_ids_C, one.sampler_logprobs_C, 0.0, number)
        for number, (query, one) in enumerate(zip(queries, completions, strict=True))
    ]
    batches = pack_rows(sequences, config)
    trainer = completions_of(sequences, batches, step.logprobs(nnx.state(model), batches))
    gaps = np.concatenate([np.abs(ours - s.sampler_logprobs_C) for ours, s in zip(trainer, sequences, strict=True)])
    yield "decode/mean_logprob_gap", float(gaps.mean())
    yield "decode/max_logprob_gap", float(gaps.max())
    if not gaps.mean() < 0.05:
        raise MachineError(f"sampled log-probs are {gaps.mean():.3g} from the trainer's in the mean")


if __name__ == "__main__":
    sys.exit(main())
