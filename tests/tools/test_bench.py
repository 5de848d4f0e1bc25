"""Every benchmark runs at toy size, and reports what it should; its figures mean nothing here."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parent.parent.parent


def bench(*arguments: object, limit_s: float = 250) -> None:
    command = [sys.executable, "-m", "tools.bench", *map(str, arguments)]
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "BENCH_VENV": sys.prefix}
    finished = subprocess.run(command, cwd=REPOSITORY, env=environment, capture_output=True, text=True, timeout=limit_s)
    assert finished.returncode == 0, finished.stderr[-3000:]


def test_storage(tmp_path):
    bench("storage", tmp_path / "scratch", "--model", "toy", "--runs", 2, "--json", tmp_path / "report.json")
    report = json.loads((tmp_path / "report.json").read_text())
    assert [row["what"] for row in report["rows"]] == ["load", "checkpoint", "restore", "export"]
    assert all(len(row["values"]) == 2 and min(row["values"]) > 0 and row["at_most"] == 2 for row in report["rows"])
    assert report["machine"]["cores"] >= 1
    assert report["versions"].keys() >= {"jax", "orbax-checkpoint"}
    assert not (tmp_path / "scratch").exists()


def test_conversion(tmp_path):
    sizes = "--gigabytes", 0.2, "--shard-mb", 100, "--pairs", 1
    bench("conversion", tmp_path / "scratch", *sizes, "--json", tmp_path / "report.json")
    rows = json.loads((tmp_path / "report.json").read_text())["rows"]
    assert [(row["what"], row["against"]) for row in rows[:2]] == [
        ("to Orbax", "cp"),
        ("to Orbax", "a copy through memory"),
    ]
    assert len(rows) == 5
    assert not (tmp_path / "scratch").exists()


def test_train_step_does_the_same_as_torch(tmp_path):
    """Losses and norms of gradients are compared by the benchmark, which fails where they differ."""
    rows = against_torch(tmp_path, "train-step", "--group-sizes", "2,4", "--steps", 1)
    assert {row["what"].split(":")[0] for row in rows} == {"G = 2", "G = 4"}
    padding = {row["what"]: row["median"] for row in rows if "padding" in row["what"]}
    assert all(0 < padding[f"G = {g}: padding"] < padding[f"G = {g}: padding there"] < 1 for g in (2, 4)), padding


def test_decode(tmp_path):
    rows = {row["what"] + row["against"]: row for row in against_torch(tmp_path, "decode", "--batch", 4)}
    assert 1 < rows["mean completion"]["median"] < 24


def against_torch(tmp_path: Path, *arguments: object) -> list[dict]:
    pytest.importorskip("torch", reason="tools/test.sh --all installs torch")
    bench(*arguments, "--model", "toy", "--runs", 1, "--json", tmp_path / "report.json")
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["versions"].keys() >= {"torch", "transformers", "jax"}
    assert all(len(row["values"]) == 1 for row in report["rows"])
    return report["rows"]


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_growth(tmp_path):
    bench("growth", tmp_path, "--scale", "toy", "--steps", 1, limit_s=850)
    points = json.loads((tmp_path / "growth.json").read_text())["points"]
    for what, numbers in {"length": 2, "group": 2, "model": 1, "devices": 2}.items():
        assert len(points[what]) == numbers
        assert (tmp_path / f"growth-{what}.png").stat().st_size > 1_000
        assert all(point["seconds"] > 0 and point["flops"] > 0 for point in points[what])
    assert points["group"][1]["flops"] > 1.5 * points["group"][0]["flops"]


def test_verifier(tmp_path):
    answers = tmp_path / "answers.jsonl"
    answers.write_text('{"gold": "1/2", "completion": "So it is \\\\boxed{0.5}."}\n' * 20)
    limits = "--hanging", 1, "--time-limit-s", 1
    bench("verifier", answers, *limits, "--runs", 1, "--json", tmp_path / "report.json")
    rate, hanging = json.loads((tmp_path / "report.json").read_text())["rows"]
    assert rate["median"] > 0
    assert 0 < hanging["median"] < 20


def test_overhead(tmp_path):
    demo = REPOSITORY / "sgpo_jax" / "demo"
    sizes = "--steps", 2, "--prompts", 2, "--max-tokens", 8, "--template", "plain"
    bench("overhead", demo / "model", demo / "train.jsonl", *sizes, "--json", tmp_path / "report.json")
    rows = {row["what"]: row for row in json.loads((tmp_path / "report.json").read_text())["rows"]}
    assert 0 < rows["outside generating and updating"]["median"] < 1
    assert rows.keys() > {"seconds/generate", "seconds/verify", "seconds/update", "seconds/sync", "seconds/other"}


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_startup(tmp_path):
    bench("startup", "--runs", 1, "--json", tmp_path / "report.json", limit_s=850)
    rows = {row["what"]: row for row in json.loads((tmp_path / "report.json").read_text())["rows"]}
    assert rows["compiling, second start"]["median"] < rows["compiling, first start"]["median"]
