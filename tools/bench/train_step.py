"""The train step against PyTorch's: the same weights, rollouts, loss, gradient clipping and AdamW, in turns.

The other side is transformers' model of the same weights with its faster attention on this machine, padded as TRL pads.
Tokens are those of the rollouts, prompts included; padding is none. Both sides' first losses and gradients' norms must
agree. The machine's rate is that of products of square matrices in the same run and precision; the step's FLOPs are 6
for each parameter and token, and those of causal attention.
"""

import math
import tempfile
from pathlib import Path
from typing import Any

import click

from sgpo_jax.models.architecture import Architecture
from sgpo_jax.models.weights import num_parameters
from tools.bench.models import MODELS, make_model
from tools.bench.report import Report, Row
from tools.bench.workload import draw_rollouts, run_jax, run_torch

# rollouts a step, longest prompt and completion, tokens of a micro-batch here, rows of one there, what is recomputed
SCALES = {
    "toy": (8, 16, 32, 128, 4, "none"),
    "30m": (32, 96, 512, 4096, 8, "none"),
    "0.5b": (8, 96, 512, 1216, 2, "none"),
}
MOST_MEMORY = {"0.5b": 1.6}  # times weights, gradients and moments; of smaller models the rest weighs more
OPTIMIZER = {
    "learning_rate": 1e-6,
    "beta1": 0.9,
    "beta2": 0.999,
    "eps": 1e-8,
    "weight_decay": 0.01,
    "clip_norm": 1.0,
}


@click.command(help=__doc__)
@click.option("--model", type=click.Choice(list(MODELS)), default="30m", show_default=True)
@click.option("--dtype", type=click.Choice(["float32", "bfloat16"]), default="float32", show_default=True)
@click.option("--group-sizes", default="2,4,8", show_default=True)
@click.option("--runs", type=click.IntRange(min=1), default=5, show_default=True)
@click.option("--steps", type=click.IntRange(min=1), default=2, show_default=True, help="Timed updates of a run.")
@click.option("--micro-batch-tokens", type=int, default=None, help="Of our side; empty: by model.")
@click.option("--remat", type=click.Choice(["none", "dots", "full"]), default=None, help="Of our side.")
@click.option("--json", "json_file", type=click.Path(path_type=Path, dir_okay=False))
def main(
    model: str,
    dtype: str,
    group_sizes: str,
    runs: int,
    steps: int,
    micro_batch_tokens: int | None,
    remat: str | None,
    json_file: Path | None,
) -> None:
    num, max_prompt, max_tokens, own_tokens, micro_batch_rows, own_remat = SCALES[model]
    rows: list[Row] = []
    versions: dict[str, str] = {}
    with tempfile.TemporaryDirectory() as directory:
        arch = make_model(MODELS[model], Path(directory) / "model")
        for group_size in map(int, group_sizes.split(",")):
            spec = make_spec(
                Path(directory) / "model",
                arch,
                num=num,
                group_size=group_size,
                max_prompt=max_prompt,
                max_tokens=max_tokens,
            )
            spec |= {
                "dtype": dtype,
                "micro_batch_tokens": micro_batch_tokens or own_tokens,
                "micro_batch_rows": micro_batch_rows,
                "remat": remat or own_remat,
                "steps": steps,
            }
            pairs = [pair(spec, run) for run in range(runs)]
            versions = pairs[0][1]["versions"]
            rows += rows_of(f"G = {group_size}", spec, arch, pairs, most_memory=MOST_MEMORY.get(model))
    settings = {"model": model, "dtype": dtype, "rollouts a step": num, "runs": runs}
    Report("seconds of a train step", settings, rows, versions).finish(json_file)


def make_spec(
    model_dir: Path, arch: Architecture, *, num: int, group_size: int, max_prompt: int, max_tokens: int
) -> dict[str, Any]:
    """Updates in float32 on `num` rollouts, for both sides."""
    return {
        "work": "train",
        "model": str(model_dir),
        "dtype": "float32",
        "rollouts": draw_rollouts(arch.vocab_size, num, group_size, max_prompt, max_tokens),
        "max_prompt": max_prompt,
        "max_tokens": max_tokens,
        "batch_size": num,
        "remat": "none",
        "optimizer": OPTIMIZER,
        "clip_low": 0.2,
        "clip_high": 0.28,
    }


def pair(spec: dict[str, Any], run: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """Our result and torch's, by turns first and second."""
    sides = {"jax": run_jax, "torch": run_torch}
    results = {name: sides[name](spec) for name in (sides if run % 2 else reversed(sides))}
    ours, theirs = results["jax"], results["torch"]
    check_equal(ours["first"], theirs["first"], spec["dtype"])
    print(f"run {run}: {min(ours['seconds']):.2f} s, torch {min(theirs['seconds']):.2f} s", flush=True)
    return ours, theirs


def check_equal(ours: dict[str, float], theirs: dict[str, float], dtype: str) -> None:
    """The two must have done the same. Raises ClickException where they did not."""
    tolerance = 1e-3 if dtype == "float32" else 0.05
    norms = ours["grad_norm"], theirs["grad_norm"]
    if not (math.isclose(*norms, rel_tol=tolerance) and abs(ours["loss"] - theirs["loss"]) < 1e-4):
        raise click.ClickException(f"the two sides computed different things: {ours} and {theirs}")


def rows_of(
    label: str,
    spec: dict[str, Any],
    arch: Architecture,
    pairs: list[tuple[dict, dict]],
    most_memory: float | None,
) -> list[Row]:
    lengths = [len(r["prompt"]) + len(r["completion"]) for r in spec["rollouts"]]
    flops = step_flops(arch, lengths)
    arithmetic = 16 * num_parameters(arch)  # float32 weights, gradients, two moments
    tokens = sum(lengths)
    return [
        Row(f"{label}: tokens/s", [tokens / min(ours["seconds"]) for ours, _ in pairs], unit="tokens/s"),
        Row(
            f"{label}: tokens/s",
            [min(theirs["seconds"]) / min(ours["seconds"]) for ours, theirs in pairs],
            against=f"PyTorch ({pairs[0][1]['attention']} attention)",
            at_least=2.0,
        ),
        Row(
            f"{label}: FLOPs/s",
            [flops / min(ours["seconds"]) / ours["matmul_flops"] for ours, _ in pairs],
            against="the machine's products",
            at_least=0.6,
        ),
        Row(f"{label}: padding", [ours["padding"] for ours, _ in pairs], against="token slots", at_most=0.08),
        Row(
            f"{label}: padding there",
            [1 - tokens / theirs["slots"] for _, theirs in pairs],
            against="token slots",
        ),
        Row(
            f"{label}: memory",
            [ours["peak_bytes"] / arithmetic for ours, _ in pairs],
            against="weights, gradients, moments",
            at_most=most_memory,
        ),
    ]


def step_flops(arch: Architecture, lengths: list[int]) -> float:
    """6 for each parameter and token; 6 for each pair of tokens, head dimension and layer (scores and values, of which
    causal attention needs half).
    """
    attention = 6 * arch.num_layers * arch.num_heads * arch.head_dim * sum(length**2 for length in lengths)
    return 6 * num_parameters(arch) * sum(lengths) + attention
