"""`launch study`: the protocol as configurations, runs in child processes, tuning, tables; one small study for real."""

import csv
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from contextlib import closing, suppress
from pathlib import Path

import pyarrow.parquet
import pytest
from click.testing import CliRunner

from sgpo_jax.launch import cli
from sgpo_jax.strict_yaml import parse
from sgpo_jax.study import workers
from sgpo_jax.study.cells import Protocol, State
from sgpo_jax.study.child import GRACE_S
from sgpo_jax.study.conduct import conduct, write_report
from sgpo_jax.study.config import StudyConfig, load_study
from sgpo_jax.study.questions import check_disjoint
from sgpo_jax.study.readings import read_task, targets_of
from sgpo_jax.study.report import Report
from sgpo_jax.study.results import LedgerKind
from sgpo_jax.study.workers import Worker, run_cells, worker_cpus, worker_gpus
from sgpo_jax.types import MachineError, UserError

ROOT = Path(__file__).parent.parent
DEMO = ROOT / "sgpo_jax" / "demo"
FAKE = (sys.executable, str(Path(__file__).parent / "fake_study_run.py"))


def read_csv(path):
    with path.open() as lines:
        return list(csv.DictReader(lines))


def write_questions(path, operands):
    path.write_text("".join(f"{json.dumps({'question': f'1+{n}=', 'answer': str(n + 1)})}\n" for n in operands))


def study_tree(tmp_path, **changes):
    """Three methods, the third like the second; the fake run's accuracy is 100 times its learning rate."""
    for name, operands in (("train", (1, 2)), ("held_out", (3, 4)), ("tuning", (5, 6))):
        write_questions(tmp_path / f"{name}.jsonl", operands)
    base = {
        "run_dir": "unused",
        "model": {"path": str(DEMO / "model")},
        "data": {"train": [{"path": str(tmp_path / "train.jsonl")}], "template": "plain", "max_prompt_tokens": 15},
        "evaluate": {"sets": [{"path": str(tmp_path / "held_out.jsonl"), "name": "set"}]},
    }
    (tmp_path / "base.yaml").write_text(json.dumps(base))
    return {
        "study_dir": str(tmp_path / "study"),
        "base": str(tmp_path / "base.yaml"),
        "tasks": {"t": {"tuning_settings": tuning_settings(tmp_path)}},
        "methods": {
            "dapo": {"settings": {"train.method": "dapo"}, "tune": True},
            "sgpo": {"settings": {"train": {"method": "sgpo"}}, "tune": True},
            "sgpo-flat": {"like": "sgpo", "settings": {"sgpo": {"curriculum": False}}, "seeds": [1]},
        },
        "seeds": [1, 2],
        "tuning": {
            "seeds": [100],
            "grid": {
                "rate": [{"train.optimizer.learning_rate": rate} for rate in (2e-3, 6e-3, 4e-3)],
                "epochs": [{"train.epochs": 1}, {"train.epochs": 2}],
            },
        },
        "baselines": ["dapo"],
        "num_workers": 2,
        **changes,
    }


def tuning_settings(tmp_path, **changes):
    return {"evaluate.sets": [{"path": str(tmp_path / "tuning.jsonl"), "name": "set"}], **changes}


def study_of(tmp_path, **changes):
    return parse(StudyConfig, study_tree(tmp_path, **changes), "study.yaml")


def protocol_of(tmp_path, **changes):
    return Protocol(study_of(tmp_path, **changes), Path("study.yaml"))


@pytest.fixture
def fake_runs(monkeypatch):
    monkeypatch.setattr(workers, "CHILD", FAKE)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")  # there may be fewer GPUs than workers


@pytest.mark.parametrize("path", sorted((ROOT / "configs").glob("study-*.yaml")), ids=lambda path: path.name)
def test_every_study_of_the_project_is_valid(path, monkeypatch):
    monkeypatch.chdir(ROOT)
    protocol = Protocol(load_study(path), path)
    assert protocol.planned
    assert path.read_text().startswith("# "), "a study begins with what it reproduces"


