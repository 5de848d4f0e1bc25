"""From groups to updates: every objective by hand, the KL options, and what is left out of the passes."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from helpers import make_config, make_group, make_query, tiny_model

from sgpo_jax.algorithms.compute import Ledger, Stage
from sgpo_jax.algorithms.objectives import RECIPES
from sgpo_jax.data.batching import BatchShape
from sgpo_jax.training.sequences import train_sequences
from sgpo_jax.training.state import initial_state
from sgpo_jax.training.step import TrainStep
from sgpo_jax.training.updates import make_updates, trained_counts
from sgpo_jax.types import Purpose

SHAPE = BatchShape(num_rows=4, row_length=32)
T, F = True, False


def group_of(name, outcomes, length):
    return make_group(make_query(name, (1, 2, 3)), outcomes, length=length, seed=len(name) + length)


# Sizes 2, 4 and 8 in one step, as Knapsack RL has them; one rollout without a verdict; two groups without a signal.
GROUPS = [
    group_of("a", [T, F], 5),
    group_of("b", [F, F, F, F], 7),
    group_of("c", [T, F, F, F, F, F, None, T], 9),
    group_of("d", [T, T], 4),
    group_of("e", [F, T, F, F], 3),
]


def make_step(train=None, **loss):
    config = make_config(
        train={"loss": loss, "optimizer": {"weight_decay": 0.1}, **(train or {})},
        rollouts={"max_completion_tokens": 20},
    )
    model = tiny_model(1, sharpness=5.0)
    step = TrainStep(model, config)
    return step, initial_state(nnx.state(model), step.optimizer), config


def copy_of(params):
    return jax.tree.map(jnp.copy, params)


def run(groups=GROUPS, reference=None, train=None, **loss):
    """One step with one update: its micro-batches, its result and the new state."""
    step, state, config = make_step(train, **loss)
    reference = copy_of(state.params) if reference is None and config.train.loss.kl_coef else reference
    (batches,) = make_updates(groups, step, state.params, reference, SHAPE, config)
    state, result = step.update(state, batches, 1e-2)
    return batches, result, state


def by_hand(groups, advantage_of):
    """(advantage, completion) of every judged rollout."""
    pairs = []
    for group in groups:
        judged = [r for r in group.rollouts if r.is_judged]
        rewards = np.array([r.reward for r in judged])
        values = advantage_of(rewards) if np.ptp(rewards) > 0 else np.zeros(len(rewards))
        pairs += list(zip(values, judged, strict=True))
    return pairs


def normalised(rewards):
    return (rewards - rewards.mean()) / (rewards.std() + 1e-6)


def leave_one_out(rewards):
    return rewards - (rewards.sum() - rewards) / (len(rewards) - 1)


def test_every_objective_by_hand():
    """At a ratio of 1, which the first update has, the loss is a weighted sum of advantages."""
    norm = by_hand(GROUPS, normalised)
    num_tokens, num_sequences = sum(r.num_tokens for _, r in norm), len(norm)
    loo = by_hand(GROUPS, leave_one_out)
    centred = by_hand(GROUPS, lambda rewards: rewards - rewards.mean())
    expected = {
        "dapo": sum(a * r.num_tokens for a, r in norm) / num_tokens,
        "grpo": sum(a for a, _ in norm) / num_sequences,
        "dr_grpo": sum(a * r.num_tokens for a, r in centred) / (num_sequences * 20),
        "rloo": sum(a * r.num_tokens for a, r in loo) / num_tokens,
        "gspo": sum(a for a, _ in norm) / num_sequences,
    }
    assert {*expected, "cispo"} == RECIPES.keys()
    for objective, value in expected.items():
        assert run(objective=objective)[1].loss == pytest.approx(-value, abs=1e-5), objective
    step, state, config = make_step(objective="cispo")
    (batches,) = make_updates(GROUPS, step, state.params, None, SHAPE, config)
    logprobs = step.logprobs(state.params, batches)
    total = sum(float(jnp.sum(b.advantages_BT * b.loss_mask_BT * x)) for b, x in zip(batches, logprobs, strict=True))
    assert step.update(state, batches, 1e-2)[1].loss == pytest.approx(-total / num_tokens, rel=1e-4)


@pytest.mark.parametrize("objective", RECIPES)
@pytest.mark.parametrize("outcomes", [[T], [F], [T, T, T], [F, F], [None, None], [None], [T, None], [T, T, None]])
def test_no_signal_is_exactly_zero(objective, outcomes):
    config = make_config(train={"loss": {"objective": objective}}).train.loss
    groups = [group_of("x", outcomes, 4), group_of("y", [T, F], 4)]
    advantages = [s.advantage for s in train_sequences(groups, config)]
    assert advantages[: len(outcomes)] == [0.0] * len(outcomes)
    assert advantages[-2] > 0 > advantages[-1]


def test_steps_of_mixed_group_sizes_need_no_compilation_of_their_own():
    step, state, config = make_step()
    for groups in ([GROUPS[0]], GROUPS, [GROUPS[2], GROUPS[4]]):
        (batches,) = make_updates(groups, step, state.params, None, SHAPE, config)
        state, _ = step.update(state, batches, 1e-3)
        assert step.num_compilations == 3


@pytest.mark.parametrize("objective", RECIPES)
def test_leaving_out_groups_without_advantage_changes_no_gradient(objective):
    full_batches, full, full_state = run(objective=objective)
    batches, part, state = run(objective=objective, skip_uninformative=True)
    assert sum(int((b.segment_ids_BT > 0).sum()) for b in batches) < sum(
        int((b.segment_ids_BT > 0).sum()) for b in full_batches
    )
    np.testing.assert_allclose(part.grad_norm, full.grad_norm, rtol=1e-5)
    np.testing.assert_allclose(part.loss, full.loss, atol=1e-6)
    for a, b in zip(jax.tree.leaves(state.params), jax.tree.leaves(full_state.params), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5)


def test_a_step_without_any_advantage_is_an_update_of_zero_gradient_either_way():
    """Weight decay and momentum go on, as without the knob."""
    groups = [GROUPS[1], GROUPS[3]]
    _, full, full_state = run(groups)
    batches, part, state = run(groups, skip_uninformative=True)
    assert batches == []
    assert full.grad_norm == part.grad_norm == 0.0
    jax.tree.map(np.testing.assert_array_equal, state, full_state)


def test_what_is_left_out_is_saved_in_the_itemised_ledger_only():
    configs = [make_config(train={"loss": {"skip_uninformative": skip}}) for skip in (False, True)]
    full, part = (trained_counts(GROUPS, config) for config in configs)
    b, d = 4 * 7, 2 * 4
    assert full.trained - part.trained == b + d
    assert full.prompt_trained - part.prompt_trained == 3 * 6
    assert full.rematerialised - part.rematerialised == b + d + 18
    ledgers = [Ledger(10).add(Stage.TRAINING, dataclasses.replace(c, generated=500)) for c in (full, part)]
    assert ledgers[0].paper_flops == ledgers[1].paper_flops
    assert ledgers[0].itemised_flops > ledgers[1].itemised_flops


@pytest.mark.parametrize(("kind", "penalty"), [("k2", lambda d: d**2 / 2), ("k3", lambda d: np.exp(d) - d - 1)])
def test_divergence_from_the_reference_is_part_of_the_loss(kind, penalty):
    step, state, config = make_step(kl_coef=0.3, kl_kind=kind)
    reference = jax.tree.map(lambda x: x + 0.03 * jax.random.normal(jax.random.key(x.size), x.shape), state.params)
    (batches,) = make_updates(GROUPS, step, state.params, reference, SHAPE, config)
    masks = [np.asarray(b.loss_mask_BT) for b in batches]
    own, ref = (
        np.concatenate([np.asarray(x)[m] for x, m in zip(step.logprobs(p, _bare(batches)), masks, strict=True)])
        for p in (state.params, reference)
    )
    expected = 0.3 * penalty((ref - own).astype(np.float64)).mean()
    assert expected > 1e-3
    _, result = step.update(state, batches, 1e-2)
    assert result.loss == pytest.approx(run()[1].loss + expected, rel=1e-3)
    assert step.num_compilations == 4


def _bare(batches):
    return [dataclasses.replace(b, ref_logprobs_BT=None) for b in batches]


def test_the_initial_weights_have_no_divergence_from_themselves():
    _, plain, _ = run()
    _, result, _ = run(kl_coef=0.5)
    assert result.metrics.ref_kl_sum == pytest.approx(0, abs=1e-6)
    assert (result.loss, result.grad_norm) == pytest.approx((plain.loss, plain.grad_norm), rel=1e-4)


def completion_logprobs(params, group, rollout):
    """One sequence alone, without packing."""
    model = nnx.merge(nnx.graphdef(tiny_model(1)), params)
    ids = jnp.asarray([*group.query.prompt_ids, *rollout.completion.token_ids_C])[None]
    length = ids.shape[1]
    logits = model.logits(model.hidden(ids, jnp.arange(length)[None], jnp.ones((1, length), jnp.int32)))[0]
    logprobs = jax.nn.log_softmax(logits[:-1])[jnp.arange(length - 1), ids[0, 1:]]
    return np.asarray(logprobs)[len(group.query.prompt_ids) - 1 :]


def test_k1_is_taken_off_the_rewards():
    step, state, config = make_step(kl_coef=0.05, kl_kind="k1")
    (batches,) = make_updates(GROUPS, step, state.params, state.params, SHAPE, config)
    rollouts = [(group, rollout) for group in GROUPS for rollout in group.rollouts]
    penalties = [
        0.05 * np.sum(rollout.completion.sampler_logprobs_C - completion_logprobs(state.params, group, rollout))
        for group, rollout in rollouts
    ]
    expected = [s.advantage for s in train_sequences(GROUPS, config.train.loss, penalties)]
    for batch in batches:
        assert batch.ref_logprobs_BT is None
        mask_BT = batch.loss_mask_BT
        wanted = [expected[number] for number in batch.sequence_ids_BT[mask_BT]]
        np.testing.assert_allclose(batch.advantages_BT[mask_BT], wanted, atol=1e-3)
    assert any(expected[2:6]), "the rewards of the all-wrong group differ now"


def test_reference_passes_are_charged_where_they_are_made():
    for loss in ({}, {"kl_coef": 0.1}, {"kl_coef": 0.1, "kl_kind": "k1"}):
        counts = trained_counts(GROUPS, make_config(train={"loss": loss}))
        assert counts.ref_logprobs == (counts.trained + counts.prompt_trained if loss else 0)
        assert counts.old_logprobs == 0


def test_several_updates_share_the_groups_and_the_old_policy():
    step, state, config = make_step(train={"num_updates": 2}, kl_coef=0.1)
    updates = make_updates(GROUPS, step, state.params, copy_of(state.params), SHAPE, config)
    assert len(updates) == 2
    for batches, groups in zip(updates, (GROUPS[:3], GROUPS[3:]), strict=True):
        assert batches[0].num_loss_tokens == sum(r.num_tokens for g in groups for r in g.rollouts if r.is_judged)
        for batch in batches:
            np.testing.assert_allclose(batch.old_logprobs_BT, batch.ref_logprobs_BT, atol=1e-6)
    assert make_updates([], step, state.params, state.params, SHAPE, config) == []
    only_errors = [group_of("z", [None, None], 4)]
    assert make_updates(only_errors, step, state.params, state.params, SHAPE, config) == []


def test_the_ratio_is_against_the_sampler_where_older_weights_sampled():
    """The sampler's log-probabilities are far off here, so that many tokens are clipped."""
    step, state, config = make_step(old_logprobs="sampler")
    (batches,) = make_updates(GROUPS, step, state.params, None, SHAPE, config)
    own = step.logprobs(state.params, batches_without_old(batches))
    total = clipped = 0.0
    for batch, logprobs_BT in zip(batches, own, strict=True):
        np.testing.assert_array_equal(batch.old_logprobs_BT, batch.sampler_logprobs_BT)
        mask_BT = batch.loss_mask_BT
        ratio = np.exp(np.asarray(logprobs_BT, np.float64) - batch.sampler_logprobs_BT)[mask_BT]
        advantage = batch.advantages_BT[mask_BT]
        total += np.minimum(ratio * advantage, np.clip(ratio, 0.8, 1.28) * advantage).sum()
        clipped += np.sum((advantage < 0) & (ratio < 0.8))
    _, result = step.update(state, batches, 1e-2)
    assert result.loss == pytest.approx(-total / float(batches[0].num_loss_tokens), rel=1e-4)
    assert result.metrics.num_clipped_low == clipped > 0
    assert step.num_compilations == 4  # the log-probabilities of this test are one of them


