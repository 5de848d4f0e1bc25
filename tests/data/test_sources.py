import json
import sys
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest

from sgpo_jax.config import SourceConfig
from sgpo_jax.data.sources import LocatedRow, read_rows
from sgpo_jax.types import MachineError, UserError

ROWS = [{"question": "1 + 1?", "answer": "2"}, {"question": "2 + 2?", "answer": "4"}]


def read(path: str | Path, **knobs: object) -> list[LocatedRow]:
    return list(read_rows(SourceConfig(path=str(path), **knobs)))


def values(path: str | Path, **knobs: object) -> list[dict[str, object]]:
    return [dict(row.values) for row in read(path, **knobs)]


def write_lines(path: Path, rows: list[dict[str, object]]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def write_parquet(path: Path, rows: list[dict[str, object]]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    return path


def test_json_lines_are_located_by_line_and_blank_lines_skipped(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b"\xef\xbb\xbf" + json.dumps(ROWS[0]).encode() + b"\n\n" + json.dumps(ROWS[1]).encode())
    assert read(path) == [LocatedRow(f"{path}:1", ROWS[0]), LocatedRow(f"{path}:3", ROWS[1])]


def test_json_array(tmp_path: Path) -> None:
    path = tmp_path / "rows.json"
    path.write_text("\n " + json.dumps(ROWS))
    assert values(path) == ROWS
    write_lines(path, ROWS)
    assert values(path) == ROWS


def test_csv_with_quotes_and_line_breaks(tmp_path: Path) -> None:
    path = tmp_path / "rows.csv"
    path.write_text('question,answer\n"one, or\ntwo ""2""?",2\n2 + 2?,4\n', encoding="utf-8-sig")
    assert values(path) == [{"question": 'one, or\ntwo "2"?', "answer": "2"}, ROWS[1]]
    assert read(path)[1].where == f"{path}:4"


def test_parquet_nested(tmp_path: Path) -> None:
    row = {"prompt": [{"content": "1 + 1?", "role": "user"}], "reward_model": {"ground_truth": "2"}}
    assert values(write_parquet(tmp_path / "rows.parquet", [row])) == [row]


def test_function(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my_rows_module.py").write_text(
        f"def rows():\n    yield from {ROWS!r}\n\ndef broken():\n    return 1 / 0\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    assert values("my_rows_module:rows") == ROWS
    with pytest.raises(UserError, match=r"my_rows_module:broken: .*ZeroDivisionError"):
        read("my_rows_module:broken")
    with pytest.raises(UserError, match=r"my_rows_module:absent: .*AttributeError"):
        read("my_rows_module:absent")
    with pytest.raises(UserError, match=r"no_such_module:rows: .*ModuleNotFoundError"):
        read("no_such_module:rows")


# A local copy in the hub's layout.


def test_directory_by_file_names(tmp_path: Path) -> None:
    write_parquet(tmp_path / "data/train-00000-of-00002.parquet", ROWS[:1])
    write_parquet(tmp_path / "data/train-00001-of-00002.parquet", ROWS[1:])
    write_parquet(tmp_path / "data/test-00000-of-00001.parquet", ROWS[1:])
    assert values(tmp_path) == ROWS
    assert values(tmp_path, split="test") == ROWS[1:]
    with pytest.raises(UserError, match=r"no split 'validation'; its splits are train, test"):
        read(tmp_path, split="validation")


def test_directory_by_its_card_with_two_configurations(tmp_path: Path) -> None:
    write_parquet(tmp_path / "main/train-00000-of-00001.parquet", ROWS[:1])
    write_lines(tmp_path / "other/train.jsonl", ROWS[1:])
    card = "---\nconfigs:\n"
    for name, pattern in (("main", "main/train-*"), ("other", "other/train.jsonl")):
        card += f"- config_name: {name}\n  data_files:\n  - split: train\n    path: {pattern}\n"
    (tmp_path / "README.md").write_text(card + "---\n")
    assert values(f"{tmp_path}:main") == ROWS[:1]
    assert values(f"{tmp_path}:other") == ROWS[1:]
    with pytest.raises(UserError, match=r"Config name is missing"):
        read(tmp_path)
    with pytest.raises(UserError, match=r"'absent' not found"):
        read(f"{tmp_path}:absent")


def test_directory_of_files_with_differing_columns(tmp_path: Path) -> None:
    """SciKnowEval's layout; reading it as one Arrow table fails, since an empty list has no type."""
    first = write_lines(tmp_path / "Biology/a.jsonl", [{"question": "q", "choices": {"text": [], "label": []}}])
    second = write_lines(
        tmp_path / "Chemistry/b.jsonl", [{"question": "r", "choices": {"text": ["x"], "label": ["A"]}}]
    )
    assert [row.where for row in read(tmp_path)] == [f"{first}:1", f"{second}:1"]


def test_broken_line_in_a_directory_is_named(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "train.jsonl", ROWS)
    path.write_text(path.read_text() + "{nope\n")
    with pytest.raises(UserError, match=rf"{path}:3: not JSON"):
        read(tmp_path)


# What is wrong is named.


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.jsonl", b'{"question": "q"}\n{"question": \n', r"a\.jsonl:2: not JSON"),
        ("a.jsonl", b'{"question": "q"}\n["q"]\n', r"a\.jsonl:2: a row is an object .* found list"),
        ("a.jsonl", b'{"question": "\xff"}\n', r"a\.jsonl:1: not JSON"),
        ("a.jsonl", b"[" * 100_000, r"a\.jsonl:1: not JSON"),
        ("a.jsonl", b"1" * 5000, r"a\.jsonl:1: not JSON"),
        ("a.jsonl", b"\n \n", r"a\.jsonl: has no rows"),
        ("a.json", b'[{"question": "q"}, 3]', r"a\.json row 2: a row is an object .* found int"),
        ("a.json", b'[{"question": "q"}', r"a\.json: not JSON"),
        ("a.csv", b"", r"a\.csv: has no rows"),
        ("a.csv", b"question,answer\nq,1\nr\n", r"a\.csv:3: more or fewer fields"),
        ("a.csv", b"question,answer\nq,1,2\n", r"a\.csv:2: more or fewer fields"),
        ("a.csv", b'question,answer\n"q,1\n', r"a\.csv:1: not CSV"),
        ("a.csv", b"question,answer\n\xff,1\n", r"a\.csv:1: not CSV"),
        ("a.parquet", b"question,answer\n", r"a\.parquet: not parquet after row 0"),
        ("a.txt", b"question,answer\n", r"a\.txt: unknown ending '\.txt'; known are \.jsonl, \.json, \.parquet, \.csv"),
    ],
)
def test_broken_files(tmp_path: Path, name: str, content: bytes, message: str) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(UserError, match=message) as caught:
        read(tmp_path / name)
    assert "\n" not in str(caught.value)


def test_missing_things(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match=r"absent\.jsonl: no such file"):
        read("some/absent.jsonl")
    with pytest.raises(UserError, match=r"empty: is not laid out as a data set"):
        read("empty")
    with pytest.raises(UserError, match=r"nonsense: no such file or directory, nor .* aime_2024"):
        read("nonsense")
    with pytest.raises(MachineError, match=r"nobody/nothing: .*name a local copy"):
        read("nobody/nothing:main")


def test_paths_are_relative_to_the_working_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_lines(tmp_path / "sub/rows.jsonl", ROWS)
    monkeypatch.chdir(tmp_path)
    assert [row.where for row in read("sub/rows.jsonl")] == ["sub/rows.jsonl:1", "sub/rows.jsonl:2"]


# reasoning-gym.


def test_reasoning_gym_without_its_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "reasoning_gym", None)
    with pytest.raises(UserError, match=r"reasoning_gym:leg_counting: .*pip install reasoning-gym"):
        read("reasoning_gym:leg_counting")


def test_reasoning_gym_entries_depend_on_task_and_split() -> None:
    pytest.importorskip("reasoning_gym")
    train = values("reasoning_gym:leg_counting", max_queries=5)
    assert train == values("reasoning_gym:leg_counting", max_queries=5)
    assert train[:3] == values("reasoning_gym:leg_counting", max_queries=3)
    test = values("reasoning_gym:leg_counting", max_queries=5, split="test")
    assert not {row["question"] for row in train} & {row["question"] for row in test}
    with pytest.raises(UserError, match=r"reasoning_gym:no_such_task"):
        read("reasoning_gym:no_such_task")
