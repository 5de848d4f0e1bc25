"""The command line as a user meets it: exit codes, one-line errors, help, the small commands."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner
from safetensors.numpy import load_file

from sgpo_jax.launch import cli

ROOT = Path(__file__).parent.parent
MODEL = ROOT / "sgpo_jax" / "demo" / "model"


def invoke(*args):
    return CliRunner().invoke(cli, [str(arg) for arg in args])


def demo_file(tmp_path, *, model=MODEL, rows=ROOT / "sgpo_jax" / "demo" / "train.jsonl"):
    path = tmp_path / "run.yaml"
    path.write_text(
        f"run_dir: {tmp_path / 'run'}\n"
        f"model: {{path: {model}}}\n"
        f"data: {{train: [{{path: {rows}, max_queries: 4}}], template: plain, max_prompt_tokens: 15}}\n"
        "rollouts: {max_completion_tokens: 31, batch_size: 8}\n"
    )
    return path


@pytest.mark.parametrize("name", sorted(cli.commands))
def test_every_command_has_help_with_an_example(name):
    result = invoke(name, "--help")
    assert result.exit_code == 0
    assert f"Example: python -m sgpo_jax.launch {name}" in " ".join(result.output.split())


def test_help_imports_nothing_heavy():
    code = (
        "import sys; from sgpo_jax import launch; "
        "assert not {'jax', 'flax', 'transformers', 'datasets'} & sys.modules.keys(), 'heavy'"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("model.path=/nowhere/model", "/nowhere/model: no such model directory"),
        ("data.train.0.path=/nowhere/rows.jsonl", "/nowhere/rows.jsonl"),
        ("train.epoch=3", "did you mean train.epochs?"),
        ("mesh.tensor=3", "mesh.tensor=3"),
        ("run_dir=/proc/nowhere", "run_dir=/proc/nowhere: cannot be written"),
    ],
)
def test_wrong_input_is_one_line_and_exit_code_2(tmp_path, change, message):
    result = invoke("run", demo_file(tmp_path), change)
    assert result.exit_code == 2
    errors = [line for line in result.stderr.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1
    assert message in errors[0]
    assert "Traceback" not in result.output


def test_wrong_family_is_refused_by_name(tmp_path):
    (tmp_path / "gpt2").mkdir()
    (tmp_path / "gpt2" / "config.json").write_text('{"model_type": "gpt2"}')
    (tmp_path / "gpt2" / "tokenizer.json").write_bytes((MODEL / "tokenizer.json").read_bytes())
    result = invoke("profile", demo_file(tmp_path, model=tmp_path / "gpt2"))
    assert result.exit_code == 2
    assert "gpt2" in result.stderr
    assert "qwen2" in result.stderr


def test_missing_tokenizer_is_named(tmp_path):
    (tmp_path / "bare").mkdir()
    for name in ("config.json", "model.safetensors"):
        (tmp_path / "bare" / name).write_bytes((MODEL / name).read_bytes())
    result = invoke("run", demo_file(tmp_path, model=tmp_path / "bare"))
    assert result.exit_code == 2
    assert "bare: has no tokenizer" in result.stderr
    assert invoke("generate", tmp_path / "bare", "--prompt", "1+1=", "--raw").exit_code == 2
    assert invoke("convert", tmp_path / "bare", tmp_path / "orbax").exit_code == 0, "convert needs no tokenizer"


def test_a_mended_configuration_may_use_the_same_directory(tmp_path):
    assert invoke("plan", demo_file(tmp_path), "model.path=/nowhere").exit_code == 2
    result = invoke("plan", demo_file(tmp_path))
    assert "has no complete profile" in result.stderr, "not: belongs to another configuration"


def test_unexpected_errors_are_one_line_too_and_show_more_with_debug(tmp_path, monkeypatch):
    from sgpo_jax import pipeline

    def boom(run):
        raise ZeroDivisionError("by zero")

    monkeypatch.setattr(pipeline, "profile_stage", boom)
    result = invoke("profile", demo_file(tmp_path))
    assert result.exit_code == 1
    assert "error: ZeroDivisionError: by zero (run again with --debug" in result.stderr
    assert "Traceback" not in result.stderr
    assert "Traceback" in invoke("--debug", "profile", demo_file(tmp_path)).stderr


def test_a_full_disk_is_the_machines_fault(tmp_path, monkeypatch):
    from sgpo_jax import run

    def full(path, text):
        raise OSError(28, "No space left on device", str(path))

    monkeypatch.setattr(run, "write_text", full)
    result = invoke("profile", demo_file(tmp_path))
    assert result.exit_code == 1
    assert "config.yaml: No space left on device" in result.stderr


def test_generate_gives_the_contract(tmp_path):
    out = tmp_path / "out.jsonl"
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "23+8*3="}\n{"prompt": "1+1="}\n')
    options = ["--raw", "--num", 2, "--max-tokens", 31, "--seed", 5]
    assert invoke("generate", MODEL, "--prompts", tmp_path / "prompts.jsonl", *options, "--out", out).exit_code == 0
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert [row["prompt"] for row in rows] == ["23+8*3=", "1+1="]
    for row in rows:
        assert len(row["completions"]) == 2
        for completion in row["completions"]:
            assert completion.keys() == {"text", "token_ids", "logprobs", "finish_reason"}
            assert len(completion["token_ids"]) == len(completion["logprobs"])
    alone = invoke("generate", MODEL, "--prompt", "23+8*3=", "--raw", "--temperature", 0, "--max-tokens", 31)
    assert json.loads(alone.stdout)["completions"][0]["text"].endswith("$")


@pytest.mark.parametrize("args", [(), ("--prompt", "a", "--prompts", "b"), ("--prompts", "/nowhere.jsonl")])
def test_generate_needs_one_kind_of_prompt(args):
    assert invoke("generate", MODEL, "--raw", *args).exit_code == 2


def test_generate_without_a_chat_template_points_to_raw():
    result = invoke("generate", MODEL, "--prompt", "1+1=")
    assert result.exit_code == 2
    assert "--raw" in result.stderr


def test_convert_there_and_back_is_bit_equal(tmp_path):
    assert invoke("convert", MODEL, tmp_path / "orbax").exit_code == 0
    assert invoke("convert", tmp_path / "orbax", tmp_path / "back").exit_code == 0
    ours, theirs = (load_file(directory / "model.safetensors") for directory in (tmp_path / "back", MODEL))
    assert {name: (x.dtype, x.tobytes()) for name, x in ours.items()} == {
        name: (x.dtype, x.tobytes()) for name, x in theirs.items()
    }
    assert {p.name for p in (tmp_path / "back").iterdir()} == {p.name for p in MODEL.iterdir()}
    again = invoke("convert", MODEL, tmp_path / "orbax")
    assert again.exit_code == 2
    assert "exists already" in again.stderr
    nothing = invoke("convert", tmp_path, tmp_path / "x")
    assert nothing.exit_code == 2
    assert "neither a Hugging Face directory" in nothing.stderr


def test_verify_shows_agreement_and_each_disagreement(tmp_path):
    lines = [
        {"gold": "4", "completion": r"so \boxed{4}", "expected": True},
        {"gold": "4", "completion": r"so \boxed{5}", "expected": True},
        {"gold": r"\frac12", "completion": r"\boxed{0.5}", "expected": True},
    ]
    file = tmp_path / "answers.jsonl"
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    result = invoke("verify", file, "--kind", "math", "--out", tmp_path / "out.jsonl")
    assert result.exit_code == 0
    verdicts = [json.loads(line)["verdict"] for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert verdicts == ["correct", "wrong", "correct"]
    assert "2" in result.stdout
    assert "3" in result.stdout


def test_export_refuses_what_is_no_run(tmp_path):
    result = invoke("export", tmp_path, tmp_path / "out")
    assert result.exit_code == 2
    assert "not a run directory" in result.stderr
