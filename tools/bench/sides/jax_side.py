"""What sgpo_jax does with the same work: its own train step, packing and engine, as a run calls them.

Reads a specification (JSON) named on the command line, prints its result as one line of JSON.
"""

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from sgpo_jax.config import Config, parse_config
from sgpo_jax.data.batching import TrainSequence, batch_shape, pack, padding_frac
from sgpo_jax.files import read_json
from sgpo_jax.models.safetensors import load_model
from sgpo_jax.models.sharding import make_mesh
from sgpo_jax.rollouts.jax_engine import JaxEngine
from sgpo_jax.training.state import initial_state
from sgpo_jax.training.step import TrainStep
from sgpo_jax.types import GroupRequest, Purpose, Query, SamplingParams


def main(path: str) -> None:
    spec = read_json(Path(path))
    result = {"train": train, "decode": decode}[spec["work"]](spec)
    print(json.dumps(result))


def make_config(spec: dict[str, Any]) -> Config:
    return parse_config(
        {
            "run_dir": "unused",
            "model": {"path": spec["model"], "compute_dtype": spec["dtype"], "remat": spec["remat"]},
            "data": {"train": [{"path": "unused"}], "max_prompt_tokens": spec["max_prompt"]},
            "rollouts": {"max_completion_tokens": spec["max_tokens"], "batch_size": spec["batch_size"]},
            "train": {
                "micro_batch_tokens": spec["micro_batch_tokens"],
                "optimizer": spec["optimizer"],
                "loss": {"clip_low": spec["clip_low"], "clip_high": spec["clip_high"]},
            },
        },
        "benchmark",
    )


def train(spec: dict[str, Any]) -> dict[str, Any]:
    """Seconds of every update after the first, which compiles; packing and the copy of the results included."""
    config = make_config(spec)
    devices = len(jax.devices())
    mesh = make_mesh(config.mesh) if devices > 1 else None
    if mesh is not None:
        jax.set_mesh(mesh)
    before = memory("VmRSS")
    model = load_model(Path(spec["model"]), compute_dtype=spec["dtype"], remat=spec["remat"], mesh=mesh)
    step = TrainStep(model, config)
    state = initial_state(nnx.state(model, nnx.Param), step.optimizer)
    del model
    sequences = [
        TrainSequence(
            r["prompt"],
            np.array(r["completion"], np.int32),
            np.zeros(len(r["completion"]), np.float32),
            r["advantage"],
            r["group"],
        )
        for r in spec["rollouts"]
    ]
    shape = batch_shape(spec["max_prompt"], spec["max_tokens"], spec["micro_batch_tokens"], row_multiple=devices)

    def update() -> Any:
        nonlocal state
        batches = pack(sequences, shape)
        state, result = step.update(state, batches, config.train.optimizer.learning_rate)
        jax.block_until_ready(state)
        return batches, result

    compile_s, (batches, first) = timed(update)
    seconds = [timed(update)[0] for _ in range(spec["steps"])]
    return {
        "seconds": seconds,
        "first": {"loss": first.loss, "grad_norm": first.grad_norm},
        "padding": padding_frac(batches),
        "compilations": step.num_compilations,
        "first_s": compile_s,
        "peak_bytes": memory("VmHWM") - before,
        "matmul_flops": matmul_rate(jnp.dtype(spec["dtype"])),
    }


def decode(spec: dict[str, Any]) -> dict[str, Any]:
    """Completion tokens and seconds of every generation after the first, which compiles."""
    config = make_config(spec)
    model = load_model(Path(spec["model"]), compute_dtype=spec["dtype"], remat="none")
    engine = JaxEngine(
        model, stop_ids=spec["stop_ids"], max_prompt_tokens=spec["max_prompt"], config=config.rollouts, run_seed=0
    )
    queries = [
        Query(f"q{number}", "", "", "exact", "benchmark", "", tuple(prompt))
        for number, prompt in enumerate(spec["prompts"])
    ]

    def generate(visit: int) -> int:
        requests = [GroupRequest(query, 1, Purpose.TRAIN, visit) for query in queries]
        groups = engine.generate(requests, SamplingParams(spec["max_tokens"]))
        return sum(len(completion.token_ids_C) for group in groups for completion in group.completions)

    generate(0)
    runs = [timed(generate, visit) for visit in range(1, spec["steps"] + 1)]
    return {
        "seconds": [seconds for seconds, _ in runs],
        "tokens": [count for _, count in runs],
        "matmul_flops": matmul_rate(jnp.dtype(spec["dtype"])),
        "bandwidth": bandwidth(),
    }


def timed(call: Callable[..., Any], *args: Any) -> tuple[float, Any]:
    begun = time.perf_counter()
    result = call(*args)
    return time.perf_counter() - begun, result


def matmul_rate(dtype: np.dtype, size: int = 2048, repeats: int = 5) -> float:
    """The best of this machine's FLOPs a second, in products of square matrices."""
    key = jax.random.key(0)
    a, b = (jax.random.normal(k, (size, size), dtype) for k in jax.random.split(key))
    multiply = jax.jit(jnp.matmul)
    jax.block_until_ready(multiply(a, b))
    return max(2 * size**3 / timed(lambda: jax.block_until_ready(multiply(a, b)))[0] for _ in range(repeats))


def bandwidth(num_bytes: int = 1 << 29, repeats: int = 5) -> float:
    """The best of this machine's bytes read a second: a sum over an array far larger than its caches."""
    x = jnp.ones(num_bytes // 4, jnp.float32)
    total = jax.jit(jnp.sum)
    jax.block_until_ready(total(x))
    return max(num_bytes / timed(lambda: jax.block_until_ready(total(x)))[0] for _ in range(repeats))


def memory(kind: str) -> int:
    """Bytes: VmRSS now, VmHWM the most so far."""
    return int(Path("/proc/self/status").read_text().split(f"{kind}:")[1].split()[0]) * 1024


if __name__ == "__main__":
    main(sys.argv[1])