def test_cells_are_methods_by_seeds_and_candidates(tmp_path):
    protocol = protocol_of(tmp_path)
    assert len(protocol.candidates) == 6
    assert len(protocol.tuning_cells) == 2 * 6
    assert protocol.final_cells({}) == [], "nothing can be run before tuning has chosen"
    chosen = {("t", name): protocol.candidates[3] for name in ("dapo", "sgpo")}
    cells = protocol.final_cells(chosen)
    assert [cell.name for cell in cells] == [
        "t/dapo/seed-1",
        "t/sgpo/seed-1",
        "t/sgpo-flat/seed-1",
        "t/dapo/seed-2",
        "t/sgpo/seed-2",
    ]
    assert len(cells) == len(protocol.planned)
    assert len({cell.config.run_dir for cell in [*cells, *protocol.tuning_cells]}) == 17
    assert [cell.config.seed for cell in cells] == [1, 1, 1, 2, 2]
    for cell in cells:
        assert cell.config.train.optimizer.learning_rate == 6e-3
        assert cell.config.train.epochs == 2
        assert protocol.evaluation_source(cell.config).path == str(tmp_path / "held_out.jsonl")
    assert {cell.config.evaluate.sets[0].path for cell in protocol.tuning_cells} == {str(tmp_path / "tuning.jsonl")}
    flat = cells[2]
    assert flat.config.train.method == "sgpo"
    assert not flat.config.sgpo.curriculum
    assert flat.settings == {
        "train.method": "sgpo",
        "train.optimizer.learning_rate": 6e-3,
        "train.epochs": 2,
        "sgpo.curriculum": False,
    }


def test_a_candidate_beats_the_tuned_method_and_yields_to_its_descendants(tmp_path):
    methods = {
        "a": {"settings": {"train.method": "dapo", "train.epochs": 7}, "tune": True},
        "b": {"like": "a", "settings": {"train.epochs": 9}},
        "c": {"settings": {"train.method": "dapo", "train.epochs": 5}},
        "d": {"like": "b", "tune": True},
        "e": {"like": "d"},
    }
    protocol = protocol_of(tmp_path, methods=methods, baselines=["a"], seeds=[1])
    cells = protocol.final_cells({("t", "a"): {"train.epochs": 8}, ("t", "d"): {"train.epochs": 6}})
    assert {cell.method: cell.config.train.epochs for cell in cells} == {"a": 8, "b": 9, "c": 5, "d": 6, "e": 6}


def test_a_profile_is_shared_by_those_that_go_by_one(tmp_path):
    methods = {
        **study_tree(tmp_path)["methods"],
        "sgpo-n4": {"like": "sgpo", "settings": {"profile.num_samples": 4}},
    }
    protocol = protocol_of(tmp_path, methods=methods)
    chosen = {("t", name): {} for name in ("dapo", "sgpo")}
    shared = str(tmp_path / "study" / "t" / "profile")
    reuse = {cell.method: cell.config.profile.reuse for cell in protocol.final_cells(chosen)}
    assert reuse == {"dapo": None, "sgpo": shared, "sgpo-flat": shared, "sgpo-n4": None}
    assert [cell.config.run_dir for cell in protocol.profile_cells(protocol.planned)] == [shared]
    protocol = protocol_of(tmp_path, methods={"dapo": {"settings": {"train.method": "dapo"}}}, tuning=None)
    assert protocol.profile_cells(protocol.planned) == []


@pytest.mark.parametrize("place", ["base", "settings", "task"])
def test_a_profile_that_is_named_takes_the_place_of_the_shared_one(tmp_path, place):
    named = {"profile.reuse": "elsewhere"}
    tree = study_tree(tmp_path, tuning=None, methods={"sgpo": {}, "own": {"settings": {"profile.reuse": None}}})
    tree["baselines"] = ["sgpo"]
    if place == "base":
        base = json.loads((tmp_path / "base.yaml").read_text())
        (tmp_path / "base.yaml").write_text(json.dumps({**base, "profile": {"reuse": "elsewhere"}}))
    elif place == "settings":
        tree["settings"] = named
    else:
        tree["tasks"] = {"t": {"settings": named}}
    protocol = Protocol(parse(StudyConfig, tree, "study.yaml"), Path("study.yaml"))
    reuse = {cell.method: cell.config.profile.reuse for cell in protocol.planned}
    assert reuse == {"sgpo": "elsewhere", "own": None}
    assert protocol.profile_cells(protocol.planned) == []


def test_a_candidate_that_changes_what_a_profile_is_makes_its_own(tmp_path):
    grid = [{"profile.num_samples": 8}, {"profile.num_samples": 4}, {"rollouts.temperature": 0.9}, {"train.epochs": 1}]
    tuning = {"seeds": [100], "grid": {"axis": grid}}
    settings = {"profile.num_samples": 8}
    protocol = protocol_of(
        tmp_path, settings=settings, methods={"sgpo": {"tune": True}}, tuning=tuning, baselines=["sgpo"]
    )
    is_shared = [cell.config.profile.reuse is not None for cell in protocol.tuning_cells]
    assert is_shared == [True, False, False, True]


