"""What a person and a tracker see of a run: progress, messages, metrics."""

import importlib.util
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

from rich import box
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from sgpo_jax.config import TelemetryConfig
from sgpo_jax.files import append_jsonl, read_jsonl, write_jsonl
from sgpo_jax.types import UserError

console = Console(stderr=True, highlight=False)


_PLAIN_SECONDS = 10.0  # between two lines of progress where there is no terminal


def say(message: str) -> None:
    """One line for the person at the terminal. Model output must never come here: it may hold control sequences."""
    console.print(message, markup=False, soft_wrap=True)


class Bar(Protocol):
    def advance(self, amount: int = 1, note: str = "") -> None: ...


@contextmanager
def progress(title: str, total: int | None, done: int = 0) -> Iterator[Bar]:
    """A live bar on a terminal, a line now and then elsewhere. `done`: how much was there already."""
    if console.is_terminal:
        columns = (
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            TextColumn("{task.fields[note]}"),
        )
        with Progress(*columns, console=console) as bars:
            yield _LiveBar(bars, bars.add_task(title, total=total, completed=done, note=""))
    else:
        bar = _PlainBar(title, total, done)
        yield bar
        bar.finish()


class _LiveBar:
    def __init__(self, bars: Progress, task: Any) -> None:
        self._bars, self._task = bars, task

    def advance(self, amount: int = 1, note: str = "") -> None:
        self._bars.update(self._task, advance=amount, note=note)


class _PlainBar:
    def __init__(self, title: str, total: int | None, done: int) -> None:
        self._title, self._total, self._done, self._note = title, total, done, ""
        self._printed_at: int | None = None  # what was done when the last line was printed
        self._start = self._printed = time.monotonic()

    def advance(self, amount: int = 1, note: str = "") -> None:
        self._done += amount
        self._note = note
        if time.monotonic() - self._printed > _PLAIN_SECONDS:
            self._print()

    def finish(self) -> None:
        if self._printed_at != self._done:
            self._print()

    def _print(self) -> None:
        self._printed, self._printed_at = time.monotonic(), self._done
        of = f"/{self._total}" if self._total is not None else ""
        say(f"{self._title}: {self._done}{of} after {self._printed - self._start:.0f} s  {self._note}".rstrip())


class Stopwatch:
    """Seconds by name. What no name covers, from the start on, is `other`."""

    def __init__(self) -> None:
        self._start = time.monotonic()
        self._seconds: dict[str, float] = {}

    @contextmanager
    def time(self, name: str) -> Iterator[None]:
        start = time.monotonic()
        try:
            yield
        finally:
            self._seconds[name] = self._seconds.get(name, 0.0) + time.monotonic() - start

    def move(self, seconds: float, source: str, name: str) -> None:
        """Seconds that were not `source`'s after all."""
        self._seconds[source] -= seconds
        self._seconds[name] = self._seconds.get(name, 0.0) + seconds

    def seconds(self) -> dict[str, float]:
        total = time.monotonic() - self._start
        return {**self._seconds, "other": total - sum(self._seconds.values()), "total": total}


class Tracker(Protocol):
    """Where metrics go beside metrics.jsonl."""

    def log(self, step: int, metrics: Mapping[str, float]) -> None: ...
    def close(self) -> None: ...


class Metrics:
    """metrics.jsonl, a line a training step, and the trackers of the configuration.

    A tracker that fails is said once and left out from then on; it never stops a run.
    """

    def __init__(self, path: Path, trackers: Sequence[Tracker] = ()) -> None:
        self._path = path
        self._trackers = list(trackers)

    def rewind(self, step: int) -> list[dict[str, Any]]:
        """Keep the lines up to `step`; return those after it, whose work will be done again."""
        if not self._path.exists():
            return []
        rows = read_jsonl(self._path, torn_tail=True)
        write_jsonl(self._path, [row for row in rows if row["step"] <= step])
        return [row for row in rows if row["step"] > step]

    def log(self, step: int, metrics: Mapping[str, Any]) -> None:
        append_jsonl(self._path, {"step": step, **metrics})
        numbers = {name: value for name, value in metrics.items() if isinstance(value, int | float)}
        for tracker in list(self._trackers):
            try:
                tracker.log(step, numbers)
            except Exception as error:  # any failure of a tracker is its own
                say(f"warning: {type(tracker).__name__} failed and is left out from now on: {error}")
                self._trackers.remove(tracker)

    def close(self) -> None:
        for tracker in self._trackers:
            try:
                tracker.close()
            except Exception as error:
                say(f"warning: {type(tracker).__name__} failed to close: {error}")


class TensorBoardTracker:
    def __init__(self, run_dir: Path) -> None:
        from tensorboardX import SummaryWriter

        self._writer = SummaryWriter(str(run_dir / "tensorboard"))

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        self._writer.close()


class WandbTracker:
    """Weights & Biases; WANDB_MODE=offline keeps it local. A resumed run goes on under the same id."""

    def __init__(self, run_dir: Path, project: str, config: Mapping[str, Any]) -> None:
        import wandb

        name = run_dir.name
        self._run = wandb.init(
            project=project, name=name, id=name, resume="allow", dir=str(run_dir), config=dict(config)
        )

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._run.log(dict(metrics), step=step)

    def close(self) -> None:
        self._run.finish()


_MODULES = {"tensorboard": "tensorboardX", "wandb": "wandb"}


def check_trackers(config: TelemetryConfig) -> None:
    """Raises UserError where the extra of a tracker is not installed."""
    for name in config.trackers:
        if importlib.util.find_spec(_MODULES[name]) is None:
            raise UserError(
                f"telemetry.trackers: {name} is not installed; pip install 'sgpo-jax[{name}]' or leave it out"
            )


def make_trackers(config: TelemetryConfig, run_dir: Path, run_config: Mapping[str, Any]) -> list[Tracker]:
    """The trackers of the configuration; one that fails to start is said and left out."""
    makers: dict[str, Callable[[], Tracker]] = {
        "tensorboard": lambda: TensorBoardTracker(run_dir),
        "wandb": lambda: WandbTracker(run_dir, config.project, run_config),
    }
    trackers: list[Tracker] = []
    for name in config.trackers:
        try:
            trackers.append(makers[name]())
        except Exception as error:  # any failure of a tracker is its own
            say(f"warning: the tracker {name} failed to start and is left out: {error}")
    return trackers


def show_table(title: str, header: Sequence[str], rows: Iterable[Sequence[Any]]) -> None:
    """A small table on standard output; the first column is a name, the others are figures (or pictures: no title)."""
    grid = Table(title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD)
    for i, name in enumerate(header):
        grid.add_column(name, justify="left" if i == 0 or not name else "right", overflow="fold")
    for row in rows:
        grid.add_row(*(Text(str(cell)) for cell in row))
    output = Console(file=sys.stdout, highlight=False)
    output.print(grid, width=None if output.is_terminal else 100)


def format_flops(flops: float) -> str:
    """With the prefix that leaves one to three digits before the point: 8.9 EFLOPs."""
    for prefix in ("", "K", "M", "G", "T", "P"):
        if flops < 999.5:
            return f"{flops:.3g} {prefix}FLOPs"
        flops /= 1000
    return f"{flops:.3g} EFLOPs"
