"""The share of a training step that is neither generating nor updating: waiting for the verifier, packing, sync, files.

MODEL is a Hugging Face directory with its tokenizer, FILE has questions and answers. A short run of DAPO; the first
step, which compiles, does not count, and neither does the one checkpoint, which is written after the last.
"""

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import click

from sgpo_jax.files import read_jsonl
from tools.bench.report import Report, Row
from tools.bench.workload import REPOSITORY, TIME_LIMIT_S

WORK = ("seconds/generate", "seconds/update")


@click.command(help=__doc__)
@click.argument("model")
@click.argument("file", type=click.Path(path_type=Path, exists=True, dir_okay=False))
@click.option("--steps", type=click.IntRange(min=2), default=6, show_default=True)
@click.option("--prompts", type=click.IntRange(min=1), default=4, show_default=True, help="Of a step, 8 samples each.")
@click.option("--max-tokens", type=click.IntRange(min=1), default=128, show_default=True)
@click.option("--template", default="chat", show_default=True)
@click.option("--json", "json_file", type=click.Path(path_type=Path, dir_okay=False))
def main(
    model: str, file: Path, steps: int, prompts: int, max_tokens: int, template: str, json_file: Path | None
) -> None:
    settings = {
        "model.path": Path(model).absolute() if Path(model).exists() else model,
        "data.train.0.path": file.absolute(),
        "data.train.0.max_queries": steps * prompts,
        "data.template": template,
        "evaluate.sets": "[]",
        "rollouts.max_completion_tokens": max_tokens,
        "train.method": "dapo",
        "train.epochs": 1,
        "train.prompts_per_step": prompts,
        "train.checkpoint_every": steps,
        "train.export_phases": "false",
        "refill.when_short": "train",
        "refill.max_rounds": 1,
    }
    with tempfile.TemporaryDirectory() as directory:
        run_dir = Path(directory) / "run"
        overrides = [f"{key}={value}" for key, value in settings.items()]
        command = [sys.executable, "-m", "sgpo_jax.launch", "train", "configs/qwen2.5-0.5b-gsm8k-cpu.yaml"]
        finished = subprocess.run(
            [*command, f"run_dir={run_dir}", *overrides],
            cwd=REPOSITORY,
            env=os.environ | {"JAX_PLATFORMS": "cpu"},
            timeout=TIME_LIMIT_S,
        )
        if finished.returncode:
            raise click.ClickException(f"the run ended with exit code {finished.returncode}")
        lines = read_jsonl(run_dir / "metrics.jsonl")[1:]
    shares = [1 - sum(line[name] for name in WORK) / line["seconds/total"] for line in lines]
    rows = [Row("outside generating and updating", shares, against="the step", at_most=0.05)]
    names = sorted({name for line in lines for name in line if name.startswith("seconds/")})
    rows += [Row(name, [line.get(name, 0.0) for line in lines], unit="s") for name in names]
    Report("a step's seconds", {"model": Path(model).name, "steps": len(lines)}, rows).finish(json_file)
