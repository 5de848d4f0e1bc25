"""Every benchmark runs at toy size, and reports what it should; its figures mean nothing here."""

import json
import os
import subprocess
import sys
from pathlib import Path

REPOSITORY = Path(__file__).parent.parent.parent


def bench(*arguments: object) -> None:
    command = [sys.executable, "-m", "tools.bench", *map(str, arguments)]
    environment = os.environ | {"JAX_PLATFORMS": "cpu"}
    finished = subprocess.run(command, cwd=REPOSITORY, env=environment, capture_output=True, text=True, timeout=250)
    assert finished.returncode == 0, finished.stderr[-3000:]


def test_storage(tmp_path):
    bench("storage", tmp_path / "scratch", "--model", "toy", "--runs", 2, "--json", tmp_path / "report.json")
    report = json.loads((tmp_path / "report.json").read_text())
    assert [row["what"] for row in report["rows"]] == ["load", "checkpoint", "restore", "export"]
    assert all(len(row["values"]) == 2 and min(row["values"]) > 0 and row["at_most"] == 2 for row in report["rows"])
    assert report["machine"]["cores"] >= 1
    assert report["versions"].keys() >= {"jax", "orbax-checkpoint"}
    assert not (tmp_path / "scratch").exists()
