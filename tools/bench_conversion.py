"""Speed and memory of `launch convert`, both ways, in pairs with plain copies of the same files on the same disk.

    python tools/bench_conversion.py /big/disk/scratch --gigabytes 2 --shard-mb 400

Random bfloat16 weights are made in the directory, which must not exist and is removed at the end. All is read from the
page cache, and flushed to the disk before the clock stops. Two copies are compared with: `cp`, which copies inside the
kernel where it can, and one through a program's memory. Prints all speeds, the ratios, and how much the converting
process's memory grew beyond what an empty one takes, mapped files counted.
"""

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import click
import ml_dtypes
import numpy as np

from sgpo_jax.files import fsync_path, write_json
from sgpo_jax.models.architecture import read_architecture
from sgpo_jax.models.safetensors import tensor_shapes, write_tensors
from sgpo_jax.models.weights import num_parameters

MODEL_DIM = 2048
COPY_CHUNK = 8 << 20  # bytes
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
def main(directory: Path, gigabytes: float, shard_mb: int, pairs: int) -> None:
    directory.mkdir(parents=True)
    try:
        model, orbax, back = directory / "model", directory / "orbax", directory / "back"
        size = make_model(directory / "empty", model, gigabytes, shard_mb * 10**6)
        print(f"{size / 1e9:.2f} GB in shards of {shard_mb} MB")
        ratios: dict[str, list[float]] = {}
        most_grown = 0.0
        for pair in range(pairs):
            for name, source, destination in (("to Orbax", model, orbax), ("to Hugging Face", orbax, back)):
                seconds, grown = convert(source, destination, shard_mb * 10**6)
                most_grown = max(most_grown, grown)
                line = f"pair {pair} {name:15} {size / 1e6 / seconds:5.0f} MB/s, memory grew by {grown:.0f} MB"
                for kind, copy_file in (("cp", copy_by_cp), ("a copy through memory", copy_through_memory)):
                    copied = copy(source, directory / "copy", copy_file)
                    ratios.setdefault(f"{name}, to {kind}", []).append(copied / seconds)
                    line += f"; {kind} {size / 1e6 / copied:5.0f} MB/s"
                print(line, flush=True)
            check_equal(model, back)
            shutil.rmtree(orbax)
            shutil.rmtree(back)
        for name, values in ratios.items():
            print(f"ratio {name}: {np.median(values):.2f} ({min(values):.2f} to {max(values):.2f})")
        print(f"memory grew by at most {most_grown:.0f} MB")
    finally:
        shutil.rmtree(directory)


def make_model(empty: Path, out: Path, gigabytes: float, max_shard_bytes: int) -> int:
    """A Hugging Face directory of about this size, of random bits that are finite numbers. Returns its bytes."""
    config = {
        "model_type": "qwen2",
        "hidden_act": "silu",
        "vocab_size": 32_000,
        "hidden_size": MODEL_DIM,
        "num_hidden_layers": max(1, round((gigabytes - 0.26) / 0.1)),  # 0.1 GB each
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "intermediate_size": 6144,
        "rope_theta": 10_000.0,
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": 1024,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
    }
    write_json(empty / "config.json", config)
    arch = read_architecture(empty)
    shapes = tensor_shapes(arch)
    rng = np.random.default_rng(0)

    def read(names: Sequence[str]) -> Iterator[np.ndarray]:
        for name in names:
            # Below 0x3F80, a bfloat16 is a positive number under 1.
            yield rng.integers(0, 0x3F80, shapes[name], np.uint16).view(ml_dtypes.bfloat16)

    write_tensors(read, empty, out, dtype="bfloat16", max_shard_bytes=max_shard_bytes)
    return 2 * num_parameters(arch)


def convert(source: Path, destination: Path, max_shard_bytes: int) -> tuple[float, float]:
    """Seconds and megabytes of a conversion in a process of its own."""
    command = [sys.executable, "-c", _CONVERT, str(source), str(destination), str(max_shard_bytes)]
    result = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, timeout=3600)
    seconds, grown = map(float, result.stdout.split())
    return seconds, grown


def copy(source: Path, destination: Path, copy_file: Callable[[str, str], object]) -> float:
    """Seconds of a copy that is on the disk at the end."""
    os.sync()  # what others wrote is not to be waited for
    begun = time.monotonic()
    shutil.copytree(source, destination, copy_function=copy_file)
    for path in destination.rglob("*"):
        fsync_path(path)
    seconds = time.monotonic() - begun
    shutil.rmtree(destination)
    os.sync()
    return seconds


def copy_by_cp(source: str, destination: str) -> None:
    subprocess.run(["cp", source, destination], check=True)


def copy_through_memory(source: str, destination: str) -> None:
    with open(source, "rb", buffering=0) as reader, open(destination, "xb", buffering=0) as writer:
        while chunk := reader.read(COPY_CHUNK):
            writer.write(chunk)


def check_equal(one: Path, other: Path) -> None:
    for file in files(one):
        if file.read_bytes() != (other / file.name).read_bytes():
            raise SystemExit(f"{file.name} differs after the way there and back")


def files(directory: Path) -> Iterator[Path]:
    return directory.glob("*.safetensors")


if __name__ == "__main__":
    main()
