"""Rows from files, data sets, functions and generators, each with the place that it came from."""

import csv
import hashlib
import importlib
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sgpo_jax.config import SourceConfig
from sgpo_jax.data import evaluation_sets
from sgpo_jax.types import MachineError, UserError

_FUNCTION = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*")
_HUB_NAME = re.compile(r"(?P<name>[\w.-]+/[\w.-]+)(:(?P<config>[\w.-]+))?")
_GENERATED_ROWS = 1000  # of an endless generator, where max_queries does not say how many


@dataclass(frozen=True, slots=True)
class LocatedRow:
    """A row as its publisher wrote it; `where` names it in errors: file and line, or data set and row number."""

    where: str
    values: Mapping[str, Any]


def read_rows(source: SourceConfig) -> Iterator[LocatedRow]:
    """The rows of a source, in its order. `source.path` is, in this order of precedence:

    - a directory in the layout of a Hugging Face data set (`DIR:config` where it has several configurations);
    - a .jsonl, .json, .parquet or .csv file;
    - `reasoning_gym:TASK`: entries that depend on the task and on `split` alone, so that `split: test` is held out;
    - an evaluation set by name, or `NAME@PATH` for a local copy of it (see evaluation_sets.py);
    - `module:function`, which is called without arguments and gives mappings;
    - `owner/name` or `owner/name:config` on the Hugging Face hub, through its local cache.

    Raises UserError: nothing there, an unknown ending, no rows, a row that is broken (by file and line);
    MachineError: the hub cannot be reached.
    """
    empty = True
    for row in _open(source):
        if not isinstance(row.values, Mapping):
            raise UserError(f"{row.where}: a row is an object of named fields, found {type(row.values).__name__}")
        empty = False
        yield row
    if empty:
        raise UserError(f"{source.path}: has no rows")


def _open(source: SourceConfig) -> Iterator[LocatedRow]:
    path = source.path
    directory, _, config = path.rpartition(":")
    if Path(path).is_dir():
        return _read_directory(Path(path), None, source.split)
    if directory and Path(directory).is_dir():
        return _read_directory(Path(directory), config, source.split)
    if Path(path).exists():
        return _read_file(Path(path))
    if path.startswith("reasoning_gym:"):
        return _generate(path.removeprefix("reasoning_gym:"), source.max_queries or _GENERATED_ROWS, source.split)
    if found := evaluation_sets.find(path):
        return _read_evaluation_set(found, source)
    if Path(path).suffix in _READERS:
        raise UserError(f"{path}: no such file")
    if _FUNCTION.fullmatch(path):
        return _call(path)
    if hub := _HUB_NAME.fullmatch(path):
        return _read_hub(hub["name"], hub["config"], source.split)
    raise UserError(
        f"{path}: no such file or directory, nor owner/name of a data set, module:function, reasoning_gym:TASK, or one "
        f"of the evaluation sets {', '.join(evaluation_sets.EVALUATION_SETS)}"
    )


def _read_file(path: Path) -> Iterator[LocatedRow]:
    reader = _READERS.get(path.suffix)
    if reader is None:
        raise UserError(f"{path}: unknown ending {path.suffix!r}; known are {', '.join(_READERS)}")
    if not path.is_file():
        raise UserError(f"{path}: no such file")
    return reader(path)


def _read_json_lines(path: Path) -> Iterator[LocatedRow]:
    try:
        with path.open("rb") as lines:
            for number, line in enumerate(lines, start=1):
                if line.strip():
                    yield LocatedRow(f"{path}:{number}", _parse_json(line, f"{path}:{number}"))
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror}") from None


def _read_json(path: Path) -> Iterator[LocatedRow]:
    """A JSON array of rows, or JSON lines under the other ending."""
    try:
        with path.open("rb") as file:
            is_array = file.read(64).lstrip(b"\xef\xbb\xbf \t\r\n").startswith(b"[")
        if not is_array:
            yield from _read_json_lines(path)
            return
        for number, values in enumerate(_parse_json(path.read_bytes(), str(path)), start=1):
            yield LocatedRow(f"{path} row {number}", values)
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror}") from None


def _parse_json(line: bytes, where: str) -> Any:
    try:
        return json.loads(line.decode("utf-8-sig"))
    except (ValueError, RecursionError) as error:
        raise UserError(f"{where}: not JSON: {_one_line(error)}") from None


def _read_csv(path: Path) -> Iterator[LocatedRow]:
    number = 1
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            reader = csv.DictReader(file, strict=True)
            for values in reader:
                number = reader.line_num
                if None in values or None in values.values():
                    raise UserError(f"{path}:{number}: more or fewer fields than the header's {reader.fieldnames}")
                yield LocatedRow(f"{path}:{number}", values)
    except (OSError, ValueError, csv.Error) as error:
        raise UserError(f"{path}:{number}: not CSV at or after this line: {_one_line(error)}") from None


