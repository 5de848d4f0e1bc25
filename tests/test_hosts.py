"""Several real processes on the loopback interface that make one run, and what becomes of them when one is lost."""

import io
import json
import os
import signal
import socket
import subprocess
import sys
import time
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from helpers import make_config, make_group, make_query, tiny_architecture
from safetensors.numpy import load_file
from test_pipeline import DEMO, demo_config, run_all, without_times

from sgpo_jax import strict_yaml
from sgpo_jax.config import Config
from sgpo_jax.data.batching import BatchShape, from_arrays, pack, to_arrays
from sgpo_jax.files import read_json, read_jsonl
from sgpo_jax.hosts import agreement, messages
from sgpo_jax.hosts.link import Message
from sgpo_jax.rollouts import vllm_hosts, vllm_server
from sgpo_jax.rollouts.engine import from_values, sample_seed, to_values
from sgpo_jax.rollouts.vllm_hosts import HostServer
from sgpo_jax.run import open_run
from sgpo_jax.training.sequences import train_sequences
from sgpo_jax.types import GroupRequest, Purpose, UserError

HERE = Path(__file__).parent
TIMEOUT_S = 15  # after which a process counts as lost
LIMIT_S = 280  # of everything that a test waits for


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@dataclass
class Process:
    popen: subprocess.Popen

    @property
    def worker(self) -> int:
        """The process that does the work, which the one that was started supervises."""
        pid = self.popen.pid
        return int(Path(f"/proc/{pid}/task/{pid}/children").read_text().split()[0])

    def end(self, limit_s: float = LIMIT_S) -> tuple[int, str, str]:
        """Exit code, standard output and standard error."""
        out, err = self.popen.communicate(timeout=limit_s)
        return self.popen.returncode, out, err


@contextmanager
def processes(count: int, arguments, environment=lambda _: {}, program=("-m", "sgpo_jax.launch")):
    """`python -m sgpo_jax.launch ARGUMENTS` for each process; what still runs at the end is killed."""
    started = []
    try:
        for number in range(count):
            # JAX warns of proxies.
            env = {k: v for k, v in os.environ.items() if k != "XLA_FLAGS" and "_proxy" not in k.lower()}
            env["JAX_PLATFORMS"] = "cpu"
            command = [sys.executable, *program, *arguments(number)]
            popen = subprocess.Popen(
                command, env=env | environment(number), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
            )
            started.append(Process(popen))
        yield started
    finally:
        for process in started:
            if process.popen.poll() is None:
                process.popen.kill()  # the worker ends with it
                process.popen.communicate()


def by_hand(command: str, config: Path, count: int, *overrides: str):
    """The arguments of each process where the configuration says all."""
    port = free_port()

    def arguments(number: int) -> list[str]:
        hosts = {
            "num_processes": count,
            "process_id": number,
            "coordinator": f"127.0.0.1:{port}",
            "timeout_s": TIMEOUT_S,
        }
        return [command, str(config), *(f"hosts.{key}={value}" for key, value in hosts.items()), *overrides]

    return arguments


def written(config: Config) -> Path:
    """The configuration as a file beside its run directory."""
    path = Path(config.run_dir).with_suffix(".yaml")
    path.write_text(strict_yaml.dump(config))
    return path


def assert_equal_within_rounding(ours: Path, theirs: Path) -> None:
    """Exports, and metrics but for times. What was sampled is the same, token for token."""
    phases = {path.name for path in (theirs / "hf").iterdir()}
    assert {path.name for path in (ours / "hf").iterdir()} == phases
    for phase in phases:
        one, other = (load_file(run / "hf" / phase / "model.safetensors") for run in (ours, theirs))
        assert one.keys() == other.keys()
        for name in other:
            np.testing.assert_allclose(one[name], other[name], rtol=0, atol=2e-6, err_msg=name)
    rows, expected = (without_times(read_jsonl(run / "metrics.jsonl")) for run in (ours, theirs))
    assert len(rows) == len(expected)
    for row, wanted in zip(rows, expected, strict=True):
        assert row.keys() == wanted.keys()
        for key, value in wanted.items():
            exact = isinstance(value, str) or key.startswith(("rollouts/", "compute/", "profile/", "dropped/"))
            assert row[key] == value if exact else row[key] == pytest.approx(value, rel=1e-4, abs=1e-5), key


