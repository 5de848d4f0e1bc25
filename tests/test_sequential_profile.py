"""Sequential profiling on the demo's model: a prefix of the full profile, wherever it is stopped."""

import pytest
from test_pipeline import DEMO, demo_config

from sgpo_jax import pipeline
from sgpo_jax.algorithms.allocation import ProfileRow
from sgpo_jax.algorithms.sequential import num_samples_wanted
from sgpo_jax.config import SGPOConfig
from sgpo_jax.files import read_json, read_jsonl
from sgpo_jax.rollouts.collect import Collector
from sgpo_jax.run import open_run
from sgpo_jax.types import UserError

NUM_QUERIES = 40
SEQUENTIAL = {"stages": [2, 4]}


def config_of(run_dir, profile, **sections):
    data = {"train": [{"path": str(DEMO / "train.jsonl"), "max_queries": NUM_QUERIES}]}
    return demo_config(run_dir, profile=profile, data=data, evaluate={"sets": [], "every": 0}, **sections)


def profiled(config):
    with open_run(config) as run:
        return pipeline.profile_stage(run)


@pytest.fixture(scope="module")
def profiles(tmp_path_factory):
    """By the number of samples, and the sequential one. Tests only read them."""
    root = tmp_path_factory.mktemp("profiles")
    full = {n: profiled(config_of(root / str(n), {"num_samples": n})) for n in (2, 4, 8)}
    return root, full, profiled(config_of(root / "sequential", SEQUENTIAL))


def test_it_is_a_prefix_of_the_full_profile(profiles):
    """Every query stops where the rule says, with the very completions of a profile of that many samples."""
    root, full, sequential = profiles
    config = config_of(root / "sequential", SEQUENTIAL).profile
    by_size = {n: {row.query_id: row for row in profile.rows} for n, profile in full.items()}
    for row in sequential.rows:
        seen = [by_size[n][row.query_id] for n in (2, 4, 8)]
        stop = next(prefix for prefix in seen if not num_samples_wanted(prefix, config, SGPOConfig()))
        assert row == stop
    assert {row.num_samples for row in sequential.rows} == {2, 4, 8}


def test_every_round_is_charged_with_its_prompts(profiles):
    root, full, sequential = profiles
    assert sequential.counts.generated == sum(row.num_tokens for row in sequential.rows) < full[8].counts.generated
    with open_run(config_of(root / "sequential", SEQUENTIAL)) as run:
        prompts = {q: len(query.prompt_ids) for q, query in run.queries.items()}
        assert pipeline.profile_stage(run).counts == sequential.counts
    num_rounds = {2: 1, 4: 2, 8: 3}
    expected = sum(prompts[row.query_id] * num_rounds[row.num_samples] for row in sequential.rows)
    assert sequential.counts.prompt_generated == expected
    spent = read_json(root / "sequential" / "compute.json")["stages"]["profiling"]["tokens"]
    assert (spent["generated"], spent["prompt_generated"]) == (sequential.counts.generated, expected)


@pytest.mark.parametrize("stop", [5, NUM_QUERIES + 3])
def test_a_killed_profile_goes_on_in_the_middle_of_a_round(stop, profiles, tmp_path, monkeypatch):
    collect, sizes = Collector.collect, []

    def stopping(self, requests, sampling):
        for group in collect(self, requests, sampling):
            sizes.append(len(group.rollouts))
            if len(sizes) == stop:
                raise KeyboardInterrupt
            yield group

    config = config_of(tmp_path / "run", SEQUENTIAL)
    monkeypatch.setattr(Collector, "collect", stopping)
    with pytest.raises(KeyboardInterrupt):
        profiled(config)
    _, _, whole = profiles
    assert profiled(config) == whole
    assert sum(sizes) - sizes[stop - 1] == sum(row.num_samples for row in whole.rows), "only one group is sampled twice"
    assert [ProfileRow(**row) for row in read_jsonl(tmp_path / "run" / "profile.jsonl")] == list(whole.rows)


@pytest.mark.parametrize("changes", [{"profile": {"stages": [2]}}, {"profile": {}}, {"sgpo": {"group_sizes": [2, 8]}}])
def test_it_serves_no_run_that_would_have_stopped_elsewhere(changes, profiles, tmp_path):
    root, _, _ = profiles
    profile = {"reuse": str(root / "sequential"), **changes.get("profile", SEQUENTIAL)}
    with pytest.raises(UserError, match="another sampling"):
        profiled(config_of(tmp_path / "run", profile, sgpo=changes.get("sgpo", {})))


def test_the_plan_goes_by_the_rates(profiles, capsys):
    root, _, sequential = profiles
    with open_run(config_of(root / "sequential", SEQUENTIAL)) as run:
        pipeline.plan_stage(run)
    phases = {
        phase["group_size"]: phase["query_ids"] for phase in read_json(root / "sequential" / "plan.json")["phases"]
    }
    for row in sequential.rows:
        if (row.num_correct, row.num_samples) in ((1, 2), (2, 4), (3, 4)):
            assert row.query_id in phases[2]
    forecast = read_json(root / "sequential" / "plan.json")["forecast"]["sgpo"]["compute"]["stages"]["profiling"]
    assert forecast["tokens"]["generated"] == pytest.approx(sequential.counts.generated, abs=1)
