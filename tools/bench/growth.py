"""How the train step's time and memory grow with completion length, group size, model size and number of devices.

Each is varied alone, and drawn beside what arithmetic says: FLOPs as `train-step` counts them, at the rate of the first
point; bytes as `launch check` estimates them. Simulated devices share this machine: their time should stay, and the
bytes are those of all together. Writes growth-{length,group,model,devices}.png and growth.json into OUT.
"""

import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import click

from sgpo_jax.check.memory import Sizes, estimate
from sgpo_jax.data.batching import batch_shape
from sgpo_jax.files import write_json
from sgpo_jax.models.architecture import Architecture, read_architecture
from sgpo_jax.models.weights import num_parameters
from tools.bench.models import make_model, qwen2
from tools.bench.report import machine, versions_of
from tools.bench.train_step import make_spec, step_flops
from tools.bench.workload import run_jax

VOCABULARY_CHUNK = 1024  # tokens, the configuration's default
MODELS = {
    "toy": qwen2(256, 2, 64, 4, 2, 128),
    "7m": qwen2(8_192, 4, 256, 4, 2, 768),
    "30m": qwen2(8_192, 8, 512, 8, 4, 1_536),
    "120m": qwen2(8_192, 16, 768, 12, 4, 2_304),
}


@dataclass(frozen=True)
class Scale:
    """What to go through; model, length and num (rollouts of a step) are what the others are varied at."""

    lengths: Sequence[int]
    group_sizes: Sequence[int]
    models: Sequence[str]
    devices: Sequence[int]
    model: str
    length: int
    num: int


SCALES = {
    "toy": Scale((16, 32), (2, 4), ("toy",), (1, 2), "toy", 32, 8),
    "full": Scale((256, 512, 1024, 2048, 4096), (2, 4, 8, 16), ("7m", "30m", "120m"), (1, 2, 4, 8), "30m", 512, 16),
}


@dataclass(frozen=True)
class Point:
    x: float
    seconds: float
    flops: float
    peak_bytes: int
    estimated_bytes: int


@click.command(help=__doc__)
@click.argument("out", type=click.Path(path_type=Path, file_okay=False))
@click.option("--scale", type=click.Choice(list(SCALES)), default="full", show_default=True)
@click.option("--steps", type=click.IntRange(min=1), default=2, show_default=True, help="Timed updates of a point.")
def main(out: Path, scale: str, steps: int) -> None:
    sizes = SCALES[scale]
    out.mkdir(parents=True, exist_ok=True)
    found: dict[str, list[Point]] = {}
    with tempfile.TemporaryDirectory() as directory:
        archs = {name: make_model(MODELS[name], Path(directory) / name) for name in sizes.models}
        for what, label, changes in variations(sizes, archs):
            found[what] = []
            for x, change in changes:
                found[what].append(measure(Path(directory), sizes, steps, x, **change))
                print(f"{what} {x:g}: {asdict(found[what][-1])}", flush=True)
            draw(out / f"growth-{what}.png", label, found[what])
    content = {what: [asdict(point) for point in points] for what, points in found.items()}
    versions = versions_of(("jax", "jaxlib", "flax", "numpy"))
    write_json(out / "growth.json", {"machine": machine(), "versions": versions, "points": content})


def variations(
    scale: Scale, archs: Mapping[str, Architecture]
) -> Iterator[tuple[str, str, list[tuple[float, dict[str, Any]]]]]:
    """What is varied, its axis, and the values with what they change."""
    yield "length", "completion tokens", [(x, {"length": x, "num": 2}) for x in scale.lengths]
    yield "group", "group size, of as many queries", [(x, {"group_size": x, "num": 2 * x}) for x in scale.group_sizes]
    yield (
        "model",
        "parameters, in millions",
        [(round(num_parameters(arch) / 1e6, 1), {"model": name}) for name, arch in archs.items()],
    )
    yield "devices", "simulated devices", [(x, {"devices": x}) for x in scale.devices]


def measure(
    directory: Path,
    scale: Scale,
    steps: int,
    x: float,
    *,
    model: str = "",
    length: int = 0,
    group_size: int = 2,
    num: int = 0,
    devices: int = 1,
) -> Point:
    """One point; what is not given is as the scale has it. All completions have the full length."""
    model, length, num = model or scale.model, length or scale.length, num or scale.num
    arch = read_architecture(directory / model)
    spec = make_spec(directory / model, arch, num=num, group_size=group_size, max_prompt=32, max_tokens=length)
    spec |= {"steps": steps, "micro_batch_tokens": max(1024, length + 32) * devices, "devices": devices}
    for rollout in spec["rollouts"]:
        rollout["completion"] = (rollout["completion"] * (length // len(rollout["completion"]) + 1))[:length]
    result = run_jax(spec)
    shape = batch_shape(32, length, spec["micro_batch_tokens"], row_multiple=devices)
    memory = estimate(
        Sizes(
            arch=arch,
            data=1,
            fsdp=devices,
            tensor=1,
            num_rows=shape.num_rows,
            row_length=shape.row_length,
            vocab_chunk_tokens=VOCABULARY_CHUNK,
            remat=spec["remat"],
            compute_bytes=4,
            holds_scores=True,
            has_reference=False,
            num_slots=0,
            slot_length=0,
        )
    )
    lengths = [len(r["prompt"]) + len(r["completion"]) for r in spec["rollouts"]]
    return Point(x, min(result["seconds"]), step_flops(arch, lengths), result["peak_bytes"], memory.updating * devices)


def draw(file: Path, label: str, points: Sequence[Point]) -> None:
    """Time and memory, measured and by arithmetic, on logarithmic axes."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3.6), layout="constrained")
    xs = [point.x for point in points]
    rate = points[0].flops / points[0].seconds
    left.plot(xs, [point.seconds for point in points], "o-", label="measured")
    left.plot(xs, [point.flops / rate for point in points], "--", label="FLOPs at the first point's rate")
    left.set_ylabel("seconds of a step")
    right.plot(xs, [point.peak_bytes / 1e9 for point in points], "o-", label="measured")
    right.plot(xs, [point.estimated_bytes / 1e9 for point in points], "--", label="by arithmetic")
    right.set_ylabel("GB")
    for axes in (left, right):
        axes.set(xlabel=label, xscale="log", yscale="log")
        axes.set_xticks(xs, [f"{x:g}" for x in xs])
        axes.minorticks_off()
        axes.grid(alpha=0.3)
        axes.legend(frameon=False)
    figure.savefig(file, dpi=110)
    plt.close(figure)
