"""Which queries are rolled out, with how many samples, in which order. The methods differ only here."""

from sgpo_jax.schedulers.base import Decision, Scheduler
from sgpo_jax.schedulers.sgpo import SGPOScheduler

__all__ = ["Decision", "SGPOScheduler", "Scheduler"]
