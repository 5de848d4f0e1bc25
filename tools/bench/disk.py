"""Copies of directories that are on the disk when the clock stops, to compare reading and writing weights with."""

import os
import shutil
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

from sgpo_jax.files import fsync_path

COPY_CHUNK = 8 << 20  # bytes


def by_cp(source: str, destination: str) -> None:
    """Which copies inside the kernel where it can."""
    subprocess.run(["cp", source, destination], check=True)


def through_memory(source: str, destination: str) -> None:
    with open(source, "rb", buffering=0) as reader, open(destination, "xb", buffering=0) as writer:
        while chunk := reader.read(COPY_CHUNK):
            writer.write(chunk)


def copy_seconds(source: Path, destination: Path, copy_file: Callable[[str, str], object] = by_cp) -> float:
    """Seconds of a copy of a directory, from the page cache to the disk; the copy is removed again."""
    os.sync()  # what others wrote is not to be waited for
    begun = time.monotonic()
    shutil.copytree(source, destination, copy_function=copy_file)
    flush(destination)
    seconds = time.monotonic() - begun
    shutil.rmtree(destination)
    os.sync()
    return seconds


def flush(directory: Path) -> None:
    for path in directory.rglob("*"):
        fsync_path(path)


def size_of(directory: Path) -> int:
    return sum(path.stat().st_size for path in directory.rglob("*") if path.is_file())
