"""What every benchmark reports: a row a figure, with the values of all runs, as a table and as JSON."""

import os
import platform
from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from sgpo_jax.files import write_json

PACKAGES = ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "safetensors", "numpy", "transformers")


@dataclass(frozen=True)
class Row:
    """values: one a run, a ratio as a rule. against: what it is a ratio to; empty: a figure of its own, in `unit`."""

    what: str
    values: Sequence[float]
    against: str = ""
    unit: str = ""
    at_most: float | None = None
    at_least: float | None = None

    @property
    def median(self) -> float:
        return float(np.median(self.values))

    @property
    def goal(self) -> str:
        if self.at_most is not None:
            return f"at most {self.at_most:g}"
        return f"at least {self.at_least:g}" if self.at_least is not None else ""

    @property
    def verdict(self) -> str:
        if self.at_most is not None:
            return "met" if self.median <= self.at_most else "MISSED"
        return ("met" if self.median >= self.at_least else "MISSED") if self.at_least is not None else ""


@dataclass
class Report:
    """settings: what the figures hold for."""

    title: str
    settings: dict[str, Any]
    rows: list[Row] = field(default_factory=list)
    versions: dict[str, str] = field(default_factory=dict)

    def finish(self, json_file: Path | None) -> None:
        """Print it, and write it where a file is named."""
        table = Table(title=f"{self.title} ({', '.join(f'{key} {value}' for key, value in self.settings.items())})")
        for name in ("what", "against", "median", "from", "to", "goal", ""):
            table.add_column(name, justify="right" if name in ("median", "from", "to") else "left")
        for row in self.rows:
            spread = [f"{value:.3g}" for value in (row.median, min(row.values), max(row.values))]
            table.add_row(row.what, row.against, f"{spread[0]} {row.unit}".rstrip(), *spread[1:], row.goal, row.verdict)
        Console(width=max(120, Console().width)).print(table)
        if json_file is not None:
            rows = [vars(row) | {"values": list(row.values), "median": row.median} for row in self.rows]
            versions = versions_of(PACKAGES) | self.versions
            content = {"title": self.title, "settings": self.settings, "machine": machine(), "versions": versions}
            write_json(json_file, content | {"rows": rows})


def machine() -> dict[str, Any]:
    model = next((line.split(":")[1].strip() for line in _lines("/proc/cpuinfo") if line.startswith("model name")), "")
    memory = next((line.split()[1] for line in _lines("/proc/meminfo") if line.startswith("MemTotal")), "0")
    return {
        "cpu": model,
        "cores": len(os.sched_getaffinity(0)),
        "memory_gb": round(int(memory) * 1024 / 1e9, 1),
        "system": platform.platform(),
        "python": platform.python_version(),
    }


def versions_of(packages: Sequence[str]) -> dict[str, str]:
    found = {}
    for name in packages:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def _lines(path: str) -> list[str]:
    try:
        return Path(path).read_text().splitlines()
    except OSError:
        return []
