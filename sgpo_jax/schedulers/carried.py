"""Judged groups as JSON values and back, bit for bit: what a scheduler carries over from one step to the next."""

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

import numpy as np

from sgpo_jax.types import (
    Completion,
    FinishReason,
    GroupRequest,
    Judgement,
    Purpose,
    Query,
    Rollout,
    RolloutGroup,
    Verdict,
)


def group_to_json(group: RolloutGroup) -> dict[str, Any]:
    """The query by its id. A float32 is exact as a JSON number."""
    request = group.request
    return {
        "query_id": request.query.query_id,
        "num_samples": request.num_samples,
        "purpose": request.purpose.value,
        "visit": request.visit,
        "first_sample": request.first_sample,
        "rollouts": [_rollout_to_json(rollout) for rollout in group.rollouts],
    }


def group_from_json(tree: Mapping[str, Any], queries: Mapping[str, Query]) -> RolloutGroup:
    """The inverse of `group_to_json`."""
    request = GroupRequest(
        queries[tree["query_id"]], tree["num_samples"], Purpose(tree["purpose"]), tree["visit"], tree["first_sample"]
    )
    return RolloutGroup(request, tuple(_rollout_from_json(rollout) for rollout in tree["rollouts"]))


def _rollout_to_json(rollout: Rollout) -> dict[str, Any]:
    completion = rollout.completion
    return {
        "sample_index": completion.sample_index,
        "token_ids": completion.token_ids_C.tolist(),
        "sampler_logprobs": completion.sampler_logprobs_C.tolist(),
        "finish_reason": completion.finish_reason.value,
        "policy_version": completion.policy_version,
        "error": completion.error,
        "text": rollout.text,
        "judgement": asdict(rollout.judgement),
        "reward": rollout.reward,
    }


def _rollout_from_json(tree: Mapping[str, Any]) -> Rollout:
    completion = Completion(
        sample_index=tree["sample_index"],
        token_ids_C=np.array(tree["token_ids"], np.int32),
        sampler_logprobs_C=np.array(tree["sampler_logprobs"], np.float32),
        finish_reason=FinishReason(tree["finish_reason"]),
        policy_version=tree["policy_version"],
        error=tree["error"],
    )
    judgement = Judgement(**{**tree["judgement"], "verdict": Verdict(tree["judgement"]["verdict"])})
    return Rollout(completion, tree["text"], judgement, tree["reward"])
