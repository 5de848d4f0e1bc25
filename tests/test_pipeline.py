"""The whole path on the demo's model: every artefact, resuming, and the errors a user meets."""

import itertools
import json
import shutil
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from sgpo_jax import pipeline
from sgpo_jax.config import Config, parse_config
from sgpo_jax.files import read_json, read_jsonl, write_jsonl
from sgpo_jax.rollouts.jax_engine import JaxEngine
from sgpo_jax.run import open_run
from sgpo_jax.telemetry import Metrics
from sgpo_jax.training.step import TrainStep
from sgpo_jax.types import MachineError, UserError

DEMO = Path(__file__).parent.parent / "sgpo_jax" / "demo"


def demo_config(run_dir: Path, **sections) -> Config:
    tree: dict = {
        "run_dir": str(run_dir),
        "seed": 3,
        "model": {"path": str(DEMO / "model"), "remat": "none"},
        "data": {
            "train": [{"path": str(DEMO / "train.jsonl"), "max_queries": 60}],
            "template": "plain",
            "max_prompt_tokens": 15,
        },
        "rollouts": {"max_completion_tokens": 31, "batch_size": 64},
        "train": {
            "epochs": 1,
            "prompts_per_step": 8,
            "micro_batch_tokens": 768,
            "optimizer": {"learning_rate": 4e-4},
            "checkpoint_every": 2,
        },
        "evaluate": {
            "sets": [{"path": str(DEMO / "heldout.jsonl"), "max_queries": 20}],
            "num_samples": 4,
            "every": 3,
            "num_samples_during": 2,
        },
        "export": {"dtype": "float32"},
    }
    for name, values in sections.items():
        tree[name] = {**tree.get(name, {}), **values} if isinstance(values, dict) else values
    return parse_config(tree, "test")


def run_all(config: Config) -> None:
    with open_run(config) as run:
        pipeline.run_all(run)


