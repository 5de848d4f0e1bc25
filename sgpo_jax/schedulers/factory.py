"""The scheduler of a run's method."""

from collections.abc import Mapping, Sequence
from functools import partial

from sgpo_jax.algorithms.allocation import Plan, ProfileRow, prompts_of_step
from sgpo_jax.config import Config
from sgpo_jax.schedulers.base import Scheduler
from sgpo_jax.schedulers.greso import GRESOScheduler
from sgpo_jax.schedulers.just_in_time import JustInTimeScheduler
from sgpo_jax.schedulers.knapsack import KnapsackScheduler
from sgpo_jax.schedulers.posterior import PosteriorScheduler
from sgpo_jax.schedulers.reprofiled import ReprofiledScheduler
from sgpo_jax.schedulers.sgpo import SGPOScheduler
from sgpo_jax.schedulers.uniform import UniformScheduler
from sgpo_jax.types import Query


def make_scheduler(
    config: Config, plan: Plan | None, queries: Mapping[str, Query], rows: Sequence[ProfileRow] = ()
) -> Scheduler:
    """`plan` and `rows`, the profile, for sGPO only; the other methods train on all `queries` (by id), unprofiled."""
    train, seed = config.train, config.seed
    match train.method:
        case "dapo":
            return UniformScheduler(
                queries,
                group_size=config.dapo.group_size,
                epochs=train.epochs,
                prompts_per_step=prompts_of_step(train, config.dapo.group_size),
                refill=config.refill,
                seed=seed,
                oversample=config.dapo.oversample,
            )
        case "greso":
            return GRESOScheduler(
                queries,
                group_size=config.greso.group_size,
                epochs=train.epochs,
                prompts_per_step=prompts_of_step(train, config.greso.group_size),
                refill=config.refill,
                seed=seed,
            )
        case "knapsack":
            return KnapsackScheduler(
                queries,
                mean_group_size=config.knapsack.mean_group_size,
                epochs=train.epochs,
                prompts_per_step=prompts_of_step(train, config.knapsack.mean_group_size),
                seed=seed,
            )
        case "just_in_time":
            return JustInTimeScheduler(
                queries,
                config.just_in_time,
                epochs=train.epochs,
                prompts_per_step=prompts_of_step(train, config.just_in_time.group_size),
                refill=config.refill,
                seed=seed,
            )
    if plan is None:
        raise ValueError("train.method=sgpo trains by a plan")
    first_epoch = [phase for phase in plan.phases if phase.epoch == 1]
    match config.sgpo.later_epochs:
        case "reprofiled":
            return ReprofiledScheduler(first_epoch, queries, config)
        case "posterior":
            return PosteriorScheduler(first_epoch, rows, queries, config)
    return SGPOScheduler(
        plan.phases,
        queries,
        prompts_of_step=partial(prompts_of_step, train),
        seed=seed,
        curriculum=config.sgpo.curriculum,
    )
