"""What every method would cost on the same queries, before anything is spent: `plan --compare`.

All forecasts take the profiled success rates for the whole run, as if training changed none of them, one update a step
and no KL term; and profile.num_samples completions of every query, of which sequential profiling needs fewer.
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from sgpo_jax.algorithms.allocation import ProfileRow, prompts_of_step
from sgpo_jax.algorithms.compute import (
    CHARGED,
    Forecast,
    Ledger,
    MeanLengths,
    PhaseSize,
    Stage,
    forecast,
    paper_flops,
    phases_of_histogram,
    sizes_of,
    uniform_phases,
)
from sgpo_jax.algorithms.posterior import posterior_phases
from sgpo_jax.config import Config, ForecastConfig, HardwareConfig
from sgpo_jax.schedulers import make_scheduler, reused
from sgpo_jax.telemetry import format_flops, show_table
from sgpo_jax.types import (
    Completion,
    FinishReason,
    GroupRequest,
    Judgement,
    Purpose,
    Query,
    Rollout,
    RolloutGroup,
    Verdict,
)

SIMULATED = "its scheduler run on outcomes drawn at the profiled success rates"


@dataclass(frozen=True, slots=True)
class Workload:
    """Queries of which only the profile's histogram counts: num_correct of num_samples -> number of queries."""

    num_queries_of: Mapping[int, int]
    num_samples: int
    lengths: MeanLengths
    num_params: int

    @property
    def num_queries(self) -> int:
        return sum(self.num_queries_of.values())


@dataclass(frozen=True, slots=True)
class MethodForecast:
    """how: in words, how the forecast was made."""

    name: str
    how: str
    forecast: Forecast


def workload_of(config: ForecastConfig, num_params: int) -> Workload:
    """The workload that a configuration describes by its section `forecast`."""
    lengths = MeanLengths(
        profiling=config.profiling_tokens, training=config.training_tokens, prompt=config.prompt_tokens
    )
    return Workload(dict(enumerate(config.counts)), len(config.counts) - 1, lengths, num_params)


def compare(workload: Workload, config: Config) -> tuple[MethodForecast, ...]:
    """Every method with its own section of the configuration, whatever train.method is."""
    epochs = config.train.epochs
    phases = _sgpo_phases(workload, config)
    num_profiled = workload.num_queries * (epochs if config.sgpo.later_epochs == "reprofiled" else 1)
    uniform = uniform_phases(workload.num_queries_of, workload.num_samples, config.dapo.group_size, epochs)
    return (
        MethodForecast(
            "sgpo",
            "the plan's phases",
            _forecast(phases, workload, config, num_profiled, num_profiled * workload.num_samples),
        ),
        MethodForecast("dapo", "1 - p^G - (1-p)^G of the groups are trained", _forecast(uniform, workload, config)),
        *(
            MethodForecast(method, SIMULATED, simulate(workload, _with_method(config, method)))
            for method in ("greso", "knapsack", "just_in_time")
        ),
    )


def _sgpo_phases(workload: Workload, config: Config) -> tuple[PhaseSize, ...]:
    num_queries_of, num_samples, epochs = workload.num_queries_of, workload.num_samples, config.train.epochs
    if config.sgpo.later_epochs != "posterior":
        return phases_of_histogram(num_queries_of, num_samples, config.sgpo, epochs)
    first = phases_of_histogram(num_queries_of, num_samples, config.sgpo, 1)
    rows = [
        ProfileRow(f"{k}-{i}", num_samples, k, 0, 0, 0) for k, count in num_queries_of.items() for i in range(count)
    ]
    return first + sizes_of(posterior_phases(rows, config.sgpo, 2, config.seed)) * (epochs - 1)


def simulate(workload: Workload, config: Config) -> Forecast:
    """Run the scheduler of config.train.method (not sgpo) on groups whose outcomes are drawn at the profiled rates."""
    queries, rate_of = _synthetic(workload)
    scheduler = make_scheduler(config, None, queries)
    rng = np.random.default_rng(config.seed)
    profiled, generated, trained = Counter[int](), Counter[int](), Counter[int]()  # groups by size
    num_reused: Counter[int] = Counter()  # completions by the size of their group
    num_steps, done = 0, False
    while not done:
        requests = scheduler.propose()
        for request in requests:
            (profiled if request.purpose is Purpose.PROFILE else generated)[request.num_samples] += 1
        decision = scheduler.accept([_draw(request, rate_of[request.query.query_id], rng) for request in requests])
        for group in decision.train:
            trained[len(group.rollouts)] += 1
            num_reused[len(group.rollouts)] += len(reused(group))
        num_steps += bool(decision.train)
        done = decision.done
    sizes = sorted(generated.keys() | trained.keys())
    phases = tuple(PhaseSize(size, generated[size], trained[size], num_reused[size]) for size in sizes)
    num_completions = sum(size * count for size, count in profiled.items())
    return replace(_forecast(phases, workload, config, profiled.total(), num_completions), num_steps=num_steps)


