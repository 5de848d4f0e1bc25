"""Verdicts and rewards: extraction of answers, verifiers, the pool of killable workers, shaping. Imports no JAX."""

from sgpo_jax.rewards.extract import last_boxed, stated_answer
from sgpo_jax.rewards.pool import VerifierPool, judge_all
from sgpo_jax.rewards.verifiers import CustomReward, Verifier, resolve_verifier

__all__ = ["CustomReward", "Verifier", "VerifierPool", "judge_all", "last_boxed", "resolve_verifier", "stated_answer"]
