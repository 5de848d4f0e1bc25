"""`launch check` as a user meets it, and the parts of it that need no compiler."""

import json
import math
import os
import stat
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import jax
import numpy as np
import pytest
from helpers import make_config

from sgpo_jax.check import examine
from sgpo_jax.check.advice import Budget
from sgpo_jax.check.collectives import Collective
from sgpo_jax.check.machine import environment, machine_of
from sgpo_jax.check.memory import estimate
from sgpo_jax.check.preflight import preflight
from sgpo_jax.check.programs import Compiled
from sgpo_jax.check.report import to_dict
from sgpo_jax.check.server import server_memory
from sgpo_jax.config import load_config
from sgpo_jax.hardware import GIB
from sgpo_jax.models.published import PUBLISHED
from sgpo_jax.models.sharding import MESH_AXES
from sgpo_jax.models.weights import num_parameters
from sgpo_jax.types import UserError

ROOT = Path(__file__).parent.parent.parent
DEMO = ROOT / "configs" / "demo.yaml"
MACHINES = sorted(
    path for path in (ROOT / "configs").glob("qwen*.yaml") if "\nhardware:\n  device:" in path.read_text()
)


def launch(*args, **environment):
    command = [sys.executable, "-m", "sgpo_jax.launch", "check", *map(str, args)]
    return subprocess.run(
        command, cwd=ROOT, env=os.environ | environment, capture_output=True, text=True, timeout=580, check=False
    )


@pytest.mark.timeout(600)  # a loaded machine compiles slowly
def test_the_demo_is_ready_on_two_devices_and_the_report_is_json(tmp_path):
    finished = launch(DEMO, "--devices", 2, "--json", f"run_dir={tmp_path / 'run'}", "evaluate.sets=[]")
    assert finished.returncode == 0, finished.stderr
    report = json.loads(finished.stdout)
    assert report.keys() == {
        *("ok", "problems", "notes", "checked", "missing", "not_checked", "machine", "micro_batch", "memory"),
        *("programs", "flops", "forecast", "seconds", "peak_rss_bytes"),
    }
    assert report["ok"] is True
    assert report["missing"] == report["problems"] == []
    assert any("the verifier exact judges a right answer right" in line for line in report["checked"])
    assert report["machine"]["mesh"] == {"data": 1, "fsdp": 2, "tensor": 1}

    num_params, kinds = report["flops"]["num_params"], report["memory"]["by_kind"]
    resting = sum(kinds[name] for name in ("weights", "optimizer", "gradients"))
    assert resting == pytest.approx(16 * num_params / 2, rel=0.02)
    programs = report["programs"]
    assert programs.keys() == {"zeros", "accumulate", "apply", "logprobs", "empty_slots", "admit", "decode"}
    assert programs["apply"]["arguments"] == pytest.approx(resting, rel=0.02), "what the compiler says of the same"
    kinds_sent = {sent["kind"] for sent in programs["accumulate"]["collectives"]}
    assert {"all-gather", "all-reduce"} <= kinds_sent
    assert [step["num_rollouts"] for step in report["flops"]["steps"]] == [64, 128, 256]
    assert not (tmp_path / "run").exists(), "nothing is written"


@pytest.mark.timeout(600)
def test_a_model_of_which_nothing_is_known_ends_the_check_with_one_line(tmp_path):
    finished = launch(DEMO, "model.path=nobody/none", f"run_dir={tmp_path}")
    assert finished.returncode == 2
    assert "model.path=nobody/none: neither a directory nor in the hub's cache" in finished.stderr
    assert "its config.json" in finished.stderr
    assert len([line for line in finished.stderr.splitlines() if line.startswith("error: ")]) == 1