TUNED = {"settings": {"train.method": "dapo"}, "tune": True}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"seed": [1]}, "study.yaml: unknown key seed=[1]: did you mean seeds?"),
        (
            {"tasks": {"t": {"setings": {}}}},
            "unknown key tasks.t.setings={}: did you mean tasks.t.settings?",
        ),
        ({"methods": {"a b": TUNED}}, "study.yaml: methods.a b"),
        ({"methods": {"profile": TUNED}}, "a method cannot be named profile"),
        ({"methods": {"dapo": {**TUNED, "like": "x"}}}, "methods.dapo.like='x' is no method: dapo"),
        ({"methods": {"dapo": {"like": "b"}, "b": {"like": "dapo"}}}, "methods.dapo.like: dapo is like b is like dapo"),
        ({"baselines": ["grpo"]}, "baselines: 'grpo' is no method: dapo, sgpo, sgpo-flat"),
        ({"tuning": None}, "methods.dapo.tune=true needs the section tuning"),
        ({"methods": {"dapo": {}}}, "the section tuning needs a method with tune: true"),
        ({"seeds": [99, 100]}, "tuning.seeds: 100 is a seed of final runs too"),
        ({"base": "nowhere.yaml"}, "nowhere.yaml: cannot be read as a configuration: No such file"),
        (
            {"settings": {"train.epoch": 3}},
            "study.yaml: settings: unknown key train.epoch=3: did you mean",
        ),
        (
            {"tasks": {"t": {"settings": {"train": {"epochs": 0}}}}},
            "study.yaml: tasks.t.settings: train.epochs=0: allowed is greater",
        ),
        ({"settings": {"evaluate.sets": []}, "tasks": {"t": {}}}, "has no evaluate.sets: a study compares accuracies"),
        ({"evaluation_set": "other"}, "evaluation_set='other' is none of the evaluate.sets of t/dapo"),
        ({"settings": {"data.train.0.max_queries": 5}}, "max_queries draws other questions for every seed"),
        (
            {"tuning": {"seeds": [100], "at_flops": 1e5, "grid": {"axis": [{"train.epochs": 1}]}}},
            "t/dapo/candidate-0/seed-100 has no evaluation during training, which tuning.at_flops compares by",
        ),
    ],
)
def test_a_wrong_study_is_one_line(tmp_path, changes, message):
    with pytest.raises(UserError) as caught:
        protocol_of(tmp_path, **changes)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_study_of_fake_runs_tunes_runs_and_reads(tmp_path, fake_runs):
    """Every figure of the tables is worked out by hand from what the fake run leaves."""
    study = study_of(tmp_path, budget_fracs=[0.5, 1.0])
    conduct(study, Path("study.yaml"))
    directory = tmp_path / "study"

    tuning = read_csv(directory / "tuning.csv")
    assert len(tuning) == 12
    chosen = [row for row in tuning if row["chosen"] == "true"]
    # 6e-3 is best; of its two equal candidates the first.
    assert [row["settings"].split(" train.optimizer")[-1] for row in chosen] == [
        "train.optimizer.learning_rate=0.006 train.epochs=1"
    ] * 2

    rows = {(row["method"], row["seed"]): row for row in read_csv(directory / "study.csv")}
    assert list(rows) == [("dapo", "1"), ("dapo", "2"), ("sgpo", "1"), ("sgpo", "2"), ("sgpo-flat", "1")]
    dapo, sgpo = rows["dapo", "1"], rows["sgpo", "2"]
    expected = {
        "final_accuracy": (0.6, 0.6),
        "total_flops": (120_000, 50_000),
        "total_flops_itemised": (20_000, 10_000),
        "profiling_flops": (0, 2_000),
        "generated_tokens": (1000, 500),
        "zero_variance_frac": (1 / 6, 1 / 6),
        "num_steps": (2, 2),
        "seconds": (4, 4),
        "target_accuracy": (0.59, 0.59),
        # The last of the curve's two lines, from 0.4 to 0.6, is at 0.59 after 95% of it.
        "flops_to_target": (60_000 + 0.95 * 60_000, 2_000 + 24_000 * 1.95),
        "flops_to_target_itemised": (10_000 + 0.95 * 10_000, 2_000 + 4_000 * 1.95),
        "accuracy_at_50pct": (0.4, 0.6),
        "accuracy_at_100pct": (0.6, 0.6),
        # Of dapo's 20 K itemised FLOPs; half of them are sgpo's whole run.
        "accuracy_at_50pct_itemised": (0.4, 0.6),
    }
    for column, values in expected.items():
        assert (float(dapo[column]), float(sgpo[column])) == pytest.approx(values), column
    assert pyarrow.parquet.read_table(directory / "study.parquet").num_rows == 5

    curve = [row for row in read_csv(directory / "curves.csv") if (row["method"], row["seed"]) == ("sgpo", "1")]
    assert [float(row["paper_flops"]) for row in curve] == [2_000, 26_000, 50_000]
    assert [float(row["accuracy"]) for row in curve] == pytest.approx([0.2, 0.4, 0.6])
    assert [row["phase"] for row in curve] == ["", "e1", "e2"]

    summary = (directory / "summary.md").read_text()
    assert "5 of 5 runs are finished." in summary
    saving = (60_000 * 1.95) / (2_000 + 24_000 * 1.95)
    assert f"| sgpo | 2 | 48.8 K | {saving:.2f} | {saving:.2f} |" in summary
    itemised = (10_000 * 1.95) / (2_000 + 4_000 * 1.95)
    rows = "| dapo | 2 | 1.00 / 1.00 |", f"| sgpo | 2 | {saving:.2f} / {itemised:.2f} |"
    assert "\n".join(["| method | seeds | dapo (59.0%) |", "|---|---:|---:|", *rows]) in summary
    assert "t, sgpo: train.optimizer.learning_rate=0.006 train.epochs=1" in summary
    for name in ("accuracy.png", "accuracy.svg", "accuracy-itemised.png", "phases.png", "phases.svg"):
        assert 1_000 < (directory / name).stat().st_size < 200_000

    before = {path: path.stat().st_mtime_ns for path in directory.rglob("metrics.jsonl")}
    conduct(study, Path("study.yaml"))
    assert {path: path.stat().st_mtime_ns for path in directory.rglob("metrics.jsonl")} == before, "ran nothing again"


