from helpers import make_group, make_query

from sgpo_jax.schedulers import Decision
from sgpo_jax.training.metrics import rollout_metrics
from sgpo_jax.types import GroupRequest, Purpose, RolloutGroup

DECISION = Decision((), ready=True, phase="e1", ends_phase=False, done=False, progress=0.5, dropped={"all_wrong": 1})


def test_what_a_group_is_filled_up_with_is_no_group_of_its_own():
    probes = [make_group(make_query(q), outcomes, purpose=Purpose.PROFILE) for q, outcomes in PROBES.items()]
    rest = make_group(make_query("a"), [True, True], length=6)
    fill = RolloutGroup(GroupRequest(make_query("a"), 2, Purpose.TRAIN, first_sample=2), rest.rollouts)
    metrics = rollout_metrics([*probes, fill], DECISION)
    assert metrics["rollouts/num_groups"] == 0
    assert metrics["rollouts/zero_variance_frac"] == 0.0
    assert metrics["profile/num_groups"] == 3
    assert metrics["profile/num_tokens"] == 6 * 4
    assert metrics["profile/num_prompt_tokens"] == 3 * len(make_query("a").prompt_ids)
    assert metrics["profile/zero_variance_frac"] == 2 / 3
    assert metrics["rollouts/num_rollouts"] == 8
    assert metrics["rollouts/num_tokens"] == 6 * 4 + 2 * 6
    assert metrics["rollouts/accuracy"] == 5 / 8
    assert metrics["dropped/all_wrong"] == 1


def test_groups_are_counted_by_what_they_were_asked_for():
    asked = [Purpose.PROFILE, Purpose.TRAIN, Purpose.TRAIN]
    outcomes = [[True, False], [False, False], [True, False]]
    groups = [make_group(make_query(q), o, purpose=p) for q, o, p in zip("abc", outcomes, asked, strict=True)]
    metrics = rollout_metrics(groups, DECISION)
    assert (metrics["rollouts/num_groups"], metrics["rollouts/zero_variance_frac"]) == (2, 0.5)
    assert (metrics["profile/num_groups"], metrics["profile/zero_variance_frac"]) == (1, 0.0)


PROBES = {"a": [True, False], "b": [False, False], "c": [True, True]}
