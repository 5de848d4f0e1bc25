"""Judged groups -> the sequences of one update: rewards become advantages before anything is packed."""

from collections.abc import Sequence

import numpy as np

from sgpo_jax.algorithms.advantages import MIN_SPREAD
from sgpo_jax.algorithms.objectives import advantages
from sgpo_jax.config import LossConfig
from sgpo_jax.data.batching import TrainSequence
from sgpo_jax.types import RolloutGroup


def train_sequences(
    groups: Sequence[RolloutGroup], config: LossConfig, penalties_B: Sequence[float] = ()
) -> list[TrainSequence]:
    """Every rollout of the groups, in order, with its advantage over the judged rollouts of its group.

    A rollout with an error verdict stays in the list, untrained. penalties_B: what is taken off the rollouts' rewards,
    in their order; empty: nothing.
    """
    rollouts = [(number, group, rollout) for number, group in enumerate(groups) for rollout in group.rollouts]
    rewards_B = np.array([rollout.reward for _, _, rollout in rollouts], np.float64)
    advantages_B = advantages(
        config,
        rewards_B - np.asarray(penalties_B) if len(penalties_B) else rewards_B,
        np.array([number for number, _, _ in rollouts], np.int64),
        np.array([rollout.is_judged for _, _, rollout in rollouts], bool),
    )
    return [
        TrainSequence(
            prompt_ids_P=group.query.prompt_ids,
            completion_ids_C=rollout.completion.token_ids_C,
            sampler_logprobs_C=rollout.completion.sampler_logprobs_C,
            advantage=float(advantage),
            group_id=number,
            is_trained=rollout.is_judged,
        )
        for (number, group, rollout), advantage in zip(rollouts, advantages_B, strict=True)
    ]


def is_informative(group: RolloutGroup) -> bool:
    """Whether the group's judged rollouts differ in reward, so that its advantages are not all zero."""
    rewards = [rollout.reward for rollout in group.rollouts if rollout.is_judged]
    return len(rewards) > 1 and max(rewards) - min(rewards) > MIN_SPREAD
