import os
from pathlib import Path

import pytest

from sgpo_jax.files import (
    append_jsonl,
    digest_files,
    new_directory,
    read_json,
    read_jsonl,
    write_json,
    write_jsonl,
    write_text,
)
from sgpo_jax.types import UserError


def test_a_write_that_fails_leaves_the_old_file_and_no_other(tmp_path, monkeypatch):
    path = tmp_path / "a.json"
    write_json(path, {"x": 1})

    def full(descriptor):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space"):
        write_json(path, {"x": 2})
    assert read_json(path) == {"x": 1}
    assert os.listdir(tmp_path) == ["a.json"]


def test_rows_with_any_text_come_back(tmp_path):
    rows = [{"text": "line\u2028separator \x85 and\nnewline é \U0001f600"}, {"text": ""}]
    write_jsonl(tmp_path / "a.jsonl", rows)
    append_jsonl(tmp_path / "a.jsonl", {"n": 3})
    assert read_jsonl(tmp_path / "a.jsonl") == [*rows, {"n": 3}]


def test_only_a_torn_last_line_is_forgiven(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text('{"a": 1}\n{"a": 2')
    assert read_jsonl(path, torn_tail=True) == [{"a": 1}]
    with pytest.raises(UserError, match=r"a\.jsonl:2: not JSON"):
        read_jsonl(path)
    path.write_text('{"a": 1\n{"a": 2}\n')
    with pytest.raises(UserError, match=r"a\.jsonl:1: not JSON"):
        read_jsonl(path, torn_tail=True)
    path.write_text("")
    assert read_jsonl(path) == []


def test_missing_and_broken_json_are_named(tmp_path):
    with pytest.raises(UserError, match=r"a\.json: no such file"):
        read_json(tmp_path / "a.json")
    write_text(tmp_path / "a.json", "{")
    with pytest.raises(UserError, match=r"a\.json: cannot be read as JSON"):
        read_json(tmp_path / "a.json")


def test_nan_is_never_written(tmp_path):
    with pytest.raises(ValueError, match="not JSON compliant"):
        write_json(tmp_path / "a.json", {"x": float("nan")})
    assert os.listdir(tmp_path) == []


def test_directory_appears_whole_or_not_at_all(tmp_path):
    out = tmp_path / "out"

    def fail():
        with new_directory(out) as directory:
            (directory / "half").write_text("x")
            raise RuntimeError

    with pytest.raises(RuntimeError):
        fail()
    assert os.listdir(tmp_path) == []
    with new_directory(out) as directory:
        (directory / "whole").write_text("x")
        assert not out.exists()
    assert (out / "whole").read_text() == "x"
    with pytest.raises(UserError, match="exists already"), new_directory(out):
        pass
    with new_directory(out, overwrite=True) as directory:
        (directory / "new").write_text("y")
    assert os.listdir(out) == ["new"]


def test_others_may_read_what_the_umask_lets_them(tmp_path):
    old = os.umask(0o022)
    try:
        write_text(tmp_path / "a", "x")
        with new_directory(tmp_path / "out") as directory:
            (directory / "b").touch(mode=0o600)
    finally:
        os.umask(old)
    modes = [(tmp_path / name).stat().st_mode & 0o777 for name in ("a", "out", "out/b")]
    assert modes == [0o644, 0o755, 0o644]


def test_digest_depends_on_names_and_contents(tmp_path):
    def digest(**files: str) -> str:
        paths = []
        for name, text in files.items():
            path = Path(tmp_path / name)
            path.write_text(text)
            paths.append(path)
        return digest_files(paths)

    assert digest(a="1", b="2") == digest(a="1", b="2")
    assert len({digest(a="1", b="2"), digest(a="1", b="3"), digest(a="1", c="2"), digest(a="12", b="")}) == 4
