"""One step as numbers and as a few completions to read."""

from collections.abc import Iterator, Sequence
from functools import reduce
from typing import Any

import numpy as np

from sgpo_jax.algorithms.losses import combine_metrics
from sgpo_jax.schedulers import Decision
from sgpo_jax.training.sequences import is_informative
from sgpo_jax.training.step import UpdateResult
from sgpo_jax.types import FinishReason, Purpose, Rollout, RolloutGroup


def rollout_metrics(groups: Sequence[RolloutGroup], decision: Decision) -> dict[str, float]:
    """Of all that was generated for a step, trained or not, profiled rollouts included. Lengths are in tokens.

    Groups are counted by what they were asked for: rollouts/ has those of training, profile/ those of a profile that
    training makes. What a group is filled up with later counts as rollouts, not as a group.
    """
    whole = [group for group in groups if group.request.first_sample == 0]
    asked_to_train = [group for group in whole if group.request.purpose is Purpose.TRAIN]
    profiled = [group for group in groups if group.request.purpose is Purpose.PROFILE]
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    judged = [rollout for rollout in rollouts if rollout.is_judged]
    lengths = [rollout.num_tokens for rollout in rollouts]
    metrics = {
        "rollouts/num_groups": len(asked_to_train),
        "rollouts/num_rollouts": len(rollouts),
        "rollouts/num_errors": len(rollouts) - len(judged),
        "rollouts/num_tokens": sum(lengths),
        "rollouts/reward": _mean([rollout.reward for rollout in judged]),
        "rollouts/accuracy": _mean([rollout.is_correct for rollout in judged]),
        "rollouts/completion_tokens": _mean(lengths),
        "rollouts/completion_tokens_max": max(lengths, default=0),
        "rollouts/truncated_frac": _mean([r.completion.finish_reason is FinishReason.LENGTH for r in rollouts]),
        "rollouts/zero_variance_frac": _mean([not is_informative(group) for group in asked_to_train]),
        "rollouts/num_trained_groups": len(decision.train),
        "profile/num_groups": len(profiled),
        "profile/num_tokens": sum(group.num_tokens for group in profiled),
        "profile/num_prompt_tokens": sum(len(group.query.prompt_ids) for group in profiled),
        "profile/zero_variance_frac": _mean([not is_informative(group) for group in profiled]),
    }
    return metrics | {f"dropped/{reason}": count for reason, count in decision.dropped.items()}


def update_metrics(results: Sequence[UpdateResult]) -> dict[str, float | None]:
    """Of the optimizer updates of one step, token means over all of them; without an update, only that."""
    if not results:
        return {"train/num_skipped": 1}
    sums = reduce(combine_metrics, [result.metrics for result in results])
    num_tokens = max(1, int(sums.num_tokens))
    return {
        "train/num_skipped": sum(not result.is_finite for result in results),
        "train/loss": _finite(np.mean([result.loss for result in results])),
        "train/grad_norm": _finite(np.mean([result.grad_norm for result in results])),
        "train/learning_rate": results[-1].learning_rate,
        "train/num_tokens": int(sums.num_tokens),
        "train/entropy": _finite(sums.entropy_sum / num_tokens),
        "train/ratio": _finite(sums.ratio_sum / num_tokens),
        "train/clipped_low_frac": float(sums.num_clipped_low / num_tokens),
        "train/clipped_high_frac": float(sums.num_clipped_high / num_tokens),
        "train/dual_clipped_frac": float(sums.num_dual_clipped / num_tokens),
        "train/ref_kl": _finite(sums.ref_kl_sum / num_tokens),
        "mismatch/logprob_gap": _finite(sums.sampler_gap_sum / num_tokens),
        "mismatch/logprob_gap_max": _finite(sums.sampler_gap_max),
        "mismatch/kl": _finite(sums.sampler_kl_sum / num_tokens),
        "mismatch/capped_frac": float(sums.num_weights_capped / num_tokens),
        "mismatch/weight": _finite(sums.weight_sum / num_tokens),
    }


def rollout_sample(groups: Sequence[RolloutGroup], count: int, step: int, phase: str) -> Iterator[dict[str, Any]]:
    """A few rollouts for reading, spread evenly over the step."""
    pairs = [(group, rollout) for group in groups for rollout in group.rollouts]
    for i in np.unique(np.linspace(0, len(pairs) - 1, min(count, len(pairs))).round().astype(int)):
        group, rollout = pairs[i]
        yield {"step": step, "phase": phase, "query_id": group.query.query_id, **_rollout_row(group, rollout)}


def _rollout_row(group: RolloutGroup, rollout: Rollout) -> dict[str, Any]:
    return {
        "prompt": group.query.prompt,
        "completion": rollout.text,
        "gold": group.query.gold,
        "extracted": rollout.judgement.extracted,
        "verdict": rollout.judgement.verdict,
        "detail": rollout.judgement.detail,
        "reward": rollout.reward,
        "finish_reason": rollout.completion.finish_reason,
        "num_tokens": rollout.num_tokens,
        "policy_version": rollout.completion.policy_version,
    }


def _mean(values: Sequence[float]) -> float:
    return float(np.mean(values)) if values else 0.0


def _finite(value: Any) -> float | None:
    """JSON has no NaN: a value that is not finite is null."""
    return float(value) if np.isfinite(value) else None
