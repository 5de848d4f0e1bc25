"""From the rewards of a group of rollouts to advantages. NumPy on the host: float64 inside, float32 out.

Groups are known by an id per row, never by a reshape: group sizes differ, and rows may come in any order.
Rollouts without a verdict stay out of the statistics, and their advantage is 0.
"""

from collections.abc import Callable
from typing import Literal

import chex
import numpy as np

MIN_SPREAD = 1e-6  # rewards of a group closer than this are equal: no signal
EPSILON = 1e-6


def group_advantages(
    rewards_B: np.ndarray, group_ids_B: np.ndarray, is_judged_B: np.ndarray, *, ddof: Literal[0, 1] = 0
) -> np.ndarray:
    """(r - mean) / (std + 1e-6) within each group: GRPO (arXiv 2402.03300, section 4.1) as DAPO uses it (2503.14476).

    rewards_B: any float; group_ids_B: int or str; is_judged_B: bool. ddof 0 is the population's deviation, so that a
    lone success in G gets sqrt(G - 1); ddof 1 the sample's.
    Returns float32 [B]. Exactly 0 for a group whose judged rewards differ by at most 1e-6 or that has fewer than two.
    Raises ValueError where a judged reward is not finite.
    """

    def normalised(rewards_G: np.ndarray) -> np.ndarray:
        return (rewards_G - rewards_G.mean()) / (rewards_G.std(ddof=ddof) + EPSILON)

    return _by_group(normalised, rewards_B, group_ids_B, is_judged_B)


def dr_grpo_advantages(rewards_B: np.ndarray, group_ids_B: np.ndarray, is_judged_B: np.ndarray) -> np.ndarray:
    """r - mean within each group: Dr. GRPO (arXiv 2503.20783, section 3.2). All else as in `group_advantages`."""

    def centred(rewards_G: np.ndarray) -> np.ndarray:
        return rewards_G - rewards_G.mean()

    return _by_group(centred, rewards_B, group_ids_B, is_judged_B)


def rloo_advantages(rewards_B: np.ndarray, group_ids_B: np.ndarray, is_judged_B: np.ndarray) -> np.ndarray:
    """r - mean of the group's others: RLOO (arXiv 2402.14740). All else as in `group_advantages`."""

    def left_out(rewards_G: np.ndarray) -> np.ndarray:
        return rewards_G - (rewards_G.sum() - rewards_G) / (len(rewards_G) - 1)

    return _by_group(left_out, rewards_B, group_ids_B, is_judged_B)


def k1_reward_penalty(logprobs_C: np.ndarray, ref_logprobs_C: np.ndarray, *, kl_coef: float) -> float:
    """What the KL to a frozen reference takes off one completion's reward: kl_coef · Σ_t (logπ - logπ_ref).

    The plain estimator k1 belongs here only: as a loss, its gradient is zero in expectation.
    logprobs_C, ref_logprobs_C: float [C], the completion's tokens under policy and reference. *Reading*: the sum over
    the tokens, the estimate of the sequence's KL. It can be negative.
    """
    chex.assert_rank(logprobs_C, 1)
    chex.assert_equal_shape([logprobs_C, ref_logprobs_C])
    return kl_coef * float(np.sum(logprobs_C.astype(np.float64) - ref_logprobs_C))


def _by_group(
    advantages_of: Callable[[np.ndarray], np.ndarray],
    rewards_B: np.ndarray,
    group_ids_B: np.ndarray,
    is_judged_B: np.ndarray,
) -> np.ndarray:
    chex.assert_rank([rewards_B, group_ids_B, is_judged_B], 1)
    chex.assert_equal_shape([rewards_B, group_ids_B, is_judged_B])
    chex.assert_type(is_judged_B, bool)
    rewards_B = rewards_B.astype(np.float64)
    if not np.isfinite(rewards_B[is_judged_B]).all():
        raise ValueError("a judged rollout's reward is not finite")
    advantages_B = np.zeros(len(rewards_B), np.float32)
    for group_id in np.unique(group_ids_B):
        members_B = (group_ids_B == group_id) & is_judged_B
        rewards_G = rewards_B[members_B]
        if len(rewards_G) >= 2 and np.ptp(rewards_G) > MIN_SPREAD:
            advantages_B[members_B] = advantages_of(rewards_G)
    return advantages_B
