"""Runs whose engine and trainer take turns on the devices, and runs that start from another run's export."""

import re
from pathlib import Path

import jax
import pytest
from safetensors.numpy import load_file
from test_pipeline import DEMO, demo_config

from sgpo_jax import pipeline
from sgpo_jax.config import Config
from sgpo_jax.files import read_json
from sgpo_jax.models.sharding import on_devices
from sgpo_jax.rollouts.gpu_memory import GPUMemory
from sgpo_jax.rollouts.jax_engine import JaxEngine
from sgpo_jax.rollouts.turns import SharedDevices
from sgpo_jax.run import Run, open_run
from sgpo_jax.training.step import TrainStep
from sgpo_jax.types import UserError


def small_config(run_dir: Path, **sections) -> Config:
    data = {"train": [{"path": str(DEMO / "train.jsonl"), "max_queries": 24}]}
    evaluate = {"sets": [{"path": str(DEMO / "heldout.jsonl"), "max_queries": 4}], "num_samples": 2, "every": 2}
    train = {"loss": {"kl_coef": 0.01}}
    return demo_config(run_dir, data=data, evaluate=evaluate, train=train, **sections)


def run_all(config: Config) -> None:
    with open_run(config) as run:
        pipeline.run_all(run)


@pytest.fixture(scope="module")
def plain(tmp_path_factory) -> Path:
    run_dir = tmp_path_factory.mktemp("plain") / "run"
    run_all(small_config(run_dir))
    return run_dir


def exports(run_dir: Path) -> dict[str, bytes]:
    return {path.name: (path / "model.safetensors").read_bytes() for path in (run_dir / "hf").iterdir()}


def memory_kinds(arrays) -> set[str]:
    return {x.sharding.memory_kind for x in jax.tree.leaves(arrays) if x.ndim}


def test_a_run_that_shares_its_devices_takes_turns_and_trains_the_same_weights(plain, tmp_path, monkeypatch):
    """Saved and exported from host memory, too; the reference of the KL divergence waits there but for its own use."""
    events: list[str] = []

    class SleepingEngine(JaxEngine):
        """Stands for a server: it has a copy of the weights, and works only while it is awake."""

        def sleep(self):
            events.append("sleep")

        def generate(self, requests, sampling):
            events.append("generate")
            yield from super().generate(requests, sampling)

        def update_weights(self, params, version, probe):
            events.append("sync" if memory_kinds(params) == {"pinned_host"} else "load")
            return super().update_weights(jax.tree.map(on_devices, params), version, probe)

    train, logprobs, update = pipeline.train, TrainStep.logprobs, TrainStep.update
    references: list[set[str]] = []

    def recording_train(parts, state):
        references.append(memory_kinds(parts.reference))
        return train(parts, state)

    def recording_logprobs(self, params, batches, *, of):
        references.append(memory_kinds(params))
        return logprobs(self, params, batches, of=of)

    def recording_update(self, state, batches, rate):
        events.append("update")
        assert memory_kinds((state.params, state.opt_state)) == {"device"}
        return update(self, state, batches, rate)

    monkeypatch.setattr("sgpo_jax.run.JaxEngine", SleepingEngine)
    monkeypatch.setattr(Run, "turns", property(lambda run: SharedDevices(run.engine)))
    monkeypatch.setattr(TrainStep, "update", recording_update)
    monkeypatch.setattr(TrainStep, "logprobs", recording_logprobs)
    monkeypatch.setattr(pipeline, "train", recording_train)
    run_all(small_config(tmp_path / "run"))

    # The engine works for profile and evaluation; it sleeps while the state is made, once in each step, before the
    # update's first use of the devices, and while the final evaluation loads a checkpoint.
    steps = r"sleep sync( (generate )+sleep update sync)+"
    assert re.fullmatch(rf"(generate )+{steps} sleep sync generate", " ".join(events)), events
    assert references[0] == {"pinned_host"}
    assert references[1:] == [{"device"}] * events.count("update")
    assert exports(tmp_path / "run") == exports(plain)
    assert read_json(tmp_path / "run" / "eval" / "final.json") == read_json(plain / "eval" / "final.json")


def test_weights_wait_in_host_memory_before_a_server_that_shares_the_gpus_starts(tmp_path, monkeypatch, capsys):
    class StartedError(Exception):
        """Instead of a server."""

    def release():
        events.append("release")
        return [GPUMemory(0, 3 << 30, 4 << 30)]

    def start(*_, initial, probe, **__):
        events.append(*memory_kinds(initial))
        assert probe.token_ids
        raise StartedError

    events: list[str] = []
    monkeypatch.setattr("sgpo_jax.run.check_server", lambda *_: None)
    monkeypatch.setattr("sgpo_jax.run.release_unused", release)
    monkeypatch.setattr("sgpo_jax.run.make_vllm_engine", start)
    shared = {"rollouts": {"engine": "vllm"}, "vllm": {"placement": "shared"}}
    with open_run(small_config(tmp_path, **shared)) as run, pytest.raises(StartedError):
        _ = run.engine
    assert events == ["release", "pinned_host"]
    assert "vllm: GPU 0 has 3.0 of 4.0 GiB free for it" in capsys.readouterr().err


def test_an_exported_phase_starts_a_new_run_whose_profile_is_its_own(plain, tmp_path):
    phase = plain / "hf" / read_json(plain / "plan.json")["phases"][0]["name"]
    model = {"path": str(phase), "remat": "none"}
    with (
        open_run(small_config(tmp_path / "reusing", model=model, profile={"reuse": str(plain)})) as run,
        pytest.raises(UserError, match="another model"),
    ):
        pipeline.profile_stage(run)
    run_all(small_config(tmp_path / "run", model=model))
    ours, theirs = (read_json(d / "profile.json")["identity"] for d in (tmp_path / "run", plain))
    assert ours["model"] != theirs["model"]
    assert {**ours, "model": ""} == {**theirs, "model": ""}
    last = max((tmp_path / "run" / "hf").iterdir(), key=lambda path: path.stat().st_mtime)
    before, after = (load_file(d / "model.safetensors") for d in (phase, last))
    assert before.keys() == after.keys()
    assert any((before[name] != after[name]).any() for name in before), "it went on training"
