"""How a run makes its model."""

from pathlib import Path

import pytest
from helpers import make_config

from sgpo_jax import run as run_module
from sgpo_jax.models.attention import Choice
from sgpo_jax.run import Run
from sgpo_jax.types import UserError

MODEL = str(Path(__file__).parent / "fixtures" / "models" / "qwen3")


def make_run(**model: str) -> Run:
    return Run(make_config(model={"path": MODEL, **model}), mesh=None)


def test_attention_is_chosen_and_said(monkeypatch, capsys):
    assert make_run().model.attention == "plain"
    assert "model: attention by plain (auto, on cpu)" in capsys.readouterr().err
    monkeypatch.setattr(run_module, "choose_attention", lambda *_: Choice("cudnn", "asked for"))
    assert make_run().model.attention == "cudnn"


def test_attention_that_cannot_run_here_is_refused_before_the_weights_are_loaded(monkeypatch):
    monkeypatch.setattr(run_module, "load_model", lambda *_, **__: pytest.fail("loaded"))
    with pytest.raises(UserError, match=r"model\.attention=splash cannot run here: JAX runs on cpu"):
        _ = make_run(attention="splash").model