def test_a_report_is_written_without_a_run(tmp_path, fake_runs):
    study, directory = study_of(tmp_path, methods={"dapo": TUNED}), tmp_path / "study"
    conduct(study, Path("study.yaml"))
    kept = {name: (directory / name).read_bytes() for name in ("study.csv", "curves.csv", "summary.md", "tuning.csv")}
    for name in [*kept, "study.parquet", "accuracy.png"]:
        (directory / name).unlink()
    shutil.rmtree(directory / "t")  # their records are left
    write_report(study, Path("study.yaml"))
    assert {name: (directory / name).read_bytes() for name in kept} == kept
    assert (directory / "accuracy.png").exists()
    assert not (directory / "t").exists()


def test_a_failed_run_is_named_and_the_others_go_on(tmp_path, fake_runs, capsys):
    study = study_of(tmp_path, seeds=[13, 1], methods={"dapo": TUNED})
    with pytest.raises(MachineError, match=r"1 runs failed: t/dapo/seed-13 \(.*seed-13\.log\); the same command tries"):
        conduct(study, Path("study.yaml"))
    assert "t/dapo/seed-13: failed with exit code 2: no luck" in capsys.readouterr().err
    assert [row["seed"] for row in read_csv(tmp_path / "study" / "study.csv")] == ["1"]
    assert "1 of 2 runs are finished: what follows is partial." in (tmp_path / "study" / "summary.md").read_text()


def test_a_method_without_a_tuned_candidate_waits(tmp_path, fake_runs, capsys):
    tuning = {"seeds": [13], "grid": {"rate": [{"train.optimizer.learning_rate": 1e-3}]}}
    with pytest.raises(MachineError, match="1 runs failed: t/dapo/candidate-0/seed-13"):
        conduct(study_of(tmp_path, methods={"dapo": TUNED}, tuning=tuning), Path("study.yaml"))
    assert "2 final runs wait for tuning" in " ".join(capsys.readouterr().err.split())
    assert not list((tmp_path / "study" / "t" / "dapo").glob("seed-*"))


def rates(*values, **changes):
    """A tuning section."""
    return {"seeds": [100], "grid": {"rate": [{"train.optimizer.learning_rate": rate} for rate in values]}, **changes}


