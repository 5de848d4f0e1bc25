"""Whole runs of the demo's model with a real vLLM server: against the JAX engine, and with the server killed."""

import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sgpo_jax import pipeline
from sgpo_jax.config import Config, parse_config
from sgpo_jax.files import read_json, read_jsonl
from sgpo_jax.rollouts.vllm_watchdog import session_members
from sgpo_jax.run import Run, open_run

ROOT = Path(__file__).parents[2]
DEMO = ROOT / "sgpo_jax" / "demo"
PYTHON = ROOT / os.environ.get("VLLM_VENV", ".venv-vllm") / "bin" / "python"
NUM_QUERIES = 120
SERVER = {
    "command": [str(PYTHON), "-m", "vllm.entrypoints.openai.api_server"],
    "platform": "cpu",
    "start_time_limit_s": 600.0,
    "env": {"VLLM_CPU_OMP_THREADS_BIND": "nobind"},  # bound to one core, it starves beside any other work there
}


def demo_config(run_dir: Path, engine: str) -> Config:
    tree = {
        "run_dir": str(run_dir),
        "seed": 3,
        "model": {"path": str(DEMO / "model"), "remat": "none"},
        "data": {
            "train": [{"path": str(DEMO / "train.jsonl"), "max_queries": NUM_QUERIES}],
            "template": "plain",
            "max_prompt_tokens": 15,
        },
        "rollouts": {"engine": engine, "max_completion_tokens": 31, "batch_size": 128},
        "vllm": SERVER,
        "train": {
            "epochs": 1,
            "prompts_per_step": 8,
            "micro_batch_tokens": 768,
            "optimizer": {"learning_rate": 4e-4},
            "checkpoint_every": 2,
        },
        "evaluate": {
            "sets": [{"path": str(DEMO / "heldout.jsonl"), "max_queries": 100}],
            "num_samples": 8,
            "top_p": 1.0,
            "every": 5,
            "num_samples_during": 2,
        },
        "export": {"dtype": "float32"},
    }
    return parse_config(tree, "test")


def run_all(config: Config) -> None:
    with open_run(config) as run:
        pipeline.run_all(run)


@pytest.fixture(scope="module")
def by_jax(tmp_path_factory) -> Path:
    run_dir = tmp_path_factory.mktemp("jax") / "run"
    run_all(demo_config(run_dir, "jax"))
    return run_dir


@pytest.fixture(scope="module")
def by_vllm(tmp_path_factory) -> Path:
    run_dir = tmp_path_factory.mktemp("vllm") / "run"
    run_all(demo_config(run_dir, "vllm"))
    return run_dir


def shared_memory() -> set[str]:
    return {entry for entry in os.listdir("/dev/shm") if entry.startswith(("sgpo_jax", "psm_", "sem.", "vllm"))}


def assert_complete(run_dir: Path) -> None:
    """Every artefact is there and whole, and every sync left the server with the trainer's weights."""
    profile, plan = read_jsonl(run_dir / "profile.jsonl"), read_json(run_dir / "plan.json")
    assert len(profile) == NUM_QUERIES
    assert all(row["num_samples"] == 8 and row["num_errors"] == 0 for row in profile)
    steps = read_jsonl(run_dir / "metrics.jsonl")
    assert [row["step"] for row in steps] == list(range(1, len(steps) + 1))
    for phase in plan["phases"]:
        own = [row for row in steps if row["phase"] == phase["name"]]
        assert sum(row["rollouts/num_rollouts"] for row in own) == len(phase["query_ids"]) * phase["group_size"]
        assert (run_dir / "hf" / phase["name"] / "model.safetensors").exists()
    assert all(row["rollouts/num_errors"] == 0 for row in steps)
    assert max(row["sync/probe_gap"] for row in steps) < 1e-4
    assert max(row["mismatch/logprob_gap_max"] for row in steps) < 1e-3
    versions = {row["policy_version"] for path in (run_dir / "rollouts").iterdir() for row in read_jsonl(path)}
    assert versions == {0, *(row["train/num_updates"] for row in steps[:-1])}
    for name in ("initial", "final"):
        assert read_json(run_dir / "eval" / f"{name}.json")["heldout"]["num_unjudged"] == 0