@pytest.fixture
def examined(monkeypatch):
    """examine() with programs that were not compiled: give their figures."""

    def run(config, *, flops=1000, allow_missing=True, **figures):
        compiled = Compiled(flops, 0.0, **figures)
        names = ("accumulate", "apply", "logprobs", *(("admit", "decode") * (config.rollouts.engine == "jax")))
        monkeypatch.setattr(examine, "compile_programs", lambda *_: dict.fromkeys(names, compiled))
        monkeypatch.setattr(examine, "make_mesh", lambda config, devices, arch: mesh_of_four(config))
        monkeypatch.setattr(examine, "devices_of", lambda machine: [])
        return examine.examine(config, num_devices=None, allow_missing=allow_missing)

    def mesh_of_four(mesh):
        devices = np.array(jax.devices()[:1] * 4)
        return jax.sharding.Mesh(devices.reshape(mesh.data, 4 // mesh.tensor, mesh.tensor), MESH_AXES)

    return run


QUESTIONS = ["data.train=[{path: rows.jsonl}]", "evaluate.sets=[]"]


def on_h100s(*overrides):
    """Without the server's environment, whether or not this checkout has one (for CPUs)."""
    missing = "vllm.command=[no-environment/bin/python, -m, vllm.entrypoints.openai.api_server]"
    return load_config(ROOT / "configs" / "qwen2.5-math-7b.yaml", [*QUESTIONS, missing, *overrides])


def test_a_missing_model_is_a_problem_unless_it_may_be_missing(examined):
    strict = examined(on_h100s(), allow_missing=False)
    assert {line.split(":")[0] for line in strict.problems} >= {"model.path=Qwen/Qwen2.5-Math-7B", "rows.jsonl"}
    report = examined(on_h100s())
    assert report.problems == ()
    assert any(
        "weights, tokenizer and template of Qwen/Qwen2.5-Math-7B" in line for line in report.findings.not_checked
    )
    assert report.num_params == 7_615_616_512
    assert report.hours.total == report.hours.profiling + report.hours.rollouts + report.hours.updates > 0
    assert [step.num_tokens for step in report.steps] == [128 * 1083, 256 * 1083, 512 * 1083]


def test_a_config_json_alone_says_what_is_to_be_compiled(examined, tmp_path):
    (tmp_path / "config.json").write_text((ROOT / "sgpo_jax" / "demo" / "model" / "config.json").read_text())
    report = examined(load_config(DEMO, [*QUESTIONS, f"model.path={tmp_path}"]))
    assert report.problems == ()
    assert len(report.findings.missing) == 3, "weights, tokenizer, questions"
    assert report.num_params == 161_856


def test_what_does_not_fit_is_said_with_what_would(examined):
    config = on_h100s("train.micro_batch_tokens=524288")
    report = examined(config)
    (problem,) = report.problems
    assert problem.startswith("does not fit: a device would hold ")
    setting = next(word for word in problem.split() if word.startswith("train.micro_batch_tokens="))
    mended = examined(on_h100s(setting))
    assert mended.problems == ()
    larger = 2 * int(setting.split("=")[1])
    assert examined(on_h100s(f"train.micro_batch_tokens={larger}")).problems, "no smaller than need be"


def test_a_samplers_layout_is_counted_and_one_that_does_not_fit_is_named(examined):
    """The 7B, sampled from in bfloat16: a copy on each of four devices, or one on every two."""
    jax_engine = ["rollouts.engine=jax", "rollouts.batch_size=16"]
    plain = examined(on_h100s(*jax_engine))
    halves = examined(on_h100s(*jax_engine, "rollouts.mesh.tensor=2"))
    assert (plain.sampler_mesh, halves.sampler_mesh) == (None, {"data": 2, "fsdp": 1, "tensor": 2})
    assert halves.memory.sampler_weights == pytest.approx(2 * plain.memory.sampler_weights, rel=1e-3)
    assert halves.memory.sampler_weights == pytest.approx(halves.num_params, rel=1e-3), "two bytes of each half"
    assert halves.memory.weights == plain.memory.weights
    assert to_dict(halves)["machine"]["sampler_mesh"] == {"data": 2, "fsdp": 1, "tensor": 2}
    assert halves.problems == ()
    tight = "mesh.memory_frac=0.8"
    assert examined(on_h100s(*jax_engine, "rollouts.mesh.tensor=2", tight)).problems == ()
    (problem,) = examined(on_h100s(*jax_engine, "rollouts.mesh.tensor=1", tight)).problems
    assert problem.startswith("does not fit: ")
    assert "rollouts.mesh.data=2 rollouts.mesh.tensor=2 would make it" in problem


def test_gathers_for_every_token_are_noted_with_the_layout_that_has_none(examined):
    gathers = (Collective("all-gather", 1, 16 * 16 * GIB),)
    jax_engine = ["rollouts.engine=jax", "rollouts.batch_size=16", "rollouts.decode_steps=16"]
    (note,) = examined(on_h100s(*jax_engine), collectives=gathers).notes
    assert note.startswith("the JAX engine gathers 16.0 GiB for every token")
    assert "with rollouts.mesh.data=4 rollouts.mesh.tensor=1 they would stay where they are, for 14.2 GiB" in note
    (note,) = examined(on_h100s(*jax_engine, "mesh.memory_frac=0.8"), collectives=gathers).notes
    assert "with rollouts.mesh.data=2 rollouts.mesh.tensor=2 they would" in note


def test_what_only_a_cpu_would_hold_is_a_note(examined):
    report = examined(on_h100s(), temporaries=70 * GIB)
    assert report.problems == ()
    assert any("an upper estimate" in note for note in report.notes)


def test_tpus_are_held_to_what_was_compiled_for_them(examined):
    config = load_config(ROOT / "configs" / "qwen2.5-math-7b-tpu-v5p-8.yaml", QUESTIONS)
    assert examined(config, temporaries=10 * GIB).problems == ()
    assert "does not fit: a device would hold" in examined(config, temporaries=90 * GIB).problems[0]
    failed = examined(config, failure="RESOURCE_EXHAUSTED: ran out of memory").problems[0]
    assert "accumulate: RESOURCE_EXHAUSTED" in failed
    assert "train.micro_batch_tokens=" in failed


@pytest.mark.parametrize("path", MACHINES, ids=lambda path: path.stem)
def test_every_configuration_of_a_machine_fits_by_arithmetic(path):
    config = load_config(path)
    machine, arch = machine_of(config), PUBLISHED[config.model.path]
    mesh = {axis: getattr(config.mesh, axis) for axis in ("data", "fsdp", "tensor")}
    known = math.prod(size for size in mesh.values() if size != -1)
    mesh = {axis: machine.trainer_devices // known if size == -1 else size for axis, size in mesh.items()}
    assert math.prod(mesh.values()) == machine.trainer_devices
    sizes, inputs = examine.shapes_of(config, machine, arch, mesh, config.data.max_prompt_tokens)
    assert inputs.shape.row_length == 4096
    assert estimate(sizes).weights == pytest.approx(
        4 * num_parameters(arch) / (mesh["fsdp"] * mesh["tensor"]), rel=1e-3
    )
    assert Budget(machine.trainer_bytes).peak(estimate(sizes)) <= machine.trainer_bytes
    server = server_memory(config, machine, arch, inputs.shape.row_length)
    assert server is None if machine.is_tpu else server.num_sequences > 100


def test_what_each_may_take_follows_from_the_placement():
    config = make_config(
        rollouts={"engine": "vllm"}, hardware={"device": "h100-80gb", "num_hosts": 2, "devices_per_host": 8}
    )
    h100 = 79.1 * GIB
    machine = machine_of(config)
    assert (machine.trainer_devices, machine.server_devices) == (8, 8)
    assert (machine.trainer_bytes, machine.server_bytes) == (pytest.approx(0.75 * h100), pytest.approx(0.9 * h100))
    shared = machine_of(config.model_copy(update={"vllm": config.vllm.model_copy(update={"placement": "shared"})}))
    assert (shared.trainer_devices, shared.server_devices) == (16, 16)
    assert shared.trainer_bytes == pytest.approx(0.92 * h100)
    assert environment(machine)["XLA_FLAGS"].endswith("device_count=8")
    on_tpu = config.hardware.model_copy(update={"device": "tpu-v5p"})
    with pytest.raises(UserError, match=r"tpu-v5p: vLLM serves a run on GPUs only; set rollouts\.engine=jax"):
        machine_of(config.model_copy(update={"hardware": on_tpu}))
    assert machine_of(make_config(mesh={"fsdp": 4}), None).trainer_devices == 4
    assert machine_of(make_config(mesh={"fsdp": 4}), 2).trainer_devices == 2


def test_a_server_that_has_no_room_for_a_completion():
    config = make_config(
        model={"compute_dtype": "bfloat16"},
        rollouts={"engine": "vllm"},
        vllm={"memory_frac": 0.5},
        hardware={"device": "a100-40gb", "devices_per_host": 8},
    )
    arch = replace(PUBLISHED["Qwen/Qwen2.5-Math-7B"], num_layers=56)
    server = server_memory(config, machine_of(config), arch, 4096)
    assert server.num_sequences == 0
    split = config.model_copy(update={"vllm": config.vllm.model_copy(update={"tensor_parallel": 2})})
    halved = server_memory(split, machine_of(split), arch, 4096)
    assert halved.weights == pytest.approx(server.weights / 2, rel=1e-3)
    assert halved.num_sequences > 0


def server_like(tmp_path, version):
    """An interpreter that says that it has this vLLM; none: that it has not."""
    path = tmp_path / f"python-{version}"
    answer = f"echo {version}" if version else "echo 'PackageNotFoundError: vllm' >&2; exit 1"
    path.write_text(f"#!/bin/sh\n{answer}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return path


@pytest.mark.parametrize(
    ("version", "where", "words"),
    [
        ("0.33.1", "checked", "vLLM 0.33.1"),
        ("0.11.0", "problems", "vLLM 0.11.0 is not supported"),
        ("", "problems", "has no vLLM (PackageNotFoundError: vllm)"),
    ],
)
def test_the_servers_environment_is_asked_its_version(tmp_path, monkeypatch, version, where, words):
    from sgpo_jax.check import preflight as module

    monkeypatch.setattr(module, "_look_at_verifiers", lambda *_: None)
    command = [str(server_like(tmp_path, version)), "-m", "vllm.entrypoints.openai.api_server"]
    overrides = [f"run_dir={tmp_path}", "rollouts.engine=vllm", f"vllm.command={json.dumps(command)}"]
    findings = preflight(load_config(DEMO, [*overrides, "evaluate.sets=[]"]))
    assert any(words in line for line in getattr(findings, where))
    assert findings.longest_prompt == 15


def test_every_problem_is_found_in_one_go(tmp_path):
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"question": "1+1", "answer": "2"}\n')
    findings = preflight(
        load_config(
            DEMO,
            [
                f"run_dir={rows}/run",
                f"data.train=[{{path: {rows}, kind: 'no_such_module:judge'}}]",
                "evaluate.sets=[{path: sgpo_jax/demo/none.jsonl}]",
                "rollouts.max_completion_tokens=100000",
                "rollouts.engine=vllm",
                "vllm.command=[no-such-python, -m, vllm]",
            ],
        )
    )
    assert len(findings.problems) == 3
    assert any(f"{rows} is no directory to write in" in line for line in findings.problems)
    assert any("no_such_module:judge" in line for line in findings.problems)
    assert any("positions" in line for line in findings.problems)
    assert [line.split(":")[0] for line in findings.missing] == ["sgpo_jax/demo/none.jsonl", "vllm.command"]


def test_tpus_without_libtpu_say_what_to_install(monkeypatch):
    from jax.experimental import topologies

    from sgpo_jax.check.machine import devices_of

    machine = machine_of(load_config(ROOT / "configs" / "qwen2.5-math-7b-tpu-v5p-8.yaml"))

    def missing(**_):
        raise RuntimeError("JAX TPU support not installed")

    monkeypatch.setattr(topologies, "get_topology_desc", missing)
    with pytest.raises(UserError, match=r"libtpu, .* cannot be used here .*tools/requirements/tpu\.txt"):
        devices_of(machine)
    with pytest.raises(UserError, match="no slice has 3 chips; there are 4, 8, 16"):
        devices_of(replace(machine, trainer_devices=3))
