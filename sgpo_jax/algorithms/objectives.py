"""The named objectives: what each takes for the advantage, the probability ratio and the mean over tokens.

They are what `train.loss.objective` may be; their clip ranges are in the configuration.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from sgpo_jax.algorithms.advantages import dr_grpo_advantages, group_advantages, rloo_advantages
from sgpo_jax.algorithms.losses import Aggregation, Objective
from sgpo_jax.config import LossConfig


@dataclass(frozen=True, slots=True)
class Recipe:
    """surrogate, aggregation: as in `losses.policy_loss`."""

    surrogate: Objective
    aggregation: Aggregation


RECIPES: Mapping[str, Recipe] = {
    "dapo": Recipe("dapo", "token_mean"),  # arXiv 2503.14476, section 3
    "grpo": Recipe("dapo", "sequence_mean"),  # arXiv 2402.03300, equation 3
    "dr_grpo": Recipe("dapo", "constant"),  # arXiv 2503.20783, section 3.2
    # arXiv 2402.14740 has no clip and sums a sequence's log-probs; *reading*: DAPO's clip and mean with its advantage,
    # which with one update a batch has that gradient up to a factor of the step.
    "rloo": Recipe("dapo", "token_mean"),
    "gspo": Recipe("gspo", "sequence_mean"),  # arXiv 2507.18071, equation 5
    "cispo": Recipe("cispo", "token_mean"),  # arXiv 2506.13585, section 3.1
}


def advantages(
    config: LossConfig, rewards_B: np.ndarray, group_ids_B: np.ndarray, is_judged_B: np.ndarray
) -> np.ndarray:
    """The objective's advantages; shapes and errors as in `group_advantages`, which all but two of them use."""
    if config.objective == "dr_grpo":
        return dr_grpo_advantages(rewards_B, group_ids_B, is_judged_B)
    if config.objective == "rloo":
        return rloo_advantages(rewards_B, group_ids_B, is_judged_B)
    return group_advantages(rewards_B, group_ids_B, is_judged_B, ddof=config.advantage_ddof)
