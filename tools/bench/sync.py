"""A vLLM server of this machine brought to new weights: gathering and writing them, and the whole exchange, which has
loading and the probe as well, each against `cp` of the same file to the same place.

MODEL is a Hugging Face directory with its tokenizer. Needs the server's environment: `bash tools/setup_vllm.sh cpu`.
"""

import shutil
import tempfile
import time
from pathlib import Path

import click
import numpy as np
from flax import nnx

from sgpo_jax.models.safetensors import load_model, resolve_model_dir
from tools.bench.disk import by_cp
from tools.bench.report import Report, Row
from tools.bench.rollouts import start


@click.command(help=__doc__)
@click.argument("model")
@click.option("--platform", type=click.Choice(["cuda", "cpu"]), default="cuda", show_default=True)
@click.option("--dtype", type=click.Choice(["float32", "bfloat16"]), default="bfloat16", show_default=True)
@click.option("--runs", type=click.IntRange(min=1), default=5, show_default=True)
@click.option("--json", "json_file", type=click.Path(path_type=Path, dir_okay=False))
def main(model: str, platform: str, dtype: str, runs: int, json_file: Path | None) -> None:
    model_dir = resolve_model_dir(model)
    rng = np.random.default_rng(0)
    prompts = [tuple(rng.integers(0, 1000, 16).tolist()) for _ in range(4)]
    write, whole = [], []
    with tempfile.TemporaryDirectory() as directory:
        engine, probe = start(model_dir, platform, dtype, prompts, 32, Path(directory) / "vllm.log")
        params = nnx.state(load_model(model_dir, compute_dtype=dtype, remat="none"))
        try:
            for run in range(runs + 1):
                figures = engine.update_weights(params, run + 1, probe)
                copied = copy_seconds(engine._target.directory)
                seconds = figures["seconds/sync_write"], figures["seconds/sync_load"]
                print(f"run {run}: write {seconds[0]:.2f} s, load {seconds[1]:.2f} s, cp {copied:.2f} s", flush=True)
                if run:  # the first compiles
                    write.append(seconds[0] / copied)
                    whole.append(sum(seconds) / copied)
        finally:
            engine.close()
    rows = [
        Row("gather and write", write, against="cp", at_most=1.5),
        Row("whole sync", whole, against="cp", at_most=4),
    ]
    Report("weight sync", {"model": model_dir.name, "dtype": dtype, "runs": runs}, rows).finish(json_file)


def copy_seconds(weights: Path) -> float:
    """Seconds of copying the files beside themselves, as the engine leaves them: not flushed where that is memory."""
    destination = weights.with_name("copy")
    destination.mkdir()
    begun = time.monotonic()
    for file in weights.glob("*.safetensors"):
        by_cp(str(file), str(destination / file.name))
    seconds = time.monotonic() - begun
    shutil.rmtree(destination)
    return seconds
