import json
from pathlib import Path

import datasets
import pytest

from sgpo_jax.config import SourceConfig
from sgpo_jax.data.evaluation_sets import EVALUATION_SETS, SciKnowEvalPart, find
from sgpo_jax.data.sources import LocatedRow, read_rows
from sgpo_jax.types import UserError


def sciknoweval_row(number: int, domain: str = "Physics", level: str = "L3", order: int = 1) -> dict[str, object]:
    choices = {"text": ["x", "y"][::order], "label": ["A", "B"]}
    return {
        "question": f"question {number}",
        "type": "mcq-2-choices",
        "choices": choices,
        "answerKey": "A",
        "domain": domain,
        "details": {"level": level},
    }


def read(path: str, **knobs: str) -> list[LocatedRow]:
    return list(read_rows(SourceConfig(path=path, **knobs)))


def test_the_papers_sets_are_there_with_their_licences() -> None:
    names = {"aime_2024", "aime_2025", "aime_2026", "hmmt_feb_2025", "hmmt_feb_2026"}
    names |= {f"sciknoweval_l3_{domain}_test" for domain in ("biology", "chemistry", "material", "physics")}
    assert names <= EVALUATION_SETS.keys()
    assert all(found.licence and found.row_format and "/" in found.hub_name for found in EVALUATION_SETS.values())


def test_find() -> None:
    located = find("aime_2024")
    assert located is not None
    assert located.local_path is None
    located = find("math_500@some/dir@2")
    assert located is not None
    assert located.local_path == "some/dir@2"
    assert find("aime_1924") is None
    assert find("some/aime_2024") is None


# The split.


def test_split_is_90_to_10_disjoint_complete_and_independent_of_order() -> None:
    rows = [sciknoweval_row(number) for number in range(200)]
    train = SciKnowEvalPart("Physics", "train").select(rows)
    test = SciKnowEvalPart("Physics", "test").select(rows)
    assert len(test) == 20
    assert sorted(train + test) == list(range(200))
    backwards = SciKnowEvalPart("Physics", "test").select(rows[::-1])
    assert sorted(199 - index for index in backwards) == test
    assert test[:3] == [3, 13, 23]  # held out for good: published scores refer to it


def test_copies_of_a_question_are_on_one_side() -> None:
    rows = [sciknoweval_row(number, order=order) for number in range(50) for order in (1, -1)]
    test = SciKnowEvalPart("Physics", "test").select(rows)
    assert len(test) == 10
    assert all((index ^ 1) in test for index in test)  # rows 2 n and 2 n + 1 are copies


def test_other_domains_and_levels_are_left_out() -> None:
    rows = [
        sciknoweval_row(0),
        sciknoweval_row(1, domain="Biology"),
        sciknoweval_row(2, level="L2"),
        {"domain": "Physics"},
    ]
    assert SciKnowEvalPart("Physics", "train").select(rows) == [0]


# From the hub, from a copy of its repository, from plain files.


def test_hub_name_configuration_and_split_are_the_tables(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def load_dataset(*names: object, **knobs: object) -> list[dict[str, str]]:
        asked.append((names, knobs))
        return [{"question": "q", "answer": "#### 1"}]

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    assert read("gsm8k") == [LocatedRow("openai/gsm8k [test] row 1", {"question": "q", "answer": "#### 1"})]
    assert asked == [(("openai/gsm8k", "main"), {"split": "test"})]


def test_what_exists_on_the_disk_is_used_as_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "aime_2024").mkdir()
    (tmp_path / "aime_2024/train.jsonl").write_text('{"problem": "p", "answer": 1}\n')
    assert [row.values for row in read("aime_2024")] == [{"problem": "p", "answer": 1}]


def test_copy_of_the_hubs_repository(tmp_path: Path) -> None:
    rows = [sciknoweval_row(number) for number in range(20)]
    (tmp_path / "data/v2").mkdir(parents=True)
    (tmp_path / "data/v2/all.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "README.md").write_text(
        "---\nconfigs:\n- config_name: v2\n  data_files:\n  - split: test\n    path: data/v2/all.jsonl\n---\n"
    )
    assert len(read(f"sciknoweval_l3_physics_test@{tmp_path}")) == 2
    assert len(read(f"sciknoweval_l3_physics_train@{tmp_path}")) == 18


def test_directory_of_plain_files_and_one_file(tmp_path: Path) -> None:
    for domain in ("Physics", "Biology"):
        (tmp_path / domain).mkdir()
        rows = [sciknoweval_row(number, domain) for number in range(20)]
        (tmp_path / domain / "some_task.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    held_out = read(f"sciknoweval_l3_physics_test@{tmp_path}")
    assert len(held_out) == 2
    assert held_out == read(f"sciknoweval_l3_physics_test@{tmp_path}/Physics/some_task.jsonl")


def test_wrong_use_is_named(tmp_path: Path) -> None:
    with pytest.raises(
        UserError, match=r"math_500: a named set brings its own split \(test\); leave split=validation out"
    ):
        read("math_500", split="validation")
    with pytest.raises(UserError, match=r"absent: no such file|absent: unknown ending"):
        read(f"math_500@{tmp_path}/absent")