def test_a_failed_tuning_run_leaves_its_method_open(tmp_path, fake_runs, capsys, monkeypatch):
    """And wins, once the same command has tried it again."""
    monkeypatch.setenv("FAKE_FAILS_AT", "0.006")
    study = study_of(tmp_path, methods={"dapo": TUNED}, seeds=[1], tuning=rates(2e-3, 6e-3))
    with pytest.raises(MachineError, match=r"1 runs failed: t/dapo/candidate-1/seed-100 .*; the same command tries"):
        conduct(study, Path("study.yaml"))
    said = " ".join(capsys.readouterr().err.split())
    assert "t/dapo is not tuned yet, and its final runs wait: 1 of its 2 tuning runs are not done" in said
    assert "tuning.accept_failures=true decides without them" in said
    assert json.loads((tmp_path / "study" / "tuning.json").read_text()) == {}
    monkeypatch.delenv("FAKE_FAILS_AT")
    conduct(study, Path("study.yaml"))
    choice = json.loads((tmp_path / "study" / "tuning.json").read_text())["t"]["dapo"]
    assert choice["settings"] == {"train.optimizer.learning_rate": 6e-3}
    assert choice["failed"] == []


def test_failed_candidates_may_be_left_out_by_request(tmp_path, fake_runs, monkeypatch):
    monkeypatch.setenv("FAKE_FAILS_AT", "0.006")
    tuning = rates(2e-3, 6e-3, accept_failures=True)
    conduct(study_of(tmp_path, methods={"dapo": TUNED}, seeds=[1], tuning=tuning), Path("study.yaml"))
    choice = json.loads((tmp_path / "study" / "tuning.json").read_text())["t"]["dapo"]
    assert choice["settings"] == {"train.optimizer.learning_rate": 2e-3}
    assert choice["failed"] == [{"train.optimizer.learning_rate": 6e-3}]
    assert len(read_csv(tmp_path / "study" / "study.csv")) == 1


def test_what_training_profiles_is_spent_after_the_first_evaluation(tmp_path, fake_runs):
    methods = {"jit": {"settings": {"train.method": "just_in_time", "train.optimizer.learning_rate": 6e-3}}}
    conduct(study_of(tmp_path, methods=methods, tuning=None, seeds=[1], baselines=["jit"]), Path("study.yaml"))
    (row,) = read_csv(tmp_path / "study" / "study.csv")
    assert float(row["profiling_flops"]) == 2_000
    assert float(row["zero_variance_frac"]) == 0.75, "of its probes"
    first, *_ = read_csv(tmp_path / "study" / "curves.csv")
    assert float(first["paper_flops"]) == 0


def test_a_choice_stands_for_what_it_was_chosen_from(tmp_path, fake_runs):
    def study(tuning, **changes):
        return study_of(tmp_path, methods={"dapo": TUNED}, seeds=[1], tuning=tuning, **changes)

    conduct(study(rates(2e-3, 4e-3)), Path("study.yaml"))
    harmless = {"settings": {"train.checkpoint_every": 7}}
    conduct(study(rates(2e-3, 4e-3, accept_failures=True), **harmless), Path("study.yaml"))
    for other in (
        study(rates(4e-3)),
        study(rates(2e-3, 4e-3, 6e-3)),  # longer
        study(rates(2e-3, 4e-3, seeds=[101])),
        study(rates(2e-3, 4e-3), settings={"train.epochs": 9}),
        study(
            rates(2e-3, 4e-3), tasks={"t": {"tuning_settings": tuning_settings(tmp_path, **{"evaluate.top_p": 0.5})}}
        ),
    ):
        with pytest.raises(UserError, match=r"tuning.json: t/dapo was tuned with another grid, seeds or settings; set"):
            conduct(other, Path("study.yaml"))


@pytest.mark.parametrize(
    ("name", "operands", "message"),
    [
        ("tuning", (4, 5), "task t: 1 of the tuning questions in .*tuning.jsonl are final questions in .*held_out"),
        ("tuning", (1, 2), "task t: 2 of the tuning questions in .*tuning.jsonl are training questions in .*train"),
        ("held_out", (2, 3), "task t: 1 of the final questions in .*held_out.jsonl are training questions in .*train"),
    ],
)
def test_shared_questions_are_refused_before_anything_runs(tmp_path, fake_runs, name, operands, message):
    study = study_of(tmp_path)
    check_disjoint(Protocol(study, Path("study.yaml")))
    write_questions(tmp_path / f"{name}.jsonl", operands)
    with pytest.raises(UserError, match=message):
        conduct(study, Path("study.yaml"))
    assert not (tmp_path / "study").exists()


