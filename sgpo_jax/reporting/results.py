"""What a finished run prints: accuracy before and after, compute by stage, where things lie."""

import shlex
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from sgpo_jax.algorithms.compute import Ledger, Stage
from sgpo_jax.files import read_json, read_jsonl
from sgpo_jax.run import Run, read_evaluations
from sgpo_jax.telemetry import format_flops, show_table


def show_results(run: Run) -> None:
    """Accuracy before and after, compute by stage, where things lie, what to do next."""
    evaluations = read_evaluations(run)
    if evaluations:
        show_table(
            "Accuracy on held-out questions",
            ("set", "questions", *evaluations),
            [
                (name, len(queries), *(_accuracy(scores, name) for scores in evaluations.values()))
                for name, queries in run.evaluation_sets.items()
            ],
        )
    if not (run.dir / "compute.json").exists():
        return
    ledger = Ledger.from_dict(read_json(run.dir / "compute.json"))
    stages = ledger.to_dict()["stages"]
    show_table(
        "Compute by stage",
        ("stage", "generated tokens", "trained tokens", "paper FLOPs", "itemised FLOPs"),
        [
            (
                stage,
                f"{ledger.tokens[stage].generated:,}",
                f"{ledger.tokens[stage].trained:,}",
                format_flops(stages[stage]["paper"]["flops"]),
                format_flops(stages[stage]["itemised"]["flops"]),
            )
            for stage in Stage
        ]
        + [
            (
                "total charged",
                "",
                "",
                format_flops(ledger.paper_flops),
                format_flops(ledger.itemised_flops),
            )
        ],
    )
    export = _newest_export(run)
    if export is not None:
        words = [sys.executable, "-m", "sgpo_jax.launch", "generate", str(export), "--raw", "--temperature", "0"]
        print(f"The trained model is in {export}. Try it:")
        print(f"  {shlex.join([*words, '--prompt', run.loaded.queries[0].prompt])}")


def _newest_export(run: Run) -> Path | None:
    """Of the last phase that was exported."""
    if not (run.dir / "metrics.jsonl").exists():
        return None
    phases = dict.fromkeys(row["phase"] for row in read_jsonl(run.dir / "metrics.jsonl", torn_tail=True))
    exported = [run.dir / "hf" / phase for phase in phases if (run.dir / "hf" / phase).is_dir()]
    return exported[-1] if exported else None


def _accuracy(scores: Mapping[str, Any], name: str) -> str:
    """avg@k with its 95% interval."""
    if name not in scores:
        return "-"
    avg = scores[name]["avg"]
    return f"{avg['mean']:.1%} ({avg['low']:.1%} to {avg['high']:.1%})" if avg else "unjudged"