def hours(ledger: Ledger, hardware: HardwareConfig) -> float:
    """Of profiling and training one after the other: sampling at one share of the peak, all other passes at another."""
    sampled = sum(ledger.tokens[stage].generated + ledger.tokens[stage].prompt_generated for stage in CHARGED)
    sampling_flops = 2 * ledger.num_params * sampled
    other_flops = ledger.itemised_flops - sampling_flops
    seconds = sampling_flops / hardware.mfu_generate + other_flops / hardware.mfu_train
    return seconds / hardware.flops_per_s / 3600


def show_comparison(forecasts: tuple[MethodForecast, ...], workload: Workload, config: Config) -> None:
    """On standard output."""
    hardware = config.hardware
    show_table(
        f"Forecast: {workload.num_queries:,} queries, {workload.num_params / 1e9:.3g} B parameters; tokens and FLOPs",
        ("method", "steps", "generated", "trained", "paper", "profiling", "itemised", "hours"),
        [_row(method, hardware) for method in forecasts],
    )
    for method in forecasts:
        print(f"{method.name}: {method.how}.")
    print("Success rates are those of the profile throughout; one update a step, no KL term.")
    if hardware is None:
        print("For hours, give the section `hardware` (flops_per_s, mfu_train, mfu_generate).")


def _row(method: MethodForecast, hardware: HardwareConfig | None) -> tuple[str, ...]:
    ledger = method.forecast.ledger
    profiling = paper_flops(Stage.PROFILING, ledger.tokens[Stage.PROFILING], ledger.num_params)
    flops = ledger.paper_flops, profiling, ledger.itemised_flops
    return (
        method.name,
        f"{method.forecast.num_steps:,}",
        _tokens(sum(ledger.tokens[stage].generated for stage in CHARGED)),
        _tokens(sum(ledger.tokens[stage].trained for stage in CHARGED)),
        *(format_flops(amount).removesuffix("FLOPs") for amount in flops),
        f"{hours(ledger, hardware):.3g}" if hardware else "-",
    )


def _tokens(count: int) -> str:
    return f"{count / 1e6:,.1f} M"


def _with_method(config: Config, method: str) -> Config:
    """A forecast of a shortage of informative groups is a forecast, not an error."""
    train = config.train.model_copy(update={"method": method})
    refill = config.refill.model_copy(update={"when_short": "train"})
    return config.model_copy(update={"train": train, "refill": refill})


def _forecast(
    phases: tuple[PhaseSize, ...],
    workload: Workload,
    config: Config,
    num_profiled: int = 0,
    num_profile_completions: int = 0,
) -> Forecast:
    return forecast(
        phases,
        workload.lengths,
        num_params=workload.num_params,
        prompts_of_step=partial(prompts_of_step, config.train),
        rematerialise=config.model.remat == "full",
        num_profiled=num_profiled,
        num_profile_completions=num_profile_completions,
    )


def _synthetic(workload: Workload) -> tuple[dict[str, Query], dict[str, float]]:
    """Queries by id, and their success rates."""
    rates = [k / workload.num_samples for k, count in sorted(workload.num_queries_of.items()) for _ in range(count)]
    names = [f"{i:09}" for i in range(len(rates))]
    queries = {name: Query(name, "", "", "exact", "forecast", "", (0,)) for name in names}
    return queries, dict(zip(names, rates, strict=True))


def _rollout(verdict: Verdict) -> Rollout:
    completion = Completion(0, np.zeros(1, np.int32), np.zeros(1, np.float32), FinishReason.STOP, 0)
    reward = float(verdict is Verdict.CORRECT)
    return Rollout(completion, "", Judgement(verdict, reward), reward)


_CORRECT, _WRONG = _rollout(Verdict.CORRECT), _rollout(Verdict.WRONG)


def _draw(request: GroupRequest, rate: float, rng: np.random.Generator) -> RolloutGroup:
    num_correct = rng.binomial(request.num_samples, rate)
    return RolloutGroup(request, (_CORRECT,) * num_correct + (_WRONG,) * (request.num_samples - num_correct))