def sgpo_config(run_dir: Path) -> Config:
    """Three steps, one of each phase, of two updates each, with a reference; evaluations before and after."""
    return demo_config(
        run_dir,
        data={"train": [{"path": str(DEMO / "train.jsonl"), "max_queries": 24}]},
        train={"num_updates": 2, "loss": {"kl_coef": 0.01}},
        evaluate={
            "sets": [{"path": str(DEMO / "heldout.jsonl"), "max_queries": 2}],
            "num_samples": 2,
            "every": 0,
            "top_p": 1.0,
        },
    )


@pytest.fixture(scope="module")
def alone(tmp_path_factory) -> Path:
    run_dir = tmp_path_factory.mktemp("alone") / "run"
    run_all(sgpo_config(run_dir))
    return run_dir


@pytest.mark.parametrize("count", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_processes_of_a_cluster_train_what_one_process_trains(alone, tmp_path, count):
    run_dir = tmp_path / "run"
    config, port = written(sgpo_config(run_dir)), free_port()
    # Two: every sync brings the weights from one layout to another.
    mesh = ["mesh.data=2", "mesh.fsdp=-1"] if count > 2 else ["rollouts.mesh.data=2"]

    def slurm(number: int) -> dict[str, str]:
        return {
            "SLURM_JOB_ID": "77",
            "SLURM_STEP_NODELIST": "localhost",
            "SLURM_NTASKS": str(count),
            "SLURM_PROCID": str(number),
            "SLURM_LOCALID": str(number),
        }

    arguments = ["run", str(config), "hosts.num_processes=null", f"hosts.bind=127.0.0.1:{port}", *mesh]
    with processes(count, lambda _: arguments, slurm) as (leader, *followers):
        code, out, err = leader.end()
        assert code == 0, err
        assert "Accuracy on held-out questions" in out
        assert all(follower.end() == (0, "", "") for follower in followers)
    assert (run_dir / "profile.jsonl").read_bytes() == (alone / "profile.jsonl").read_bytes()
    assert_equal_within_rounding(run_dir, alone)
    ours, theirs = (read_json(d / "eval" / "final.json") for d in (run_dir, alone))
    assert ours == theirs
    ours, theirs = (
        {str(path.relative_to(d)) for path in d.rglob("*") if "checkpoints" not in path.parts} for d in (run_dir, alone)
    )
    assert ours - theirs == {".hosts"}
    assert ours >= theirs


def dapo_config(run_dir: Path) -> Config:
    """Three steps, each with a checkpoint."""
    return demo_config(
        run_dir,
        data={"train": [{"path": str(DEMO / "train.jsonl"), "max_queries": 12}]},
        train={"method": "dapo", "prompts_per_step": 4, "checkpoint_every": 1},
        refill={"max_rounds": 1, "when_short": "train"},
        evaluate={"sets": []},
    )


def run_until_step(step: int, run_dir: Path, started: list[Process]) -> None:
    end = time.monotonic() + LIMIT_S
    lines = run_dir / "metrics.jsonl"
    while not lines.exists() or len(lines.read_text().splitlines()) < step:
        assert all(process.popen.poll() is None for process in started), [process.end() for process in started]
        assert time.monotonic() < end
        time.sleep(0.02)


def test_a_lost_process_ends_the_others_and_the_same_command_resumes(tmp_path):
    whole, run_dir = tmp_path / "whole", tmp_path / "run"
    run_all(dapo_config(whole))
    config = written(dapo_config(run_dir))

    with processes(2, by_hand("train", config, 2)) as started:
        leader, follower = started
        run_until_step(1, run_dir, started)
        os.kill(follower.worker, signal.SIGKILL)
        code, _, err = follower.end(60)
        assert (code, err) == (1, "error: ended by SIGKILL; the same command on every host resumes the run\n")
        code, _, err = leader.end(4 * TIMEOUT_S)
        assert code == 1
        resumes = "killed, hung, or cut off; the same command on every host resumes the run"
        assert err.splitlines()[-1] == f"error: lost process 1: {resumes}"

    with processes(2, by_hand("train", config, 2)) as started:
        leader, follower = started
        run_until_step(2, run_dir, started)
        leader.popen.kill()  # what was started: its worker goes with it
        code, out, err = follower.end(4 * TIMEOUT_S)
        assert (code, out) == (1, "")
        resumes = "which leads: killed, or cut off; the same command on every host resumes the run"
        assert err == f"error: lost process 0, {resumes}\n"

    with processes(2, by_hand("train", config, 2)) as (leader, follower):
        code, _, err = leader.end()
        assert code == 0, err
        assert "train: resumed at step" in err
        assert follower.end() == (0, "", "")
    assert len(read_jsonl(run_dir / "metrics.jsonl")) == 3
    assert_equal_within_rounding(run_dir, whole)


@pytest.mark.parametrize(("number", "sent"), [(0, signal.SIGINT), (1, signal.SIGTERM)])
def test_a_process_that_is_interrupted_ends_the_others(tmp_path, number, sent):
    run_dir = tmp_path / "run"
    with processes(2, by_hand("train", written(dapo_config(run_dir)), 2)) as started:
        end = time.monotonic() + LIMIT_S
        while not (run_dir / ".hosts").exists():
            assert time.monotonic() < end
            time.sleep(0.02)
        started[number].popen.send_signal(sent)
        code, _, err = started[number].end(60)
        assert (code, err.splitlines()[-1]) == (1, "interrupted: the same command goes on where this one stood")
        code, _, err = started[1 - number].end(60)
        assert code == 1
        assert err.splitlines()[-1].startswith(f"error: process {number} on ")
        assert err.splitlines()[-1].endswith(": interrupted; the same command on every host resumes the run")


def test_each_process_has_a_vllm_server_with_its_own_copy_of_the_weights(tmp_path):
    """Both are given new weights and work; the one of the other process is started again by it when it dies."""
    for number in range(2):
        (tmp_path / f"model-{number}").mkdir()
    port = str(free_port())
    environment = {"VLLM_API_KEY": "a secret"}
    program = [str(HERE / "vllm_on_hosts.py")]
    with processes(2, lambda n: [str(n), port, str(tmp_path)], lambda _: environment, program) as (leader, follower):
        code, _, err = leader.end()
        assert code == 0, err
        assert follower.end()[0] == 0
    seen = read_json(tmp_path / "seen.json")
    assert seen["sync"]["sync/probe_gap"] < 1e-4
    for moment, version in (("first", 1), ("second", 2), ("third", 2)):
        weights = [Path(server["weights"]) for server in seen[moment]]
        assert [path.name for path in weights] == [f"weights-{version}"] * 2
        assert weights[0].parent != weights[1].parent
    assert seen["files"] == [["weights-2"], ["weights-2"]]
    assert all("/collective_rpc" in server["calls"] for server in seen["second"])
    assert all(server["requests"] for server in seen["second"])
    assert "/collective_rpc" not in seen["third"][1]["calls"], "it is another server, started with the new weights"
    for errors in (seen["errors"], seen["errors again"]):
        assert errors == [[None] * 4] * 8
    assert not any(Path(server["weights"]).parent.exists() for server in seen["third"])


@pytest.mark.parametrize("vllm", [{}, {"host": "10.0.0.1"}])
def test_servers_that_others_may_reach_have_a_key_and_an_address(vllm, tmp_path, monkeypatch):
    config = make_config(vllm=vllm)
    monkeypatch.delenv("VLLM_API_KEY", raising=False)
    monkeypatch.setattr(vllm_server, "num_processes", lambda: 1 if vllm else 2)
    with pytest.raises(UserError, match="need a key; set the environment variable VLLM_API_KEY"):
        vllm_server.shared_key(config.vllm)
    monkeypatch.setenv("VLLM_API_KEY", "a secret")
    assert vllm_server.shared_key(config.vllm) == "a secret"
    monkeypatch.setattr(vllm_hosts, "are_on_one_host", lambda: False)
    if not vllm:
        with pytest.raises(UserError, match=r"vllm\.host=127\.0\.0\.1: process 0 cannot reach this host's server"):
            HostServer(config, tiny_architecture(), tmp_path, 16, tmp_path / "log")


def test_processes_that_were_started_differently_both_say_so(tmp_path):
    config = written(dapo_config(tmp_path / "run"))
    arguments = by_hand("train", config, 2)
    with processes(2, lambda number: [*arguments(number), f"train.epochs={number + 2}"]) as (leader, follower):
        what = "another configuration than that of process 0 (train.epochs: 2 -> 3); start both alike"
        assert follower.end() == (2, "", f"error: {what}\n")
        code, _, err = leader.end()
        assert code == 1
        assert err.splitlines()[-1].startswith("error: process 1 on ")
        assert err.splitlines()[-1].endswith(f": {what}")


def test_a_process_that_stays_alone_says_so(tmp_path):
    config = written(dapo_config(tmp_path / "run"))
    arguments = by_hand("train", config, 2, "hosts.start_timeout_s=2")
    with processes(1, arguments) as (alone,):
        code, _, err = alone.end()
    assert code == 1
    assert err.startswith("error: not all processes came within hosts.start_timeout_s")


def test_a_port_that_is_taken_is_named(tmp_path):
    config = written(dapo_config(tmp_path / "run"))
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        bind = f"127.0.0.1:{taken.getsockname()[1]}"
        with processes(1, by_hand("train", config, 2, f"hosts.bind={bind}")) as (leader,):
            code, _, err = leader.end()
    assert code in (1, 2)  # JAX raises, or ends the process
    assert err.startswith("error: hosts.bind: process 0 cannot listen at ")
    assert bind.partition(":")[2] in err


@pytest.mark.parametrize(
    ("hosts", "message"),
    [
        ({"num_processes": 2, "process_id": 0, "coordinator": "10.0.0.1:80"}, "hosts.bind: process 0 has to listen"),
        ({"num_processes": None}, "hosts.bind: process 0 has to listen"),
    ],
)
def test_nothing_listens_beyond_loopback_unasked(hosts, message):
    with pytest.raises(UserError, match=message):
        messages.start(make_config(hosts=hosts).hosts)


def test_a_process_that_does_not_know_who_it_is_says_so(tmp_path):
    config = written(dapo_config(tmp_path / "run"))
    arguments = ["train", str(config), "hosts.num_processes=null", "hosts.bind=127.0.0.1:80"]
    with processes(1, lambda _: arguments) as (alone,):
        code, _, err = alone.end()
    assert code == 2
    assert err.startswith("error: hosts: the environment of this process does not say which of several it is")


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ({"hosts": {"process_id": 1}}, "num_processes=1 is a run without others"),
        ({"hosts": {"num_processes": 2, "process_id": 2}}, "process_id=2 must be below num_processes=2"),
        (
            {"hosts": {"num_processes": 2}, "vllm": {"placement": "shared"}},
            "placement=shared is for one host",
        ),
    ],
)
def test_sections_that_contradict_themselves_are_refused(sections, message):
    with pytest.raises(UserError, match=message):
        make_config(**sections)


