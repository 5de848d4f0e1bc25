"""Speed and memory of `launch convert`, both ways, in pairs with plain copies of the same files on the same disk.

    python -m tools.bench conversion /big/disk/scratch --gigabytes 2 --shard-mb 400

Random bfloat16 weights are made in the directory, which must not exist and is removed at the end. All is read from the
page cache, and flushed to the disk before the clock stops. Two copies are compared with: `cp`, which copies inside the
kernel where it can, and one through a program's memory; ratios are of speeds. Memory is what the converting process
grew by beyond what an empty one takes, mapped files counted.
"""

import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import click

from sgpo_jax.models.weights import num_parameters
from tools.bench.disk import by_cp, copy_seconds, through_memory
from tools.bench.models import make_model, qwen2
from tools.bench.report import Report, Row

_CONVERT = """
import sys, time
from pathlib import Path
import jax
from sgpo_jax.conversion import convert

def peak_kb():
    return int(Path("/proc/self/status").read_text().split("VmHWM:")[1].split()[0])

jax.devices()
Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew, at what is in use
before = peak_kb()
begun = time.monotonic()
convert(Path(sys.argv[1]), Path(sys.argv[2]), dtype=None, max_shard_bytes=int(sys.argv[3]))
print(time.monotonic() - begun, (peak_kb() - before) / 1024)
"""


@click.command(help=__doc__)
@click.argument("directory", type=click.Path(path_type=Path, exists=False))
@click.option("--gigabytes", type=click.FloatRange(min=0.2), default=1.5, show_default=True)
@click.option("--shard-mb", type=click.IntRange(min=1), default=400, show_default=True)
@click.option("--pairs", type=click.IntRange(min=1), default=5, show_default=True)
@click.option("--json", "json_file", type=click.Path(path_type=Path, dir_okay=False))
def main(directory: Path, gigabytes: float, shard_mb: int, pairs: int, json_file: Path | None) -> None:
    directory.mkdir(parents=True)
    try:
        model, orbax, back = directory / "model", directory / "orbax", directory / "back"
        layers = max(1, round((gigabytes - 0.26) / 0.1))  # 0.1 GB each
        config = qwen2(32_000, layers, dim=2048, heads=16, kv_heads=8, mlp=6144, tied=False)
        size = 2 * num_parameters(make_model(config, model, max_shard_bytes=shard_mb * 10**6))
        print(f"{size / 1e9:.2f} GB in shards of {shard_mb} MB")
        ratios: dict[tuple[str, str], list[float]] = {}
        growth: list[float] = []
        for pair in range(pairs):
            for name, source, destination in (("to Orbax", model, orbax), ("to Hugging Face", orbax, back)):
                seconds, grown = convert(source, destination, shard_mb * 10**6)
                growth.append(grown)
                line = f"pair {pair} {name:15} {size / 1e6 / seconds:5.0f} MB/s, memory grew by {grown:.0f} MB"
                for kind, copy_file in (("cp", by_cp), ("a copy through memory", through_memory)):
                    copied = copy_seconds(source, directory / "copy", copy_file)
                    ratios.setdefault((name, kind), []).append(copied / seconds)
                    line += f"; {kind} {size / 1e6 / copied:5.0f} MB/s"
                print(line, flush=True)
            check_equal(model, back)
            shutil.rmtree(orbax)
            shutil.rmtree(back)
    finally:
        shutil.rmtree(directory)
    rows = [
        Row(name, values, against=kind, at_least=0.5 if kind == "cp" else None)
        for (name, kind), values in ratios.items()
    ]
    rows.append(Row("memory of a conversion", growth, unit="MB"))
    settings = {"gigabytes": round(size / 1e9, 2), "shard_mb": shard_mb, "pairs": pairs}
    Report("speed of conversion", settings, rows).finish(json_file)


def convert(source: Path, destination: Path, max_shard_bytes: int) -> tuple[float, float]:
    """Seconds and megabytes of a conversion in a process of its own."""
    command = [sys.executable, "-c", _CONVERT, str(source), str(destination), str(max_shard_bytes)]
    result = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, timeout=3600)
    seconds, grown = map(float, result.stdout.split())
    return seconds, grown


def check_equal(one: Path, other: Path) -> None:
    for file in files(one):
        if file.read_bytes() != (other / file.name).read_bytes():
            raise SystemExit(f"{file.name} differs after the way there and back")


def files(directory: Path) -> Iterator[Path]:
    return directory.glob("*.safetensors")