def test_the_saving_is_also_against_the_cheapest_baseline_that_reaches_the_target(tmp_path, fake_runs):
    """At 40% accuracy, half-way through dapo, the other baseline is 2/5 through its second half; it ends at 50%."""
    methods = {
        "dapo": {"settings": {"train.method": "dapo", "train.optimizer.learning_rate": 6e-3}},
        "cheap": {"settings": {"train.optimizer.learning_rate": 5e-3}},
        "sgpo": {"settings": {"train.optimizer.learning_rate": 6e-3}},
    }
    changes = {"methods": methods, "tuning": None, "seeds": [1], "baselines": ["dapo", "cheap"]}
    conduct(study_of(tmp_path, **changes), Path("study.yaml"))
    for margin, own, best, cheapest in ((0.2, 26_000, 60_000, 35_600), (0.01, 48_800, 117_000, 117_000)):
        study = study_of(tmp_path, margin=margin, **changes)
        protocol = Protocol(study, Path("study.yaml"))
        results = [Report(protocol).read(cell) for cell in protocol.planned]
        reading = read_task("t", results, study, targets_of(results, study))
        cost = reading.methods[2].costs[LedgerKind.PAPER]
        assert (cost.to_target, cost.saving, cost.saving_cheapest) == pytest.approx((own, best / own, cheapest / own))
        # `cheap` is at 30%, its own 50% less the margin of 20 points, after 4/5 of its first half; sgpo half-way.
        # At 49% they are after 94% and 45% of their second halves.
        cheaps, owns = (21_200, 14_000) if margin == 0.2 else (48_560, 36_800)
        assert cost.savings == pytest.approx({"dapo": best / own, "cheap": cheaps / owns})


def test_the_budget_of_tuning_decides_where_it_is_set(tmp_path, fake_runs):
    """At 60 K FLOPs DAPO is half-way: accuracies there are 2/3 of those at the end, and their order is the same."""
    tuning = {**study_tree(tmp_path)["tuning"], "at_flops": 60_000.0}
    tasks = {"t": {"tuning_settings": tuning_settings(tmp_path, **{"evaluate.times": 1})}}
    conduct(study_of(tmp_path, methods={"dapo": TUNED}, tuning=tuning, tasks=tasks), Path("study.yaml"))
    rows = read_csv(tmp_path / "study" / "tuning.csv")
    assert [float(row["compared_accuracy"]) for row in rows] == pytest.approx(
        [float(row["final_accuracy"]) * 2 / 3 for row in rows]
    )


def test_a_done_run_with_other_settings_is_refused(tmp_path, fake_runs):
    methods = {"dapo": {"settings": {"train.method": "dapo"}}}
    conduct(study_of(tmp_path, methods=methods, tuning=None), Path("study.yaml"))
    methods = {"dapo": {"settings": {"train.method": "dapo", "train.epochs": 9, "train.checkpoint_every": 3}}}
    message = r"t/dapo/seed-1: was run with other settings \(train.epochs: 2 -> 9\)"
    for _ in range(2):  # by its record, then by its directory
        protocol = protocol_of(tmp_path, methods=methods, tuning=None)
        with pytest.raises(UserError, match=message):
            protocol.state_of(protocol.planned[0])
        (tmp_path / "study" / "records.jsonl").unlink(missing_ok=True)
    methods["dapo"]["settings"]["train.epochs"] = 2
    protocol = protocol_of(tmp_path, methods=methods, tuning=None)
    assert protocol.state_of(protocol.planned[0]) is State.DONE, "what says how, not what, may change"


