"""From the profile to plan.json, and what a person should know of it before anything is spent."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

from sgpo_jax.algorithms.allocation import Dropped, Phase, Plan, ProfileRow, plan_phases, prompts_of_step
from sgpo_jax.algorithms.compute import (
    Forecast,
    Ledger,
    MeanLengths,
    Stage,
    forecast,
    sizes_of,
    uniform_phases,
)
from sgpo_jax.algorithms.posterior import posterior_phases
from sgpo_jax.config import Config
from sgpo_jax.files import read_json, write_json
from sgpo_jax.telemetry import format_flops, show_table
from sgpo_jax.types import Query, UserError


@dataclass(frozen=True, slots=True)
class Forecasts:
    """What this plan costs, and what uniform DAPO would on the same queries, with the profile's own lengths."""

    sgpo: Forecast
    uniform: Forecast


def make_plan(rows: Sequence[ProfileRow], config: Config) -> Plan:
    """All epochs, or the first, where sgpo.later_epochs are planned when they begin.

    Raises UserError where no query is worth training on, with the counts that say why.
    """
    is_stale = config.sgpo.later_epochs == "stale"
    plan = plan_phases(rows, config.sgpo, config.train.epochs if is_stale else 1, config.seed)
    if not plan.phases:
        dropped = plan.dropped
        raise UserError(
            f"none of {len(rows)} profiled queries is learnable: {len(dropped.trivial)} are trivial (success rate "
            f"above sgpo.max_success_rate={config.sgpo.max_success_rate}), {len(dropped.unsolved)} unsolved, "
            f"{len(dropped.unjudged)} could not be judged; use other data, another model, or more profile.num_samples"
        )
    return plan


def forecast_plan(
    plan: Plan, rows: Sequence[ProfileRow], queries: Mapping[str, Query], config: Config, num_params: int
) -> Forecasts:
    """Both forecasts. Later epochs are taken to find success rates as they are now."""
    lengths = mean_lengths(rows, queries)
    common = partial(
        forecast,
        lengths=lengths,
        num_params=num_params,
        prompts_of_step=partial(prompts_of_step, config.train),
        rematerialise=config.model.remat == "full",
    )
    uniform = uniform_phases(
        histogram(rows, config.profile.num_samples),
        config.profile.num_samples,
        config.dapo.group_size,
        config.train.epochs,
    )
    num_later = config.train.epochs - 1
    phases, num_profiles = sizes_of(plan.phases), 1
    if config.sgpo.later_epochs == "reprofiled":
        phases, num_profiles = phases * (1 + num_later), 1 + num_later
    elif config.sgpo.later_epochs == "posterior":
        phases += sizes_of(posterior_phases(rows, config.sgpo, 2, config.seed)) * num_later
    return Forecasts(
        sgpo=common(
            phases,
            num_profiled=len(rows) * num_profiles,
            num_profile_completions=num_profiles * sum(row.num_drawn for row in rows),
        ),
        uniform=common(uniform),
    )


def mean_lengths(rows: Sequence[ProfileRow], queries: Mapping[str, Query]) -> MeanLengths:
    """Mean tokens of the profile's completions (also taken for training's, *reading*) and of its prompts."""
    completion = sum(row.num_tokens for row in rows) / sum(row.num_drawn for row in rows)
    prompt = sum(len(queries[row.query_id].prompt_ids) for row in rows) / len(rows)
    return MeanLengths(profiling=completion, training=completion, prompt=prompt)


def write_plan(path: Path, plan: Plan, forecasts: Forecasts) -> None:
    write_json(
        path,
        {
            "phases": [asdict(phase) for phase in plan.phases],
            "dropped": asdict(plan.dropped),
            "forecast": {
                name: {"num_steps": f.num_steps, "compute": f.ledger.to_dict()}
                for name, f in (("sgpo", forecasts.sgpo), ("uniform", forecasts.uniform))
            },
        },
    )


def read_plan(path: Path) -> Plan:
    """Raises UserError where the file is missing or not a plan."""
    tree = read_json(path)
    try:
        phases = tuple(Phase(**{**phase, "query_ids": tuple(phase["query_ids"])}) for phase in tree["phases"])
        return Plan(phases, Dropped(**{reason: tuple(ids) for reason, ids in tree["dropped"].items()}))
    except (KeyError, TypeError, AttributeError) as error:
        raise UserError(f"{path}: not a plan ({error!r}); remove it and plan again") from None


def show_plan(plan: Plan, rows: Sequence[ProfileRow], forecasts: Forecasts, config: Config) -> None:
    """Histogram, phases, what was dropped and why, and both forecasts, on standard output."""
    _show_histogram(rows, config.profile.num_samples)
    show_table(
        "Phases",
        ("phase", "group size", "queries", "rollouts", "steps"),
        [
            (
                p.name,
                p.group_size,
                len(p.query_ids),
                p.group_size * len(p.query_ids),
                -(-len(p.query_ids) // prompts_of_step(config.train, p.group_size)),
            )
            for p in plan.phases
        ],
    )
    dropped = plan.dropped
    show_table(
        "Dropped",
        ("reason", "queries"),
        [
            (f"trivial: success rate above {config.sgpo.max_success_rate}", len(dropped.trivial)),
            (f"unsolved, beyond the {config.sgpo.unsolved_frac:.0%} mixed into each phase", len(dropped.unsolved)),
            ("unjudged: the verifier gave errors only", len(dropped.unjudged)),
        ],
    )
    show_table(
        "Forecast",
        ("", "steps", "generated tokens", "paper FLOPs", "itemised FLOPs"),
        [
            ("sGPO with profiling", *_forecast_row(forecasts.sgpo)),
            (f"uniform DAPO, G = {config.dapo.group_size}", *_forecast_row(forecasts.uniform)),
        ],
    )


def _show_histogram(rows: Sequence[ProfileRow], num_samples: int) -> None:
    counts = Counter(histogram(rows, num_samples))
    most = max(counts.values(), default=1)
    num_drawn = sum(row.num_drawn for row in rows)
    show_table(
        f"Profile: correct of {num_samples} samples, by the rate ({num_drawn / len(rows):.3g} drawn of a query)",
        ("k", "queries", "share", ""),
        [
            (k, counts[k], f"{counts[k] / len(rows):.1%}", "#" * round(30 * counts[k] / most))
            for k in range(num_samples + 1)
        ],
    )


def histogram(rows: Sequence[ProfileRow], num_samples: int) -> dict[int, int]:
    """Number of queries by correct answers of num_samples; one with fewer judged ones counts by its rate, rounded."""
    return dict(Counter(round(num_samples * row.num_correct / row.num_samples) for row in rows if row.num_samples))


def _forecast_row(forecast: Forecast) -> tuple[str, ...]:
    ledger: Ledger = forecast.ledger
    generated = sum(ledger.tokens[stage].generated for stage in (Stage.PROFILING, Stage.TRAINING))
    return (
        f"{forecast.num_steps:,}",
        f"{generated:,}",
        format_flops(ledger.paper_flops),
        format_flops(ledger.itemised_flops),
    )
