"""Files and directories that are written whole or not at all."""

import hashlib
import json
import os
import re
import secrets
import shutil
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from sgpo_jax.types import UserError

_WRITE_BYTES = 1 << 18  # Linux serves small writes from pages at hand; those over 1 MB took 2-3 times as long


def fsync_path(path: Path) -> None:
    """Flush a file or directory entry to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_text(path: Path, text: str) -> None:
    """As `write_bytes`, in UTF-8."""
    write_bytes(path, text.encode())


def write_bytes(path: Path, data: bytes) -> None:
    """Replace `path` by `data`: temporary name, fsync, rename. A crash leaves the old file or the new one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = _temporary(path)
    try:
        with temporary.open("xb") as sink:
            sink.write(data)
            sink.flush()
            os.fsync(sink.fileno())
        temporary.replace(path)
    except BaseException as error:
        temporary.unlink(missing_ok=True)
        raise _named(error, path) from None
    fsync_path(path.parent)


def write_json(path: Path, value: Any) -> None:
    write_text(path, json.dumps(value, indent=1, ensure_ascii=False, allow_nan=False) + "\n")


def write_jsonl(path: Path, rows: Iterable[Any]) -> None:
    write_text(path, "".join(f"{_line(row)}\n" for row in rows))


def append_jsonl(path: Path, row: Any) -> None:
    """Add one line, flushed to the disk. A crash can tear only the last one: `read_jsonl(torn_tail=True)` drops it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        with path.open("a", encoding="utf-8") as sink:
            sink.write(f"{_line(row)}\n")
            sink.flush()
            os.fsync(sink.fileno())
    except OSError as error:
        raise _named(error, path) from None


def write_values(sink: BinaryIO, array: np.ndarray, dtype: np.dtype) -> None:
    """The bytes of an array as `dtype`, row by row, converted and written a small piece at a time."""
    flat = array.reshape(-1)
    step = _WRITE_BYTES // dtype.itemsize
    for start in range(0, flat.size, step):
        sink.write(flat[start : start + step].astype(dtype, copy=False).view(np.uint8).data)


@contextmanager
def written_behind(sink: BinaryIO) -> Iterator[Callable[[], None]]:
    """A function that starts to flush to the disk what was written so far, and returns at once."""
    flushes: list[Future[None]] = []
    with ThreadPoolExecutor(1) as flusher:

        def flush_soon() -> None:
            if not flushes or flushes[-1].done():
                sink.flush()
                flushes.append(flusher.submit(os.fdatasync, sink.fileno()))

        yield flush_soon
    for flush in flushes:
        flush.result()


def read_json(path: Path) -> Any:
    """Raises UserError naming the file where it is missing or not JSON."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserError(f"{path}: no such file") from None
    except (ValueError, OSError) as error:
        raise UserError(f"{path}: cannot be read as JSON: {error}") from None


def read_jsonl(path: Path, *, torn_tail: bool = False) -> list[Any]:
    """All rows of a JSON-lines file; torn_tail forgives an unfinished last one. Raises UserError by file and line."""
    rows = []
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: cannot be read: {getattr(error, 'strerror', None) or error}") from None
    lines = text.removesuffix("\n").split("\n") if text else []
    for number, line in enumerate(lines, start=1):
        try:
            rows.append(json.loads(line))
        except ValueError as error:
            if torn_tail and number == len(lines) and not text.endswith("\n"):
                break
            raise UserError(f"{path}:{number}: not JSON: {error}") from None
    return rows


def digest_files(paths: Iterable[Path]) -> str:
    """One digest of the names and contents of some files, in the order given."""
    digest = hashlib.blake2b(digest_size=16)
    for path in paths:
        digest.update(path.name.encode())
        with path.open("rb") as source:
            digest.update(hashlib.file_digest(source, hashlib.blake2b).digest())
    return digest.hexdigest()


@contextmanager
def new_directory(path: Path, *, overwrite: bool = False) -> Iterator[Path]:
    """Fill a directory under a temporary name, and give it its own only when the block ended well.

    Raises UserError where `path` exists and `overwrite` is not set.
    """
    if path.exists() and not overwrite:
        raise UserError(f"{path}: exists already; name another directory or remove it")
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = _temporary(path)
    temporary.mkdir()
    mode = temporary.stat().st_mode & 0o666  # what the umask leaves of a file's; some writers give less
    try:
        yield temporary
        for file in temporary.rglob("*"):
            if file.is_file():
                file.chmod(mode)
            fsync_path(file)
        fsync_path(temporary)
        if path.exists():
            shutil.rmtree(path)
        temporary.rename(path)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    fsync_path(path.parent)


def sweep(directory: Path) -> None:
    """Remove what killed writers left below `directory`. Only for who knows that no one else writes there."""
    for path in [path for path in directory.rglob(".*") if _TEMPORARY.search(path.name)]:
        shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)


def _named(error: BaseException, path: Path) -> BaseException:
    """A failure of the file system that says which file it was."""
    return OSError(error.errno, error.strerror, str(path)) if isinstance(error, OSError) else error


_TEMPORARY = re.compile(r"\.\d+-[0-9a-f]{8}$")


def _temporary(path: Path) -> Path:
    """A name beside `path` that nothing else has, and that `sweep` knows."""
    return path.with_name(f".{path.name}.{os.getpid()}-{secrets.token_hex(4)}")


def _line(row: Any) -> str:
    return json.dumps(row, ensure_ascii=False, allow_nan=False)
