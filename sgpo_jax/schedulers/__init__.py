"""Which queries are rolled out, with how many samples, in which order. The methods differ only here."""

from sgpo_jax.schedulers.base import Decision, Scheduler, reused
from sgpo_jax.schedulers.factory import make_scheduler
from sgpo_jax.schedulers.greso import GRESOScheduler
from sgpo_jax.schedulers.just_in_time import JustInTimeScheduler
from sgpo_jax.schedulers.knapsack import KnapsackScheduler
from sgpo_jax.schedulers.posterior import PosteriorScheduler
from sgpo_jax.schedulers.reprofiled import ReprofiledScheduler
from sgpo_jax.schedulers.sgpo import SGPOScheduler
from sgpo_jax.schedulers.uniform import UniformScheduler

__all__ = [
    "Decision",
    "GRESOScheduler",
    "JustInTimeScheduler",
    "KnapsackScheduler",
    "PosteriorScheduler",
    "ReprofiledScheduler",
    "SGPOScheduler",
    "Scheduler",
    "UniformScheduler",
    "make_scheduler",
    "reused",
]
