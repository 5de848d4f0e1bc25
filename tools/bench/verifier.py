"""Answers judged a second, and what answers that hang cost.

FILE has {"gold", "completion"} lines. Judged all, several times; then again with HANGING answers among them whose
evaluation never ends, each of which should cost one worker its time limit, once, and nobody else anything.
"""

import time
from pathlib import Path

import click

from sgpo_jax.config import RewardsConfig
from sgpo_jax.files import read_jsonl
from sgpo_jax.rewards.pool import VerifierPool, judge_all
from sgpo_jax.types import Query, Verdict
from tools.bench.report import Report, Row

ENDLESS = r"The answer is \boxed{\sum_{n=1}^{100000000} \frac{1}{n^3}}."


@click.command(help=__doc__)
@click.argument("file", type=click.Path(path_type=Path, exists=True, dir_okay=False))
@click.option("--workers", type=click.IntRange(min=1), default=2, show_default=True)
@click.option("--hanging", type=click.IntRange(min=1), default=4, show_default=True)
@click.option("--time-limit-s", type=float, default=RewardsConfig().time_limit_s, show_default=True)
@click.option("--runs", type=click.IntRange(min=1), default=5, show_default=True)
@click.option("--json", "json_file", type=click.Path(path_type=Path, dir_okay=False))
def main(file: Path, workers: int, hanging: int, time_limit_s: float, runs: int, json_file: Path | None) -> None:
    answers = [(query("math", row["gold"]), row["completion"]) for row in read_jsonl(file)]
    spread = max(1, len(answers) // hanging)
    mixed = list(answers)
    for number in range(hanging):
        mixed.insert(number * (spread + 1), (query("math", "1"), ENDLESS))
    config = RewardsConfig(num_workers=workers, time_limit_s=time_limit_s)
    plain, excess = [], []
    with VerifierPool(config) as pool:
        judge_all(pool, answers[: 10 * workers])  # workers are up
        for _ in range(runs):
            seconds = timed(pool, answers, num_hanging=0)
            plain.append(len(answers) / seconds)
            limits = hanging * time_limit_s / workers
            excess.append((timed(pool, mixed, num_hanging=hanging) - seconds) / limits)
    rows = [
        Row("answers/s", plain, unit="answers/s", at_least=300),
        Row("seconds of hanging answers", excess, against="their time limits, shared by the workers", at_most=1.5),
    ]
    settings = {"answers": len(answers), "workers": workers, "hanging": hanging, "runs": runs}
    Report("verifying", settings, rows).finish(json_file)


def query(kind: str, gold: str) -> Query:
    return Query("q", "", gold, kind, "benchmark", "", ())


def timed(pool: VerifierPool, answers: list[tuple[Query, str]], num_hanging: int) -> float:
    begun = time.monotonic()
    judgements = judge_all(pool, answers)
    seconds = time.monotonic() - begun
    num_errors = sum(judgement.verdict is Verdict.ERROR for judgement in judgements)
    if num_errors < num_hanging:
        raise click.ClickException(f"of {num_hanging} hanging answers only {num_errors} ran into their limit")
    return seconds
