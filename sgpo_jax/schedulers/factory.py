"""The scheduler of a run's method."""

from collections.abc import Mapping

from sgpo_jax.algorithms.allocation import Plan
from sgpo_jax.config import Config
from sgpo_jax.schedulers.base import Scheduler
from sgpo_jax.schedulers.greso import GRESOScheduler
from sgpo_jax.schedulers.knapsack import KnapsackScheduler
from sgpo_jax.schedulers.reprofiled import ReprofiledScheduler
from sgpo_jax.schedulers.sgpo import SGPOScheduler
from sgpo_jax.schedulers.uniform import UniformScheduler
from sgpo_jax.types import Query


def make_scheduler(config: Config, plan: Plan | None, queries: Mapping[str, Query]) -> Scheduler:
    """`plan` for sGPO only; the other methods train on all `queries` (by id), unprofiled."""
    train, seed = config.train, config.seed
    match train.method:
        case "dapo":
            return UniformScheduler(
                queries,
                group_size=config.dapo.group_size,
                epochs=train.epochs,
                prompts_per_step=train.prompts_per_step,
                refill=config.refill,
                seed=seed,
                oversample=config.dapo.oversample,
            )
        case "greso":
            return GRESOScheduler(
                queries,
                group_size=config.greso.group_size,
                epochs=train.epochs,
                prompts_per_step=train.prompts_per_step,
                refill=config.refill,
                seed=seed,
            )
        case "knapsack":
            return KnapsackScheduler(
                queries,
                mean_group_size=config.knapsack.mean_group_size,
                epochs=train.epochs,
                prompts_per_step=train.prompts_per_step,
                seed=seed,
            )
    if plan is None:
        raise ValueError("train.method=sgpo trains by a plan")
    if config.sgpo.later_epochs == "reprofiled":
        return ReprofiledScheduler([phase for phase in plan.phases if phase.epoch == 1], queries, config)
    return SGPOScheduler(
        plan.phases, queries, prompts_per_step=train.prompts_per_step, seed=seed, curriculum=config.sgpo.curriculum
    )