def test_a_run_that_joined_no_others_does_not_pretend_to(tmp_path):
    """As in a study, whose runs have a process each."""
    config = make_config(run_dir=str(tmp_path / "run"), hosts={"num_processes": 2})
    with pytest.raises(UserError, match=r"hosts\.num_processes=2: here a run has one process"), open_run(config):
        pass


def test_a_run_directory_that_is_not_shared_is_named(tmp_path, monkeypatch):
    config = make_config(run_dir=str(tmp_path / "run"))
    message = Message("run", {"config": config.model_dump(mode="json"), "token": "theirs"})
    monkeypatch.setattr(agreement, "receive", lambda _: Message.from_bytes(message.to_bytes()))
    monkeypatch.setattr(agreement, "_PATIENCE_S", 0.1)
    ready = []
    monkeypatch.setattr(agreement, "say_ready", lambda: ready.append(True))
    for present in (False, True):
        if present:
            (tmp_path / "run").mkdir()
            (tmp_path / "run" / ".hosts").write_text("another's")
        with pytest.raises(UserError, match="not the directory that process 0 has under this name"):
            agreement.follow_run(config)
    (tmp_path / "run" / ".hosts").write_text("theirs")
    assert not ready
    agreement.follow_run(config)
    assert ready


def test_a_message_carries_batches_and_requests_whole():
    groups = [make_group(make_query("a"), [True, False, None], seed=1), make_group(make_query("b"), [True, False])]
    batches = pack(train_sequences(groups, make_config().train.loss), BatchShape(num_rows=1, row_length=16))
    assert len(batches) > 1
    requests = [GroupRequest(make_query("a", (5, 6)), 3, Purpose.PROFILE, visit=2, first_sample=4)]
    sent = Message("both", {"requests": to_values(requests)}, to_arrays(batches))
    data = sent.to_bytes()
    assert b"pickle" not in data
    np.load(io.BytesIO(data), allow_pickle=False).close()
    got = Message.from_bytes(data)
    assert got.op == "both"
    for one, other in zip(from_arrays(got.arrays), batches, strict=True):
        for name, array in to_arrays([other]).items():
            np.testing.assert_array_equal(to_arrays([one])[name], array, strict=True)
        assert one.old_logprobs_BT is None
    (request,) = from_values(json.loads(json.dumps(got.values))["requests"])
    assert (request.num_samples, request.first_sample) == (3, 4)
    assert tuple(request.query.prompt_ids) == (5, 6)
    assert sample_seed(7, request, 5) == sample_seed(7, requests[0], 5)
