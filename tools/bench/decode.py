"""The JAX engine's decoding against transformers.generate: the same weights, prompts and precision, in turns.

A completion ends at any of the vocabulary's first tokens, so many that lengths are mixed: of random weights the next
token is nearly uniform, and about one in `max_tokens` x 0.3 is an end. Completion tokens are counted, ends included.
The limit is that of this machine for a step of the whole batch: its products of square matrices, or reading weights and
cache once, whichever takes longer, both measured in the same run.
"""

import tempfile
from pathlib import Path
from typing import Any

import click
import numpy as np

from sgpo_jax.models.architecture import Architecture
from sgpo_jax.models.weights import num_parameters
from tools.bench.models import MODELS, make_model
from tools.bench.report import Report, Row
from tools.bench.train_step import OPTIMIZER
from tools.bench.workload import run_jax, run_torch

# longest prompt and completion
SCALES = {"toy": (16, 24), "30m": (96, 256), "0.5b": (96, 128)}


@click.command(help=__doc__)
@click.option("--model", type=click.Choice(list(MODELS)), default="30m", show_default=True)
@click.option("--dtype", type=click.Choice(["float32", "bfloat16"]), default="float32", show_default=True)
@click.option("--batch", type=click.IntRange(min=1), default=64, show_default=True)
@click.option("--runs", type=click.IntRange(min=1), default=5, show_default=True)
@click.option("--json", "json_file", type=click.Path(path_type=Path, dir_okay=False))
def main(model: str, dtype: str, batch: int, runs: int, json_file: Path | None) -> None:
    max_prompt, max_tokens = SCALES[model]
    with tempfile.TemporaryDirectory() as directory:
        # Small weights: logits near 0, so that ends come at their rate.
        arch = make_model(MODELS[model], Path(directory) / "model", std=0.005)
        rng = np.random.default_rng(0)
        first = arch.vocab_size // 4
        spec: dict[str, Any] = {
            "work": "decode",
            "model": str(Path(directory) / "model"),
            "dtype": dtype,
            "prompts": [
                rng.integers(first, arch.vocab_size, rng.integers(max_prompt // 4, max_prompt + 1)).tolist()
                for _ in range(batch)
            ],
            "stop_ids": list(range(max(1, round(arch.vocab_size / (0.3 * max_tokens))))),
            "max_prompt": max_prompt,
            "max_tokens": max_tokens,
            "batch_size": batch,
            "micro_batch_tokens": 1024,
            "remat": "none",
            "optimizer": OPTIMIZER,
            "clip_low": 0.2,
            "clip_high": 0.28,
            "steps": 2,
        }
        pairs = []
        for run in range(runs):
            sides = {"jax": run_jax, "torch": run_torch}
            results = {name: sides[name](spec) for name in (sides if run % 2 else reversed(sides))}
            pairs.append((results["jax"], results["torch"]))
            rates = {name: rate(result) for name, result in results.items()}
            print(f"run {run}: {', '.join(f'{name} {r:.0f} tokens/s' for name, r in rates.items())}", flush=True)
    rows = rows_of(spec, arch, pairs)
    settings = {"model": model, "dtype": dtype, "batch": batch, "runs": runs}
    Report("decoding", settings, rows, pairs[0][1]["versions"]).finish(json_file)


def rate(result: dict[str, Any]) -> float:
    """Completion tokens a second, the best of the run."""
    return max(tokens / seconds for tokens, seconds in zip(result["tokens"], result["seconds"], strict=True))


def rows_of(spec: dict[str, Any], arch: Architecture, pairs: list[tuple[dict, dict]]) -> list[Row]:
    lengths = [np.mean(ours["tokens"]) / len(spec["prompts"]) for ours, _ in pairs]
    return [
        Row("tokens/s", [rate(ours) for ours, _ in pairs], unit="tokens/s"),
        Row("mean completion", [float(length) for length in lengths], unit="tokens"),
        Row(
            "tokens/s",
            [rate(ours) / rate(theirs) for ours, theirs in pairs],
            against=f"transformers.generate ({pairs[0][1]['attention']} attention)",
            at_least=3.0,
        ),
        Row(
            "tokens/s",
            [rate(ours) / limit(spec, arch, ours) for ours, _ in pairs],
            against="the machine's limit for the batch",
            at_least=0.4,
        ),
    ]


def limit(spec: dict[str, Any], arch: Architecture, ours: dict[str, Any]) -> float:
    """Completion tokens a second where every slot is busy, and a step takes what its products or its reads take."""
    batch, itemsize = len(spec["prompts"]), 4 if spec["dtype"] == "float32" else 2
    held = np.mean([len(prompt) for prompt in spec["prompts"]]) + np.mean(ours["tokens"]) / batch / 2  # in the cache
    num_params = num_parameters(arch)
    width = arch.num_layers * arch.head_dim
    flops = batch * (2 * num_params + 4 * held * width * arch.num_heads)
    read = itemsize * (num_params + batch * held * 2 * width * arch.num_kv_heads)
    return batch / max(flops / ours["matmul_flops"], read / ours["bandwidth"])
