"""Seconds that XLA compiles at the first and at the second start of a run, whose programs are then in the cache.

The run is the demo's, two steps long, each in a process of its own with a cache that begins empty. Tracing and lowering
are shown apart: no cache saves them.
"""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import click

from tools.bench.report import Report, Row
from tools.bench.workload import REPOSITORY, TIME_LIMIT_S

EVENTS = {
    "tracing": "/jax/core/compile/jaxpr_trace_duration",
    "lowering": "/jax/core/compile/jaxpr_to_mlir_module_duration",
    "compiling": "/jax/core/compile/backend_compile_duration",
}
TWO_STEPS = (
    *("train.method=dapo", "train.epochs=1", "train.prompts_per_step=4", "data.train.0.max_queries=8"),
    *("refill.when_short=train", "refill.max_rounds=1", "evaluate.times=0"),
)
_RUN = """
import json, sys
from collections import Counter
import jax
from sgpo_jax import launch

seconds = Counter()
jax.monitoring.register_event_duration_secs_listener(lambda event, duration, **_: seconds.update({event: duration}))
sys.argv = ["launch", *sys.argv[1:]]
try:
    launch.main()
finally:
    print(json.dumps(seconds))
"""


@click.command(help=__doc__)
@click.option("--config", default="configs/demo.yaml", show_default=True)
@click.option("--runs", type=click.IntRange(min=1), default=5, show_default=True)
@click.option("--json", "json_file", type=click.Path(path_type=Path, dir_okay=False))
def main(config: str, runs: int, json_file: Path | None) -> None:
    first, second = [], []
    for run in range(runs):
        with tempfile.TemporaryDirectory() as directory:
            for number, found in ((1, first), (2, second)):
                found.append(start(config, Path(directory), number))
                print(f"run {run}, start {number}: {found[-1]}", flush=True)
    ratios = [again["compiling"] / once["compiling"] for once, again in zip(first, second, strict=True)]
    rows = [Row("compiling, second start", ratios, against="first start", at_most=0.2)]
    for name, found in (("first", first), ("second", second)):
        rows += [Row(f"{what}, {name} start", [seconds[what] for seconds in found], unit="s") for what in EVENTS]
    Report("starting a run", {"config": config, "runs": runs}, rows).finish(json_file)


def start(config: str, directory: Path, number: int) -> dict[str, float]:
    """Seconds of each of EVENTS in a run of two steps."""
    run_dir = directory / f"run-{number}"
    arguments = ["train", config, f"run_dir={run_dir}", *TWO_STEPS]
    command = [sys.executable, "-c", _RUN, *arguments]
    environment = os.environ | {"JAX_COMPILATION_CACHE_DIR": str(directory / "cache")}
    finished = subprocess.run(
        command, cwd=REPOSITORY, env=environment, capture_output=True, text=True, timeout=TIME_LIMIT_S
    )
    if finished.returncode:
        raise click.ClickException(f"{' '.join(arguments)}: {finished.stderr[-1000:]}")
    seconds = json.loads(finished.stdout.splitlines()[-1])
    return {what: seconds.get(event, 0.0) for what, event in EVENTS.items()}