def test_the_demo_runs_through_all_phases(by_vllm):
    assert_complete(by_vllm)
    assert all(row["sync/num_failures"] == 0 for row in read_jsonl(by_vllm / "metrics.jsonl"))
    assert len({row["phase"] for row in read_jsonl(by_vllm / "metrics.jsonl")}) == 3


def successes(rows: list[dict[str, Any]]) -> np.ndarray:
    return np.array([row["num_correct"] / row["num_samples"] for row in rows])


def assert_within_noise(ours: np.ndarray, theirs: np.ndarray, what: str) -> None:
    """Two mean success rates over the same questions, whose samples are independent."""
    gap = ours - theirs
    assert abs(gap.mean()) < 4 * gap.std() / np.sqrt(len(gap)), f"{what}: {ours.mean():.3f}, JAX {theirs.mean():.3f}"


def test_accuracies_are_those_of_the_jax_engine(by_vllm, by_jax):
    ours, theirs = ({row["query_id"]: row for row in read_jsonl(d / "profile.jsonl")} for d in (by_vllm, by_jax))
    assert ours.keys() == theirs.keys()
    assert_within_noise(successes([*ours.values()]), successes([theirs[q] for q in ours]), "profile")
    for name in ("initial", "final"):
        ours, theirs = (read_json(d / "eval" / f"{name}.json")["heldout"]["questions"] for d in (by_vllm, by_jax))
        assert_within_noise(successes(ours), successes(theirs), name)
    gains = [
        read_json(d / "eval" / "final.json")["heldout"]["avg"]["mean"]
        - read_json(d / "eval" / "initial.json")["heldout"]["avg"]["mean"]
        for d in (by_vllm, by_jax)
    ]
    assert min(gains) > 0, "both learn"


class Killer(threading.Thread):
    """Kills processes of the run's server: its API process while profiling, its engine while training."""

    def __init__(self, run: Run) -> None:
        super().__init__(daemon=True)
        self._run = run
        self.sessions: list[int] = []
        self.killed: list[str] = []

    def run(self) -> None:
        profile, metrics = self._run.dir / "profile.jsonl", self._run.dir / "metrics.jsonl"
        self._kill("api_server", lambda: profile.exists() and len(profile.read_text().splitlines()) >= 10)
        self._kill("EngineCore", lambda: metrics.exists() and len(metrics.read_text().splitlines()) >= 2)

    def _kill(self, name: str, ready: Any) -> None:
        while not ready():
            time.sleep(0.02)
        session = self._run.engine._replicas[0].server._process.pid
        self.sessions.append(session)
        victims = [pid for pid in session_members(session) if name in Path(f"/proc/{pid}/cmdline").read_text()]
        for pid in victims:
            os.kill(pid, signal.SIGKILL)
            self.killed.append(name)


def test_a_killed_server_is_replaced_and_nothing_is_lost_or_left(tmp_path, by_vllm):
    before = shared_memory()
    config = demo_config(tmp_path / "run", "vllm")
    with open_run(config) as run:
        killer = Killer(run)
        killer.start()
        pipeline.run_all(run)
        killer.join(10)
        assert set(killer.killed) == {"api_server", "EngineCore"}
        killer.sessions.append(run.engine._replicas[0].server._process.pid)
    assert len(set(killer.sessions)) == 3, "each kill led to a new server"
    assert_complete(run.dir)
    assert [pid for session in killer.sessions for pid in (session, *session_members(session)) if is_alive(pid)] == []
    assert shared_memory() <= before
    same = [
        a == b
        for a, b in zip(read_jsonl(run.dir / "profile.jsonl"), read_jsonl(by_vllm / "profile.jsonl"), strict=True)
    ]
    assert np.mean(same) > 0.9, "a completion depends on its seed, not on the server that gave it"


def is_alive(pid: int) -> bool:
    return Path(f"/proc/{pid}").exists()
