"""Every method from end to end on the demo's model: what is charged, and resuming bit for bit."""

from collections import Counter

import pytest
from test_pipeline import DEMO, demo_config, run_all, run_until, without_times

from sgpo_jax.files import read_json, read_jsonl, write_jsonl
from sgpo_jax.rollouts.jax_engine import JaxEngine
from sgpo_jax.types import Purpose, UserError

METHODS = {
    "dapo": {"train": {"method": "dapo"}},
    "greso": {"train": {"method": "greso", "loss": {"skip_uninformative": True}}},
    "knapsack": {"train": {"method": "knapsack", "loss": {"objective": "grpo", "kl_coef": 0.1}}},
    "just_in_time": {"train": {"method": "just_in_time", "prompts_per_step": 2}, "just_in_time": {"chunk_queries": 20}},
    "just_in_time, filled": {
        "train": {"method": "just_in_time", "num_updates": 2},
        "just_in_time": {"chunk_queries": 20, "group_size": 4},
    },
    "reprofiled": {"sgpo": {"later_epochs": "reprofiled", "curriculum": False}},
    "posterior": {
        "sgpo": {
            "later_epochs": "posterior",
            "later_group_sizes": [4, 8],
            "unsolved_from_epoch": 2,
            "curriculum": False,
        },
        "profile": {"stages": [2, 4]},
        "train": {"rollouts_per_step": 24},
    },
}
TRAIN = {
    "epochs": 2,
    "prompts_per_step": 4,
    "micro_batch_tokens": 384,
    "checkpoint_every": 2,
    "export_phases": False,
    "optimizer": {"learning_rate": 4e-4, "schedule": "linear"},
}


def num_queries_of(name):
    """Just-in-time profiling needs more for as many steps: it trains two rollouts of a query, if any."""
    return 48 if name.startswith("just_in_time") else 14


def config_of(name, run_dir):
    sections = METHODS[name]
    return demo_config(
        run_dir,
        data={"train": [{"path": str(DEMO / "train.jsonl"), "max_queries": num_queries_of(name)}]},
        evaluate={"sets": [], "every": 0},
        refill={"when_short": "train"},
        **{**sections, "train": {**TRAIN, **sections.get("train", {})}},
    )


@pytest.fixture
def generated(monkeypatch):
    """Completion tokens that the engine gave, by purpose, and the requests that it was given."""
    counts = Counter()
    generate = JaxEngine.generate

    def counting(self, requests, sampling):
        for group in generate(self, requests, sampling):
            counts[group.request.purpose] += sum(len(c.token_ids_C) for c in group.completions)
            counts["groups", group.request.purpose] += 1
            yield group

    monkeypatch.setattr(JaxEngine, "generate", counting)
    return counts


@pytest.mark.parametrize("name", METHODS)
def test_every_token_is_charged_and_a_stopped_run_resumes_bit_for_bit(name, tmp_path, generated, monkeypatch):
    run_all(config_of(name, tmp_path / "whole"))
    compute, rows = read_json(tmp_path / "whole" / "compute.json"), read_jsonl(tmp_path / "whole" / "metrics.jsonl")
    stages = compute["stages"]
    assert stages["training"]["tokens"]["generated"] == generated[Purpose.TRAIN]
    assert (generated[Purpose.TRAIN] > 0) == (name != "just_in_time")
    assert stages["profiling"]["tokens"]["generated"] == generated[Purpose.PROFILE]
    if name == "posterior":  # sequential: a query has up to three rounds
        profile = read_jsonl(tmp_path / "whole" / "profile.jsonl")
        num_profiled = sum({2: 1, 4: 2, 8: 3}[row["num_samples"]] for row in profile)
    else:
        num_profiled = 2 * num_queries_of(name) if name.startswith(("reprofiled", "just_in_time")) else 0
    assert generated["groups", Purpose.PROFILE] == num_profiled
    trained = stages["training"]["tokens"]
    reused = trained["trained"] - generated[Purpose.TRAIN] if name.startswith("just_in_time") else 0
    assert trained["reused"] == reused <= generated[Purpose.PROFILE]
    paper = compute["num_params"] * (12 * generated[Purpose.TRAIN] + 2 * generated[Purpose.PROFILE] + 10 * reused)
    assert compute["total"]["paper"]["flops"] == rows[-1]["compute/paper_flops"] == paper
    assert trained["trained"] == sum(row.get("train/num_tokens", 0) for row in rows) <= trained["generated"] + reused
    assert trained["old_logprobs"] == 0, "the sampler's are at hand"
    assert (trained["ref_logprobs"] > 0) == (name == "knapsack")
    assert list(dict.fromkeys(row["phase"] for row in rows)) == ["e1", "e2"]
    assert {row["perf/num_compilations"] for row in rows if row["step"] > 1} == {4 if name == "knapsack" else 3}
    assert (tmp_path / "whole" / "plan.json").exists() == (name in ("reprofiled", "posterior"))
    is_stale = any(abs(row.get("train/ratio", 1) - 1) > 1e-5 for row in rows)
    assert is_stale == name.startswith("just_in_time"), "carried groups are of older weights"
    assert rows[-1]["train/learning_rate"] == pytest.approx(0.1 * 4e-4 * min(1, rows[-1]["train/num_updates"] / 10))

    run_until(3, config_of(name, tmp_path / "stopped"), monkeypatch)
    run_all(config_of(name, tmp_path / "stopped"))
    assert without_times(read_jsonl(tmp_path / "stopped" / "metrics.jsonl")) == without_times(rows)
    assert read_json(tmp_path / "stopped" / "compute.json")["total"] == compute["total"]


def test_a_step_that_cannot_be_filled_is_charged_before_it_ends_the_run(tmp_path, generated):
    path = tmp_path / "rows.jsonl"
    write_jsonl(path, [{"question": f"{i}+1=", "answer": "never", "kind": "exact"} for i in range(12)])
    config = demo_config(
        tmp_path / "run",
        data={"train": [{"path": str(path)}]},
        evaluate={"sets": [], "every": 0},
        refill={"max_rounds": 2},
        train={**TRAIN, "method": "dapo"},
    )
    with pytest.raises(UserError, match=r"0\.0% of 8 judged groups \(0 all correct, 8 all wrong\)"):
        run_all(config)
    written = read_json(tmp_path / "run" / "compute.json")["stages"]["training"]["tokens"]["generated"]
    assert written == generated[Purpose.TRAIN] > 0