def _read_parquet(path: Path) -> Iterator[LocatedRow]:
    import pyarrow
    import pyarrow.parquet

    number = 0
    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            for batch in file.iter_batches():
                for values in batch.to_pylist():
                    number += 1
                    yield LocatedRow(f"{path} row {number}", values)
    except (OSError, ValueError, pyarrow.ArrowException) as error:
        raise UserError(f"{path}: not parquet after row {number}: {_one_line(error)}") from None


_READERS: dict[str, Callable[[Path], Iterator[LocatedRow]]] = {
    ".jsonl": _read_json_lines,
    ".json": _read_json,
    ".parquet": _read_parquet,
    ".csv": _read_csv,
}


def _read_directory(path: Path, config: str | None, split: str) -> Iterator[LocatedRow]:
    """A local copy of a data set. `datasets` knows which files are the split; our readers know which line is broken."""
    files = _data_files(path, config)
    if split not in files:
        raise UserError(f"{path}: has no split {split!r}; its splits are {', '.join(files)}")
    for file in files[split]:
        yield from _read_file(Path(file))


def _data_files(directory: Path, config: str | None) -> Mapping[str, Sequence[str]]:
    """The data files of each split, by the directory's card or by their names."""
    import datasets

    with _naming(directory):
        return datasets.load_dataset_builder(str(directory), config).config.data_files or {}


@contextmanager
def _naming(directory: Path) -> Iterator[None]:
    """Make what `datasets` raises about a directory a UserError that names it."""
    import datasets

    try:
        yield
    except (OSError, ValueError, datasets.exceptions.DatasetsError) as error:
        raise UserError(f"{directory}: is not laid out as a data set: {_one_line(error)}") from None


def _read_hub(name: str, config: str | None, split: str) -> Iterator[LocatedRow]:
    import datasets

    try:
        rows = datasets.load_dataset(name, config, split=split)
    except ConnectionError as error:
        raise MachineError(
            f"{name}: not on the disk, and the hub cannot be reached ({_one_line(error)}); name a local copy"
        ) from None
    except (OSError, ValueError, datasets.exceptions.DatasetsError) as error:
        raise UserError(f"{name}: cannot be read from the hub with split={split}: {_one_line(error)}") from None
    for number, values in enumerate(rows, start=1):
        yield LocatedRow(f"{name} [{split}] row {number}", values)


def _read_evaluation_set(found: evaluation_sets.Located, source: SourceConfig) -> Iterator[LocatedRow]:
    chosen = found.evaluation_set
    if source.split not in ("train", chosen.split):  # "train" is the knob's default
        raise UserError(
            f"{source.path}: a named set brings its own split ({chosen.split}); leave split={source.split} out"
        )
    if found.local_path is None:
        rows = _read_hub(chosen.hub_name, chosen.hub_config, chosen.split)
    else:
        rows = _read_local_copy(Path(found.local_path), chosen)
    if chosen.sciknoweval is None:
        return rows
    located = list(rows)
    return (located[index] for index in chosen.sciknoweval.select([row.values for row in located]))


def _read_local_copy(path: Path, chosen: evaluation_sets.EvaluationSet) -> Iterator[LocatedRow]:
    """A file, a copy of the hub's repository, or a directory of plain files (one split, one configuration)."""
    import datasets

    if not path.is_dir():
        return _read_file(path)
    with _naming(path):
        configs = datasets.get_dataset_config_names(str(path))
    config = chosen.hub_config if chosen.hub_config in configs else None
    splits = list(_data_files(path, config))
    return _read_directory(path, config, splits[0] if len(splits) == 1 else chosen.split)


def _call(path: str) -> Iterator[LocatedRow]:
    """Rows of a user's function. Whatever it raises is the user's error, named with its type."""
    module_name, _, function_name = path.partition(":")
    try:
        function = getattr(importlib.import_module(module_name), function_name)
        for number, values in enumerate(function(), start=1):
            yield LocatedRow(f"{path} row {number}", values)
    except Exception as error:
        raise UserError(f"{path}: cannot be called for rows: {type(error).__name__}: {_one_line(error)}") from error


def _generate(task: str, num_rows: int, split: str) -> Iterator[LocatedRow]:
    try:
        import reasoning_gym
    except ImportError:
        raise UserError(f"reasoning_gym:{task}: needs its package: pip install reasoning-gym") from None
    seed = int.from_bytes(hashlib.sha256(split.encode()).digest()[:4], "big")
    try:
        for number, entry in enumerate(reasoning_gym.create_dataset(task, size=num_rows, seed=seed), start=1):
            yield LocatedRow(f"reasoning_gym:{task} [{split}] entry {number}", entry)
    except (ValueError, AssertionError) as error:
        raise UserError(f"reasoning_gym:{task}: cannot be generated: {_one_line(error)}") from None


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())[:300]
