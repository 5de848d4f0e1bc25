import pytest

from sgpo_jax import telemetry
from sgpo_jax.config import TelemetryConfig
from sgpo_jax.files import read_jsonl
from sgpo_jax.telemetry import Metrics, Stopwatch, check_trackers, format_flops, make_trackers, progress, show_table
from sgpo_jax.types import UserError


class Recorder:
    def __init__(self, fail_at: int | None = None) -> None:
        self.seen: list[tuple[int, dict]] = []
        self.fail_at = fail_at

    def log(self, step, metrics):
        if step == self.fail_at:
            raise ConnectionError("tracker is gone")
        self.seen.append((step, dict(metrics)))

    def close(self):
        if self.fail_at is not None:
            raise ConnectionError("tracker is gone")


def test_a_tracker_that_fails_is_said_and_left_out(tmp_path, capsys):
    good, bad = Recorder(), Recorder(fail_at=2)
    metrics = Metrics(tmp_path / "metrics.jsonl", [bad, good])
    for step in (1, 2, 3):
        metrics.log(step, {"x": step / 2, "phase": "e1-g2", "none": None})
    metrics.close()
    assert [step for step, _ in good.seen] == [1, 2, 3]
    assert [step for step, _ in bad.seen] == [1]
    assert good.seen[0][1] == {"x": 0.5}, "numbers only"
    assert len(read_jsonl(tmp_path / "metrics.jsonl")) == 3
    assert "Recorder failed and is left out" in capsys.readouterr().err


def test_rewinding_keeps_the_lines_up_to_the_checkpoint(tmp_path):
    metrics = Metrics(tmp_path / "metrics.jsonl")
    assert metrics.rewind(0) == []
    for step in (1, 2, 3, 4):
        metrics.log(step, {"x": step})
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 5, "x"')
    assert [row["step"] for row in metrics.rewind(2)] == [3, 4]
    assert [row["step"] for row in read_jsonl(tmp_path / "metrics.jsonl")] == [1, 2]


def test_tensorboard_gets_every_number(tmp_path):
    pytest.importorskip("tensorboardX")
    [tracker] = make_trackers(TelemetryConfig(trackers=("tensorboard",)), tmp_path, {})
    tracker.log(1, {"train/loss": 0.5})
    tracker.close()
    [events] = (tmp_path / "tensorboard").iterdir()
    assert b"train/loss" in events.read_bytes()


def test_a_missing_extra_is_named_before_anything_runs(monkeypatch):
    monkeypatch.setitem(telemetry._MODULES, "wandb", "no_such_module")
    with pytest.raises(UserError, match=r"wandb is not installed; pip install 'sgpo-jax\[wandb\]'"):
        check_trackers(TelemetryConfig(trackers=("wandb",)))


def test_progress_says_what_was_done_where_there_is_no_terminal(capsys):
    with progress("profile", 10, done=4) as bar:
        for _ in range(6):
            bar.advance(note="e1-g2")
    assert "profile: 10/10 after 0 s  e1-g2" in capsys.readouterr().err


def test_messages_are_no_markup(capsys):
    telemetry.say("[bold]as it is[/bold] [red]")
    assert "[bold]as it is[/bold] [red]" in capsys.readouterr().err
    show_table("T", ("a", "b"), [("[red]x", 1)])
    assert "[red]x" in capsys.readouterr().out


def test_stopwatch_accounts_for_every_second():
    watch = Stopwatch()
    with watch.time("a"):
        pass
    with watch.time("a"):
        pass
    seconds = watch.seconds()
    assert seconds.keys() == {"a", "other", "total"}
    assert seconds["a"] + seconds["other"] == pytest.approx(seconds["total"])
    watch.move(1.0, "a", "b")
    moved = watch.seconds()
    assert (moved["a"], moved["b"]) == (seconds["a"] - 1, 1)
    assert moved["a"] + moved["b"] + moved["other"] == pytest.approx(moved["total"])


@pytest.mark.parametrize(
    ("flops", "text"),
    [
        (0, "0 FLOPs"),
        (999, "999 FLOPs"),
        (999.9, "1 KFLOPs"),
        (1.5e9, "1.5 GFLOPs"),
        (8.9e18, "8.9 EFLOPs"),
        (2e22, "2e+04 EFLOPs"),
    ],
)
def test_flops_have_a_prefix(flops, text):
    assert format_flops(flops) == text
