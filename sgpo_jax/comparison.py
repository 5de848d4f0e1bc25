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
from sgpo_jax.hardware import DEVICES
from sgpo_jax.rollouts.placement import place
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
    return tuple(
        forecast_method(method, workload, config) for method in ("sgpo", "dapo", "greso", "knapsack", "just_in_time")
    )


def forecast_method(method: str, workload: Workload, config: Config) -> MethodForecast:
    """One method (of train.method), with its own section of the configuration."""
    epochs = config.train.epochs
    if method == "sgpo":
        phases = _sgpo_phases(workload, config)
        num_profiled = workload.num_queries * (epochs if config.sgpo.later_epochs == "reprofiled" else 1)
        num_completions = num_profiled * workload.num_samples
        return MethodForecast(
            method, "the plan's phases", _forecast(phases, workload, config, num_profiled, num_completions)
        )
    if method == "dapo":
        phases = uniform_phases(workload.num_queries_of, workload.num_samples, config.dapo.group_size, epochs)
        return MethodForecast(
            method, "1 - p^G - (1-p)^G of the groups are trained", _forecast(phases, workload, config)
        )
    return MethodForecast(method, SIMULATED, simulate(workload, _with_method(config, method)))


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


@dataclass(frozen=True, slots=True)
class Hours:
    """By the clock: one stage follows the other, and devices that wait for those at work are paid for all the same.

    profiling, rollouts: of the sampler; updates: of all other passes.
    """

    profiling: float
    rollouts: float
    updates: float

    @property
    def total(self) -> float:
        return self.profiling + self.rollouts + self.updates


def hours(ledger: Ledger, config: Config) -> Hours | None:
    """Of a forecast on the machines of section `hardware`, at its shares of the peak; None without the section."""
    hardware = config.hardware
    if hardware is None:
        return None
    peaks = _peaks(config, hardware)
    sampling = {
        stage: 2 * ledger.num_params * (ledger.tokens[stage].generated + ledger.tokens[stage].prompt_generated)
        for stage in CHARGED
    }
    other = ledger.itemised_flops - sum(sampling.values())
    per_hour = 3600 * hardware.mfu_generate * peaks.sampler
    return Hours(
        profiling=sampling[Stage.PROFILING] / per_hour,
        rollouts=sampling[Stage.TRAINING] / per_hour,
        updates=other / (3600 * hardware.mfu_train * peaks.trainer),
    )


@dataclass(frozen=True, slots=True)
class _Peaks:
    """FLOP/s of all the devices that each has."""

    trainer: float
    sampler: float


def _peaks(config: Config, hardware: HardwareConfig) -> _Peaks:
    if hardware.device is None or hardware.devices_per_host is None:
        peak = hardware.flops_per_s or 0.0  # the section has one of them
        return _Peaks(peak, peak)
    num_devices = hardware.devices_per_host
    per_host = hardware.num_hosts * num_devices * DEVICES[hardware.device].bf16_flops_per_s
    of_one = (hardware.flops_per_s or per_host) / num_devices  # of one device a host, over all hosts
    placed = place(config, num_devices, {})
    trainer, server = len(placed.mesh.devices) or num_devices, len(placed.vllm.devices) or num_devices
    return _Peaks(trainer * of_one, server * of_one)


def show_comparison(forecasts: tuple[MethodForecast, ...], workload: Workload, config: Config) -> None:
    """On standard output."""
    show_table(
        f"Forecast: {workload.num_queries:,} queries, {workload.num_params / 1e9:.3g} B parameters; tokens and FLOPs",
        ("method", "steps", "generated", "trained", "paper", "profiling", "itemised", "hours"),
        [_row(method, config) for method in forecasts],
    )
    for method in forecasts:
        print(f"{method.name}: {method.how}.")
    print("Success rates are those of the profile throughout; one update a step, no KL term.")
    if config.hardware is None:
        print("For hours, give the section `hardware`, such as hardware.device=h100-80gb hardware.devices_per_host=8.")


def _row(method: MethodForecast, config: Config) -> tuple[str, ...]:
    ledger = method.forecast.ledger
    found = hours(ledger, config)
    profiling = paper_flops(Stage.PROFILING, ledger.tokens[Stage.PROFILING], ledger.num_params)
    flops = ledger.paper_flops, profiling, ledger.itemised_flops
    return (
        method.name,
        f"{method.forecast.num_steps:,}",
        _tokens(sum(ledger.tokens[stage].generated for stage in CHARGED)),
        _tokens(sum(ledger.tokens[stage].trained for stage in CHARGED)),
        *(format_flops(amount).removesuffix("FLOPs") for amount in flops),
        f"{found.total:.3g}" if found else "-",
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