def run_until(stop: int, config: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run, and be interrupted when the line of a step has just been written."""
    log = Metrics.log

    def stopping(self: Metrics, step: int, metrics: dict) -> None:
        log(self, step, metrics)
        if step == stop:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Metrics, "log", stopping)
        with pytest.raises(KeyboardInterrupt):
            run_all(config)


@pytest.fixture(scope="module")
def finished(tmp_path_factory) -> Path:
    """An uninterrupted run; tests only read it."""
    run_dir = tmp_path_factory.mktemp("finished") / "run"
    run_all(demo_config(run_dir))
    return run_dir


def final_weights(run_dir: Path) -> bytes:
    newest = max((run_dir / "hf").iterdir(), key=lambda path: path.stat().st_mtime)
    return (newest / "model.safetensors").read_bytes()


def without_times(rows: list[dict]) -> list[dict]:
    return [{k: v for k, v in row.items() if not k.startswith(("seconds/", "perf/"))} for row in rows]


def test_profile_counts_what_was_sampled(finished):
    rows = read_jsonl(finished / "profile.jsonl")
    assert len(rows) == 60
    for row in rows:
        assert row.keys() == {"query_id", "num_samples", "num_correct", "num_tokens", "num_truncated", "num_errors"}
        assert 0 <= row["num_correct"] <= row["num_samples"] == 8
        assert row["num_errors"] == 0
    head = read_json(finished / "profile.json")
    assert head["identity"]["sampling"] == {
        "num_samples": 8,
        "temperature": 1.0,
        "top_p": 1.0,
        "max_completion_tokens": 31,
    }
    assert head["tokens"]["generated"] == sum(row["num_tokens"] for row in rows)


def test_plan_follows_the_profile(finished):
    plan = read_json(finished / "plan.json")
    correct = {row["query_id"]: row["num_correct"] for row in read_jsonl(finished / "profile.jsonl")}
    buckets = {2: {3, 4, 5, 6}, 4: {2}, 8: {1}}
    unsolved = {query_id for query_id, k in correct.items() if k == 0}
    for phase in plan["phases"]:
        assert phase["name"] == f"e{phase['epoch']}-g{phase['group_size']}"
        learnable = set(phase["query_ids"]) - unsolved
        assert learnable == {q for q, k in correct.items() if k in buckets[phase["group_size"]]}
        assert len(set(phase["query_ids"]) & unsolved) == round(0.1 * len(unsolved))
    assert set(plan["dropped"]["trivial"]) == {q for q, k in correct.items() if k >= 7}
    assert plan["dropped"]["unjudged"] == []
    assert plan["forecast"]["sgpo"]["num_steps"] == len(read_jsonl(finished / "metrics.jsonl"))


def test_training_follows_the_plan(finished):
    plan, rows = read_json(finished / "plan.json"), read_jsonl(finished / "metrics.jsonl")
    assert [row["step"] for row in rows] == list(range(1, len(rows) + 1))
    for phase in plan["phases"]:
        own = [row for row in rows if row["phase"] == phase["name"]]
        assert sum(row["rollouts/num_groups"] for row in own) == len(phase["query_ids"])
        assert sum(row["rollouts/num_rollouts"] for row in own) == len(phase["query_ids"]) * phase["group_size"]
        assert (finished / "hf" / phase["name"] / "model.safetensors").exists()
    order = list(dict.fromkeys(row["phase"] for row in rows))
    assert order == [phase["name"] for phase in plan["phases"]]
    assert all(row["mismatch/logprob_gap_max"] < 1e-4 for row in rows)
    assert {row["perf/num_compilations"] for row in rows} == {3}
    assert all("eval/heldout/avg" in row for row in rows if row["step"] % 3 == 0 and row["step"] < len(rows))


def test_ledger_is_the_sum_of_what_was_generated(finished):
    compute = read_json(finished / "compute.json")
    rows = read_jsonl(finished / "metrics.jsonl")
    profiled = sum(row["num_tokens"] for row in read_jsonl(finished / "profile.jsonl"))
    trained = sum(row["rollouts/num_tokens"] for row in rows)
    stages = compute["stages"]
    assert stages["profiling"]["tokens"]["generated"] == profiled
    assert stages["training"]["tokens"]["generated"] == trained
    num_params = compute["num_params"]
    assert num_params == 161_856
    assert compute["total"]["paper"]["flops"] == 2 * num_params * profiled + 12 * num_params * trained
    assert stages["wasted"]["tokens"]["generated"] == 0
    evaluated = sum(
        score["counts"]["generated"] for file in (finished / "eval").iterdir() for score in read_json(file).values()
    )
    assert stages["evaluation"]["tokens"]["generated"] == evaluated


def test_evaluation_scores_every_question(finished):
    score = read_json(finished / "eval" / "final.json")["heldout"]
    assert score["num_questions"] == len(score["questions"]) == 20
    assert score["avg"]["mean"] == pytest.approx(np.mean([q["num_correct"] / 4 for q in score["questions"]]))
    assert score["avg"]["low"] <= score["avg"]["mean"] <= score["avg"]["high"]
    assert score["pass_at"].keys() == {"1", "2", "4"}
    assert score["pass_at"]["4"] == pytest.approx(np.mean([q["num_correct"] > 0 for q in score["questions"]]))


def test_samples_can_be_read(finished):
    rows = read_jsonl(finished / "rollouts" / "step-000001.jsonl")
    assert len(rows) == 8
    for row in rows:
        assert row["verdict"] in ("correct", "wrong")
        assert row["reward"] == (row["verdict"] == "correct")


def test_a_finished_run_does_nothing_again(finished, tmp_path):
    run_dir = tmp_path / "copy"
    shutil.copytree(finished, run_dir)
    before = {p: p.read_bytes() for p in run_dir.rglob("*.json*")}
    run_all(demo_config(run_dir))
    assert {p: p.read_bytes() for p in run_dir.rglob("*.json*")} == before


def test_stages_one_by_one_give_the_ledger_of_a_whole_run(finished, tmp_path):
    """In an order of their own: what was spent is neither lost nor counted twice."""
    run_dir = tmp_path / "run"
    stages = (
        pipeline.evaluate_newest,
        pipeline.profile_stage,
        pipeline.plan_stage,
        pipeline.train_stage,
        pipeline.evaluate_newest,
        pipeline.evaluate_newest,
        pipeline.run_all,
    )
    for stage in stages:
        with open_run(demo_config(run_dir)) as run:
            stage(run)
    assert read_json(run_dir / "compute.json") == read_json(finished / "compute.json")


def test_evaluating_in_the_middle_scores_the_newest_checkpoint(tmp_path, monkeypatch):
    run_dir = tmp_path / "run"
    run_until(3, demo_config(run_dir), monkeypatch)
    with open_run(demo_config(run_dir)) as run:
        pipeline.evaluate_newest(run)
    assert (run_dir / "eval" / "step-000002.json").exists()
    assert not (run_dir / "eval" / "final.json").exists()


@pytest.mark.parametrize("stop", [1, 2, 3, "phase", "last"])
def test_a_run_stopped_at_a_step_and_resumed_is_bit_identical(finished, tmp_path, monkeypatch, stop):
    expected = read_jsonl(finished / "metrics.jsonl")
    ends = [i for i, (a, b) in enumerate(pairwise(expected), start=1) if a["phase"] != b["phase"]]
    stop = {"phase": ends[0], "last": len(expected)}.get(stop, stop)
    run_dir = tmp_path / "run"
    run_until(stop, demo_config(run_dir), monkeypatch)
    assert len(read_jsonl(run_dir / "metrics.jsonl")) == stop
    run_all(demo_config(run_dir))

    assert final_weights(run_dir) == final_weights(finished)
    assert without_times(read_jsonl(run_dir / "metrics.jsonl")) == without_times(expected)
    for name in ("profile.jsonl", "plan.json"):
        assert (run_dir / name).read_bytes() == (finished / name).read_bytes()
    ours, theirs = (read_json(d / "compute.json") for d in (run_dir, finished))
    assert ours["total"] == theirs["total"]
    saved = max((s for s in range(stop) if s % 2 == 0 or s in ends), default=0)
    lost = sum(row["rollouts/num_tokens"] for row in expected[saved:stop])
    assert ours["stages"]["wasted"]["tokens"]["generated"] == lost
    for stage in ("profiling", "training", "evaluation"):
        assert ours["stages"][stage] == theirs["stages"][stage]


def test_what_a_step_spent_before_it_died_is_known_as_wasted(finished, tmp_path, monkeypatch):
    run_dir, expected = tmp_path / "run", read_jsonl(finished / "metrics.jsonl")
    update, num_updates = TrainStep.update, itertools.count(1)

    def dying(self, *arguments):
        if next(num_updates) == 3:
            raise MachineError("out of memory")
        return update(self, *arguments)

    with monkeypatch.context() as patch:
        patch.setattr(TrainStep, "update", dying)
        with pytest.raises(MachineError, match="out of memory"):
            run_all(demo_config(run_dir))
    assert len(read_jsonl(run_dir / "metrics.jsonl")) == 2
    run_all(demo_config(run_dir))
    ours, theirs = (read_json(d / "compute.json")["stages"] for d in (run_dir, finished))
    assert ours["training"] == theirs["training"]
    wasted = ours["wasted"]["tokens"]
    assert (wasted["generated"], wasted["trained"]) == (expected[2]["rollouts/num_tokens"], 0)


def test_a_sync_that_fails_for_good_ends_the_run_with_its_step_saved(finished, tmp_path, monkeypatch):
    run_dir = tmp_path / "run"
    update_weights = JaxEngine.update_weights

    def failing(self, params, version, probe):
        if version == 3:
            raise MachineError("no sync")
        return update_weights(self, params, version, probe)

    with monkeypatch.context() as patch:
        patch.setattr(JaxEngine, "update_weights", failing)
        with pytest.raises(MachineError, match="no sync"):
            run_all(demo_config(run_dir))
    assert [row["step"] for row in read_jsonl(run_dir / "metrics.jsonl")] == [1, 2, 3]
    assert (run_dir / "checkpoints" / "3").is_dir()
    run_all(demo_config(run_dir))
    assert final_weights(run_dir) == final_weights(finished)


def test_profile_goes_on_where_it_was_killed(finished, tmp_path):
    run_dir = tmp_path / "run"
    whole = read_jsonl(finished / "profile.jsonl")
    run_dir.mkdir()
    shutil.copy(finished / "config.yaml", run_dir)
    write_jsonl(run_dir / "profile.jsonl", reversed(whole[10:40]))
    with (run_dir / "profile.jsonl").open("a") as file:
        file.write('{"query_id": "torn')
    with open_run(demo_config(run_dir)) as run:
        pipeline.profile_stage(run)
    assert read_jsonl(run_dir / "profile.jsonl") == whole


def test_one_profile_serves_other_runs_and_parts_of_its_queries(finished, tmp_path):
    tree = demo_config(tmp_path / "run").model_dump(mode="json")
    tree["profile"] = {"reuse": str(finished)}
    tree["data"]["train"][0]["max_queries"] = 30
    config = parse_config(tree, "test")
    with open_run(config) as run:
        assert len(pipeline.profile_stage(run).rows) == 30
        pipeline.plan_stage(run)
    assert not (tmp_path / "run" / "profile.jsonl").exists()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"rollouts": {"temperature": 0.9}}, "another sampling"),
        ({"rewards": {"correct_threshold": 0.5}}, "another verifier"),
        ({"kind": "math"}, "another kinds"),
        ({"data": {"template": "plain", "max_prompt_tokens": 15}, "queries": 61}, "lacks"),
    ],
)
def test_a_profile_that_does_not_fit_is_refused(finished, tmp_path, change, message):
    tree = demo_config(tmp_path / "run").model_dump(mode="json")
    tree["profile"] = {"reuse": str(finished)}
    tree["data"]["train"][0]["max_queries"] = change.pop("queries", 60)
    tree["data"]["train"][0]["kind"] = change.pop("kind", "auto")
    for name, values in change.items():
        tree[name] = {**tree[name], **values}
    with open_run(parse_config(tree, "test")) as run, pytest.raises(UserError, match=message):
        pipeline.profile_stage(run)


def test_a_run_directory_belongs_to_one_configuration_and_one_process(finished, tmp_path):
    run_dir = tmp_path / "run"
    shutil.copytree(finished, run_dir)
    config = demo_config(run_dir, train={"epochs": 2})

    def open_it(config):
        with open_run(config):
            pass

    with pytest.raises(UserError, match=r"another configuration \(.*train\.epochs: 1 -> 2"):
        open_it(config)
    open_it(demo_config(run_dir, telemetry={"project": "other"}))  # says how, not what
    with open_run(demo_config(run_dir)), pytest.raises(UserError, match="another process is running in it"):
        open_it(demo_config(run_dir))


def test_export_gives_the_newest_checkpoint(finished, tmp_path):
    config = demo_config(finished)
    with open_run(config):  # a run that goes on does not hinder it
        pipeline.export_run(config, tmp_path / "out", None)
    with pytest.raises(UserError, match="no checkpoint of step 99"):
        pipeline.export_run(config, tmp_path / "other", 99)
    with pytest.raises(UserError, match="exists already"):
        pipeline.export_run(config, tmp_path / "out", None)
    assert (tmp_path / "out" / "model.safetensors").read_bytes() == final_weights(finished)
    assert json.loads((tmp_path / "out" / "config.json").read_text())["model_type"] == "qwen2"


def test_nothing_learnable_is_said_with_the_reasons(tmp_path):
    path = tmp_path / "rows.jsonl"
    write_jsonl(
        path,
        [
            {"question": f"{i}+1=", "answer": "never", "kind": "exact", "metadata": {"answer_after": ":"}}
            for i in range(3)
        ],
    )
    config = demo_config(
        tmp_path / "run", data={"train": [{"path": str(path)}], "template": "plain", "max_prompt_tokens": 15}
    )
    with open_run(config) as run:
        pipeline.profile_stage(run)
        with pytest.raises(UserError, match=r"none of 3 profiled queries is learnable: 0 are trivial .* 3 unsolved"):
            pipeline.plan_stage(run)
    assert not (tmp_path / "run" / "plan.json").exists()


def test_training_needs_a_plan(tmp_path):
    with (
        open_run(demo_config(tmp_path / "run")) as run,
        pytest.raises(UserError, match=r"plan\.json: no such file"),
    ):
        pipeline.train_stage(run)
