"""The GPU's smoke test on a CPU, at toy size; that it notices what it is for; which model it takes."""

import json
import os
import subprocess
import sys
from functools import partial
from pathlib import Path

import gpu_smoke
import numpy as np
import pytest

from sgpo_jax.models.attention import Choice, packed_attention
from sgpo_jax.models.weights import num_parameters
from sgpo_jax.types import MachineError

REPOSITORY = Path(__file__).parent.parent.parent

# What this project requires, and neither a bare image nor tools/gpu_smoke.sh --wheels has.
ABSENT = [
    *("click", "datasets", "filelock", "grain", "httpx2", "huggingface_hub", "jinja2", "latex2sympy2_extended"),
    *("math_verify", "mpmath", "pyarrow", "sympy", "tokenizers", "transformers"),
]
ON_A_BARE_IMAGE = f"""
import sys
sys.modules.update(dict.fromkeys({ABSENT!r}))  # importing one of them is now an error
import gpu_smoke
sys.exit(gpu_smoke.main(["--toy"]))
"""


def test_toy_run_on_a_bare_image_gives_every_figure():
    environment = os.environ | {"PYTHONPATH": f"{REPOSITORY / 'tools'}:{REPOSITORY}", "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, "-c", ON_A_BARE_IMAGE]
    finished = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=250)
    assert finished.returncode == 0, finished.stderr[-3000:]
    figures = json.loads(finished.stdout.splitlines()[-1])
    assert figures["model.attention"] == "plain (auto, on cpu)"
    assert 0 < figures["attention/plain/error_output"] < 0.01
    assert figures["attention/cudnn"].startswith("not here: ")
    assert figures["train/tokens_per_s"] == pytest.approx(figures["train/tokens"] / figures["train/step_s"])
    assert figures["train/grad_norm"] > 0
    assert figures["decode/tokens_per_s"] > 0
    assert 0 < figures["decode/mean_logprob_gap"] < 1e-3


def test_without_a_gpu_only_the_toy_is_run(capsys):
    assert gpu_smoke.main([]) == 2
    assert "--toy" in capsys.readouterr().err


def test_models_are_those_of_the_hub():
    billions = {name: num_parameters(arch) / 1e9 for name, arch in gpu_smoke.MODELS.items()}
    published = {"Qwen2.5-7B": 7.616, "Qwen2.5-3B": 3.086, "Qwen2.5-1.5B": 1.544, "Qwen2.5-0.5B": 0.494}
    assert billions == {name: pytest.approx(size, abs=5e-4) for name, size in published.items()}


@pytest.mark.parametrize(("gib", "name"), [(22, "0.5B"), (40, "1.5B"), (73, "3B"), (128, "3B"), (165, "7B")])
def test_the_largest_model_that_fits_is_taken(gib, name):
    assert gpu_smoke.largest_that_fits(gib * 2**30)[0] == f"Qwen2.5-{name}"
    with pytest.raises(MachineError, match=r"no model .* fits 8\.6 GB"):
        gpu_smoke.largest_that_fits(8 * 2**30)


def test_rows_are_packed_and_end_in_padding():
    segment_ids_BT = gpu_smoke.packed_segments(np.random.default_rng(0), 20, 64)
    for row_T in segment_ids_BT:
        length = int((row_T > 0).sum())
        assert 0 < length < 64
        assert not row_T[length:].any()
        assert np.isin(np.diff(row_T[:length]), (0, 1)).all()
        assert row_T[0] == 1
        assert row_T.max() == 4


def wrong(name, segment_ids_BT, *, fault):
    """Attention whose `cudnn` is plain, with a fault."""
    if name == "cudnn" and fault == "blind":
        segment_ids_BT = segment_ids_BT * 0 + 1  # one segment: nothing is hidden but the future
    attend = packed_attention("plain", segment_ids_BT)
    if name == "cudnn" and fault == "scale":
        return lambda q, k, v: attend(q * 1.05, k, v)
    if name == "cudnn" and fault == "leak":
        return lambda q, k, v: attend(q, k, v) + v[:, -1:, :1] * 1e-4
    return attend


@pytest.mark.parametrize(
    ("fault", "words"),
    [("scale", "cudnn: .* is off by"), ("blind", "cudnn: .* is off by"), ("leak", "cudnn: token 0 sees the future")],
)
def test_a_wrong_kernel_is_noticed(fault, words, monkeypatch):
    monkeypatch.setattr(gpu_smoke, "packed_attention", partial(wrong, fault=fault))
    monkeypatch.setattr(gpu_smoke, "choose_attention", lambda name, *_: Choice(name, "as the test has it"))
    with pytest.raises(MachineError, match=words):
        for _ in gpu_smoke.compare_attention(gpu_smoke.TOY_MODEL, gpu_smoke.TOY):
            pass


def test_the_wheels_are_those_of_the_pinned_requirements():
    """Every name that tools/gpu_smoke.sh looks for is pinned, once."""
    script = (REPOSITORY / "tools" / "gpu_smoke.sh").read_text()
    names = script.split("LACKING='")[1].split("'")[0].split("|")
    pins = (REPOSITORY / "tools" / "requirements" / "cuda12.txt").read_text().splitlines()
    assert [sum(line.startswith(f"{name}==") for line in pins) for name in names] == [1] * len(names)