def test_a_study_goes_on_by_its_records_alone(tmp_path, fake_runs):
    """As in a fresh checkout that holds the records of an unfinished study: tables come out the same."""
    results = tmp_path / "results"
    records = results / "records.jsonl"
    study = study_of(tmp_path, results_dir=str(results), budget_fracs=[0.5, 1.0])
    conduct(study, Path("study.yaml"))
    directory = tmp_path / "study"
    tables = {name: (results / name).read_bytes() for name in ("study.csv", "curves.csv", "tuning.csv", "summary.md")}
    rows = [json.loads(line) for line in records.read_text().splitlines()]
    assert len(rows) == 12 + 5
    records.write_text("".join(f"{json.dumps(row)}\n" for row in rows if row["name"] != "t/sgpo/seed-2"))
    shutil.rmtree(directory)

    conduct(study, Path("study.yaml"))
    assert {name: (results / name).read_bytes() for name in tables} == tables
    assert [path.parent.name for path in directory.rglob("metrics.jsonl")] == ["seed-2"], "only what had no record"
    assert [json.loads(line) for line in records.read_text().splitlines()] == rows


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"points": [[1, 2]]}, "records.jsonl: t/dapo/seed-1: not the record of a run"),
        ({"name": 3}, "records.jsonl:1: not the record of a study's run: it has no name"),
        ({"questions": "others"}, "t/dapo/seed-1 was evaluated on other questions than t/sgpo/seed-1"),
    ],
)
def test_a_record_that_cannot_be_used_is_one_line(tmp_path, fake_runs, change, message):
    methods = {name: {"settings": {"train.method": name}} for name in ("dapo", "sgpo")}
    study = study_of(tmp_path, methods=methods, tuning=None, seeds=[1])
    conduct(study, Path("study.yaml"))
    records = tmp_path / "study" / "records.jsonl"
    first, second = (json.loads(line) for line in records.read_text().splitlines())
    assert first["name"] == "t/dapo/seed-1"
    records.write_text("".join(f"{json.dumps(row)}\n" for row in (first | change, second)))
    with pytest.raises(UserError, match=re.escape(message)):
        conduct(study, Path("study.yaml"))


def test_closing_ends_what_still_runs(tmp_path, fake_runs):
    protocol = protocol_of(
        tmp_path, seeds=[14, 1], methods={"dapo": {"settings": {"train.method": "dapo"}}}, tuning=None
    )
    cells = protocol.final_cells({})
    waits = Path(f"{cells[0].config.run_dir}.waits")
    with closing(run_cells("run", cells, [Worker(), Worker()])) as outcomes:
        assert next(outcomes).cell.seed == 1
        deadline = time.monotonic() + 20
        while not waits.exists() and time.monotonic() < deadline:
            time.sleep(0.02)
        begun = time.monotonic()
    assert time.monotonic() - begun < 10
    assert [protocol.state_of(cell) for cell in cells] == [State.NEW, State.DONE]


@pytest.mark.skipif(not hasattr(os, "sched_getaffinity"), reason="this system cannot keep a process to some CPUs")
def test_workers_share_out_the_cpus(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {4, 5, 6, 7})
    assert worker_cpus(2, None) == [(4, 5), (6, 7)]
    assert worker_cpus(2, 1) == [(4,), (5,)]
    assert worker_cpus(3, 2) == [(4, 5), (6, 7), (4, 5)]
    assert worker_cpus(8, None)[4:] == [(4,), (5,), (6,), (7,)]
    assert worker_cpus(1, 9) == [(4, 5, 6, 7)]
    monkeypatch.delattr(os, "sched_getaffinity")
    assert worker_cpus(2, 1) == [(), ()]


def test_workers_share_out_the_gpus():
    assert worker_gpus(2, {}, 8) == ["0,1,2,3", "4,5,6,7"]
    assert worker_gpus(2, {"CUDA_VISIBLE_DEVICES": "5,6,7"}, 3) == ["5", "6"]
    assert worker_gpus(1, {}, 8) == [None]
    assert worker_gpus(3, {}, 0) == [None] * 3
    with pytest.raises(UserError, match="num_workers=3: this process sees 2 GPUs"):
        worker_gpus(3, {}, 2)


def test_a_run_sees_the_gpus_of_its_worker(tmp_path, fake_runs):
    protocol = protocol_of(
        tmp_path, seeds=[1, 2], methods={"dapo": {"settings": {"train.method": "dapo"}}}, tuning=None
    )
    workers = [Worker(gpus="3"), Worker(gpus="5")]
    assert [outcome.exit_code for outcome in run_cells("run", protocol.planned, workers)] == [0, 0]
    logs = [cell.log.read_text() for cell in protocol.planned]
    assert [log.split()[-1] for log in logs] == ["gpus=3", "gpus=5"]


