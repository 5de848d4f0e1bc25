"""Load, checkpoint, restore and export of a model with its optimizer, each against a plain copy of the same files on
the same disk, by `cp`.

DIRECTORY must not exist, and is removed at the end. All is read from the page cache, and on the disk before the clock
stops, in both. A checkpoint holds float32 weights and both moments of AdamW.
"""

import os
import shutil
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

import click
import jax
import numpy as np

from sgpo_jax.checkpoints import Checkpoints
from sgpo_jax.config import OptimizerConfig
from sgpo_jax.models.architecture import Architecture
from sgpo_jax.models.safetensors import export_model, load_params
from sgpo_jax.models.weights import num_parameters
from sgpo_jax.training.state import initial_state, make_optimizer, restore
from tools.bench.disk import copy_seconds, flush, size_of
from tools.bench.models import MODELS, make_model
from tools.bench.report import Report, Row

GOAL = 2.0  # times the seconds of a copy, at most
SHARD_BYTES = 5 * 10**9

T = TypeVar("T")


@click.command(help=__doc__)
@click.argument("directory", type=click.Path(path_type=Path, exists=False))
@click.option("--model", type=click.Choice(list(MODELS)), default="0.5b", show_default=True)
@click.option("--runs", type=click.IntRange(min=1), default=5, show_default=True)
@click.option("--json", "json_file", type=click.Path(path_type=Path, dir_okay=False))
def main(directory: Path, model: str, runs: int, json_file: Path | None) -> None:
    directory.mkdir(parents=True)
    try:
        rows = measure(directory, model, runs)
    finally:
        shutil.rmtree(directory)
    Report("seconds of reading and writing weights", {"model": model, "runs": runs}, rows).finish(json_file)


def measure(directory: Path, model: str, runs: int) -> list[Row]:
    source = directory / "model"
    arch = make_model(MODELS[model], source)
    print(f"{num_parameters(arch) / 1e6:.0f} M parameters, {size_of(source) / 1e9:.2f} GB of safetensors", flush=True)
    measure_once(directory, source, arch)  # warms up
    ratios = [measure_once(directory, source, arch) for _ in range(runs)]
    against = "cp of the same files, to the disk"
    return [Row(what, [run[what] for run in ratios], against, at_most=GOAL) for what in ratios[0]]


def like_trained(moment: jax.Array) -> jax.Array:
    """Values that no storage can leave out, as it can zeros."""
    return jax.random.normal(jax.random.key(0), moment.shape, moment.dtype) if moment.ndim else moment


def measure_once(directory: Path, source: Path, arch: Architecture) -> dict[str, float]:
    """Seconds of each, over those of a copy."""
    optimizer = make_optimizer(OptimizerConfig(), arch)
    saved, exported = directory / "checkpoints", directory / "export"
    ratios = {}

    def compare(what: str, own: Callable[[], T], files: Path) -> T:
        os.sync()
        begun = time.monotonic()
        result = jax.block_until_ready(own())
        seconds = time.monotonic() - begun
        copied = copy_seconds(files, directory / "copy")
        ratios[what] = seconds / copied
        print(f"{what:10} {seconds:6.2f} s, copy {copied:6.2f} s, ratio {seconds / copied:.2f}", flush=True)
        return result

    def save() -> None:
        checkpoints.save(0, state.parts, {})
        checkpoints.wait()
        flush(saved)

    def export() -> None:
        export_model(state.params, arch, source, exported, dtype="bfloat16", max_shard_bytes=SHARD_BYTES)

    state = initial_state(compare("load", lambda: load_params(source, arch), source), optimizer)
    state = replace(state, opt_state=jax.tree.map(like_trained, state.opt_state))
    checkpoints = Checkpoints(saved, keep=1)
    compare("checkpoint", save, saved)
    embedding = np.asarray(state.params["embedding"][...])
    state = compare("restore", lambda: restore(checkpoints, state)[0], saved)
    np.testing.assert_array_equal(state.params["embedding"][...], embedding)
    checkpoints.close()
    compare("export", export, exported)
    shutil.rmtree(saved)
    shutil.rmtree(exported)
    return ratios
