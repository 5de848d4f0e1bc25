"""One line for each finished run, all that tables and figures need of it: a study goes on by them where its run
directories are gone, in a fresh checkout, say.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from sgpo_jax.files import read_jsonl, write_jsonl
from sgpo_jax.types import UserError

Record = Mapping[str, Any]


class Records:
    """The records of a study, by the names of its cells, in a file that is replaced with each new one."""

    def __init__(self, path: Path) -> None:
        """Raises UserError for a file that is not such records."""
        self._path = path
        rows = read_jsonl(path) if path.exists() else []
        for number, row in enumerate(rows, start=1):
            if not isinstance(row, dict) or not isinstance(row.get("name"), str):
                raise UserError(f"{path}:{number}: not the record of a study's run: it has no name")
        self._rows: dict[str, Record] = {row["name"]: row for row in rows}

    def __len__(self) -> int:
        return len(self._rows)

    def where(self, name: str) -> str:
        """The place of a record, for messages."""
        return f"{self._path}: {name}"

    def find(self, name: str) -> Record | None:
        return self._rows.get(name)

    def keep(self, row: Record) -> None:
        self._rows[row["name"]] = row
        write_jsonl(self._path, [self._rows[name] for name in sorted(self._rows)])
