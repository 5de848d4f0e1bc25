"""The work that both sides do: rollouts with a long tail of lengths, and how a side is run on them."""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import click
import numpy as np

REPOSITORY = Path(__file__).parents[2]
TORCH = Path(os.environ.get("BENCH_VENV", REPOSITORY / ".venv-bench")) / "bin" / "python"
TIME_LIMIT_S = 3600


def draw_rollouts(vocab_size: int, num: int, group_size: int, max_prompt: int, max_completion: int) -> list[dict]:
    """`num` rollouts in groups: prompts of any length, completions of about 30% of the maximum in the mean, with a long
    tail (log-normal, sigma .8, cut at the maximum); of a group of G, G / 2 are right.
    """
    rng = np.random.default_rng(0)
    rollouts = []
    for group in range(num // group_size):
        prompt = rng.integers(0, vocab_size, rng.integers(max_prompt // 4, max_prompt + 1)).tolist()
        rewards = np.arange(group_size) < group_size / 2
        for advantage in (rewards - rewards.mean()) / rewards.std():
            length = int(np.clip(max_completion * rng.lognormal(-1.45, 0.8), 2, max_completion))
            completion = rng.integers(0, vocab_size, length).tolist()
            rollouts.append({"prompt": prompt, "completion": completion, "advantage": float(advantage), "group": group})
    return rollouts


def run_jax(spec: dict[str, Any]) -> dict[str, Any]:
    return _run([sys.executable, "-m", "tools.bench.sides.jax_side"], spec)


def run_torch(spec: dict[str, Any]) -> dict[str, Any]:
    if not TORCH.exists():
        raise click.ClickException(
            f"{TORCH} is missing: `bash tools/setup_bench.sh` makes it; BENCH_VENV names another environment"
        )
    return _run([str(TORCH), str(Path(__file__).parent / "sides" / "torch_side.py")], spec)


def _run(command: list[str], spec: dict[str, Any]) -> dict[str, Any]:
    """The last line that a side prints. Each works alone, in a process of its own."""
    with tempfile.TemporaryDirectory() as directory:
        file = Path(directory) / "spec.json"
        file.write_text(json.dumps(spec | {"threads": len(os.sched_getaffinity(0))}))
        command = [*command, str(file)]
        flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count={spec.get('devices', 1)}"
        environment = os.environ | {"XLA_FLAGS": flags}
        finished = subprocess.run(
            command, cwd=REPOSITORY, env=environment, stdout=subprocess.PIPE, timeout=TIME_LIMIT_S, text=True
        )
    if finished.returncode:
        raise click.ClickException(f"{' '.join(command)}: exit code {finished.returncode}")
    return json.loads(finished.stdout.splitlines()[-1])