def batches_without_old(batches):
    return [dataclasses.replace(b, old_logprobs_BT=None) for b in batches]


def test_several_updates_against_the_sampler_need_no_pass_for_old_logprobs():
    step, state, config = make_step(train={"num_updates": 2}, old_logprobs="sampler")
    updates = make_updates(GROUPS, step, state.params, None, SHAPE, config)
    assert step.num_compilations == 0
    for batches in updates:
        for batch in batches:
            np.testing.assert_array_equal(batch.old_logprobs_BT, batch.sampler_logprobs_BT)
    assert trained_counts(GROUPS, config).old_logprobs == 0
    assert trained_counts(GROUPS, make_config(train={"num_updates": 2})).old_logprobs > 0


def test_what_was_profiled_is_reused_whatever_its_verdict_or_signal():
    probe = make_group(make_query("p"), [T, None], purpose=Purpose.PROFILE, length=5)
    fill = make_group(make_query("p"), [F, F, T], length=7)
    filled = dataclasses.replace(probe, rollouts=probe.rollouts + fill.rollouts)
    dull = make_group(make_query("d"), [F, F], purpose=Purpose.PROFILE, length=3)
    for skip in (False, True):
        config = make_config(train={"loss": {"skip_uninformative": skip}})
        counts = trained_counts([filled, GROUPS[0], dull], config)
        assert counts.reused == 2 * 5 + 2 * 3
        assert counts.trained == 5 + 3 * 7 + 2 * 5 + (0 if skip else 2 * 3)
