"""Which queries are rolled out, with how many samples, in which order. The methods differ only here."""

from sgpo_jax.schedulers.base import Decision, Scheduler
from sgpo_jax.schedulers.factory import make_scheduler
from sgpo_jax.schedulers.greso import GRESOScheduler
from sgpo_jax.schedulers.knapsack import KnapsackScheduler
from sgpo_jax.schedulers.reprofiled import ReprofiledScheduler
from sgpo_jax.schedulers.sgpo import SGPOScheduler
from sgpo_jax.schedulers.uniform import UniformScheduler

__all__ = [
    "Decision",
    "GRESOScheduler",
    "KnapsackScheduler",
    "ReprofiledScheduler",
    "SGPOScheduler",
    "Scheduler",
    "UniformScheduler",
    "make_scheduler",
]