def test_the_reason_is_of_the_newest_attempt(tmp_path, monkeypatch):
    protocol = protocol_of(tmp_path, seeds=[1], methods={"dapo": {}}, tuning=None)
    (cell,) = protocol.planned
    cell.log.parent.mkdir(parents=True)
    cell.log.write_text("error: of the first attempt\n")
    monkeypatch.setattr(workers, "CHILD", (sys.executable, "-c", "import sys; sys.exit('gone')"))
    assert [outcome.error for outcome in run_cells("run", [cell], [Worker()])] == ["gone"]


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="needs a named pipe that nobody writes to")
def test_a_child_keeps_to_its_cpus_and_ends_with_its_parent(tmp_path):
    fifo = tmp_path / "answers.jsonl"
    os.mkfifo(fifo)  # `verify` waits for it without end
    cpu = min(os.sched_getaffinity(0))
    code = (
        "import os, subprocess, sys, time\n"
        f"words = [sys.executable, '-m', 'sgpo_jax.study.child', str(os.getpid()), '{cpu}', 'verify', {str(fifo)!r}]\n"
        "print(subprocess.Popen(words, start_new_session=True).pid, flush=True)\n"
        "time.sleep(60)\n"
    )
    parent = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, cwd=ROOT, text=True)
    child = int(parent.stdout.readline())
    try:
        assert wait_until(lambda: os.sched_getaffinity(child) == {cpu})
        parent.kill()
        assert wait_until(lambda: has_ended(child), 0.8 * GRACE_S), "interrupted, not ended hard"
    finally:
        parent.kill()
        parent.wait(10)
        parent.stdout.close()
        with suppress(ProcessLookupError):
            os.kill(child, signal.SIGKILL)


def has_ended(pid):
    """A zombie, whose parent has not asked for it, has."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


def wait_until(condition, limit_s=30.0):
    deadline = time.monotonic() + limit_s
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True


@pytest.mark.timeout(900)  # three starts of JAX: half a minute of processor time, far more on a busy machine
def test_a_real_study_is_interrupted_and_goes_on(tmp_path):
    """A profile and a run of the demo's model on a few questions, from the command line."""
    tree = study_tree(
        tmp_path,
        tuning=None,
        seeds=[1],
        settings={
            "model.remat": "none",
            "evaluate.sets": [{"path": str(tmp_path / "held_out.jsonl"), "name": "set"}],
            "evaluate": {"every": 1, "num_samples": 2, "num_samples_during": 1},
            "rollouts": {"max_completion_tokens": 31, "batch_size": 64},
            "train": {"epochs": 1, "prompts_per_step": 8, "micro_batch_tokens": 384, "export_phases": False},
            "refill.when_short": "train",
        },
        tasks={"t": {}},
        methods={"sgpo": {}},
        baselines=["sgpo"],
        num_workers=1,
    )
    for name, source, count in (("train", "train", 16), ("held_out", "heldout", 12)):
        lines = (DEMO / f"{source}.jsonl").read_text().splitlines(keepends=True)
        (tmp_path / f"{name}.jsonl").write_text("".join(lines[:count]))
    file = tmp_path / "study.yaml"
    file.write_text(json.dumps(tree))
    words = [sys.executable, "-m", "sgpo_jax.launch", "study", str(file)]
    study = subprocess.Popen(words, stderr=subprocess.PIPE, text=True, cwd=ROOT)
    profile = tmp_path / "study" / "t" / "profile" / "profile.json"
    assert wait_until(lambda: (tmp_path / "study" / "t" / "sgpo" / "seed-1").exists(), 400)
    study.send_signal(signal.SIGINT)
    _, errors = study.communicate(timeout=120)
    assert study.returncode == 1
    assert "interrupted: the same command goes on where this one stood" in errors

    listed = CliRunner().invoke(cli, ["study", str(file), "--dry-run"])
    assert "0 of 1 runs are done" in listed.stdout
    made = profile.stat().st_mtime_ns
    assert subprocess.run(words, cwd=ROOT, timeout=400, check=False).returncode == 0
    assert profile.stat().st_mtime_ns == made
    (row,) = read_csv(tmp_path / "study" / "study.csv")
    tokens = json.loads(profile.read_text())["tokens"]["generated"]
    num_params = json.loads((tmp_path / "study" / "t" / "sgpo" / "seed-1" / "compute.json").read_text())["num_params"]
    assert float(row["profiling_flops"]) == 2 * num_params * tokens > 0
    assert float(row["total_flops"]) == float(row["profiling_flops"]) + float(row["training_flops"])
    points = read_csv(tmp_path / "study" / "curves.csv")
    assert len(points) == 1 + float(row["num_steps"])
    assert float(points[0]["paper_flops"]) == float(row["profiling_flops"])
    assert float(points[-1]["paper_flops"]) == float(row["total_flops"])
    assert "1 of 1 runs are done" in CliRunner().invoke(cli, ["study", str(file), "--dry-run"]).stdout
