"""Verdicts and rewards: extraction of answers, verifiers, the pool of killable workers, shaping. Imports no JAX."""

from sgpo_jax.rewards.extract import final_answer, has_think_block, last_boxed, stated_answer
from sgpo_jax.rewards.pool import VerifierPool, judge_all
from sgpo_jax.rewards.shaping import overlong_penalty, reward_of
from sgpo_jax.rewards.verifiers import CustomReward, Verifier, resolve_verifier
from sgpo_jax.rewards.verify_file import Disagreement, VerifySummary, verify_file

__all__ = [
    "CustomReward",
    "Disagreement",
    "Verifier",
    "VerifierPool",
    "VerifySummary",
    "final_answer",
    "has_think_block",
    "judge_all",
    "last_boxed",
    "overlong_penalty",
    "resolve_verifier",
    "reward_of",
    "stated_answer",
    "verify_file",
]
