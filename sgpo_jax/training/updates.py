"""From a step's groups to the micro-batches of its updates, with every log-probability that the loss needs."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from sgpo_jax.algorithms.advantages import k1_reward_penalty
from sgpo_jax.algorithms.compute import TokenCounts
from sgpo_jax.config import Config
from sgpo_jax.data.batching import Batch, BatchShape, TrainSequence, completions_of, pack, with_old_logprobs
from sgpo_jax.schedulers import reused
from sgpo_jax.training.sequences import is_informative, train_sequences
from sgpo_jax.training.step import TrainStep
from sgpo_jax.types import RolloutGroup


def make_updates(
    groups: Sequence[RolloutGroup], step: TrainStep, params: Any, reference: Any, shape: BatchShape, config: Config
) -> list[list[Batch]]:
    """train.num_updates updates, each on its share of the groups; one without a token to train on is left out.

    params: of the policy before the first of them. reference: what the KL divergence is from, None without one. With
    train.loss.skip_uninformative an update may have no micro-batch: its gradient is zero, not missing.
    """
    num_updates = config.train.num_updates
    shares = np.array_split(np.arange(len(groups)), num_updates)
    updates = []
    for share in shares:
        sequences = _sequences([groups[i] for i in share.tolist()], step, reference, shape, config)
        if any(sequence.num_loss_tokens for sequence in sequences):
            updates.append(_batches(sequences, step, reference, shape, config))
    if config.train.loss.old_logprobs == "sampler":
        updates = [[with_old_logprobs(b, b.sampler_logprobs_BT) for b in batches] for batches in updates]
    elif num_updates > 1:
        updates = [step.old_logprobs(params, batches) for batches in updates]
    return updates


def trained_counts(groups: Sequence[RolloutGroup], config: Config) -> TokenCounts:
    """Tokens of the passes that `make_updates` and the updates make, for the itemised ledger; and for the paper's,
    those of whole groups that profiling has already been charged for."""
    loss = config.train.loss
    num_reused = sum(rollout.num_tokens for group in groups for rollout in reused(group))
    if loss.skip_uninformative:
        groups = [group for group in groups if is_informative(group)]
    completions = sum(r.num_tokens for group in groups for r in group.rollouts if r.is_judged)
    prompts = sum(group.num_judged * len(group.query.prompt_ids) for group in groups)
    both = completions + prompts
    return TokenCounts(
        trained=completions,
        reused=num_reused,
        prompt_trained=prompts,
        old_logprobs=both if config.train.num_updates > 1 and loss.old_logprobs == "trainer" else 0,
        ref_logprobs=both if loss.kl_coef else 0,
        rematerialised=both if config.model.remat == "full" else 0,
    )


def _sequences(
    groups: Sequence[RolloutGroup], step: TrainStep, reference: Any, shape: BatchShape, config: Config
) -> list[TrainSequence]:
    """With advantages, from which k1 has taken its penalty. *Reading*: the sampler's log-probs stand for the policy's,
    whose own would take one more pass."""
    loss = config.train.loss
    sequences = train_sequences(groups, loss)
    if not loss.kl_coef or loss.kl_kind != "k1":
        return sequences
    batches = pack(sequences, shape)
    ref_logprobs = completions_of(sequences, batches, step.logprobs(reference, batches, of="reference"))
    penalties = [
        k1_reward_penalty(sequence.sampler_logprobs_C, ref_C, kl_coef=loss.kl_coef)
        for sequence, ref_C in zip(sequences, ref_logprobs, strict=True)
    ]
    return train_sequences(groups, loss, penalties)


def _batches(
    sequences: Sequence[TrainSequence], step: TrainStep, reference: Any, shape: BatchShape, config: Config
) -> list[Batch]:
    loss = config.train.loss
    if loss.skip_uninformative:
        informative = {sequence.group_id for sequence in sequences if sequence.advantage}
        left_out = [sequence for sequence in sequences if sequence.group_id not in informative]
        return pack([s for s in sequences if s.group_id in informative], shape, left_out)
    batches = pack(sequences, shape)
    return step.ref_logprobs(reference, batches) if loss.kl_coef and loss.kl_kind != "k1" else batches
