import json
from pathlib import Path

import pytest

from sgpo_jax.config import RewardsConfig
from sgpo_jax.rewards import verify_file
from sgpo_jax.types import UserError

CONFIG = RewardsConfig(time_limit_s=30, num_workers=1)
ROWS = [
    {"gold": "5", "completion": r"\boxed{5}", "expected": True, "why": "kept"},
    {"gold": "5", "completion": r"\boxed{6}", "expected": True},
    {"gold": "5", "completion": r"\boxed{7}"},
    {"gold": r"9^{9^{9^{9}}}", "completion": r"\boxed{9^{9^{9^{8}}}}", "expected": False},
]


def write(path: Path, rows: list) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_verdicts_and_summary(tmp_path: Path):
    out = tmp_path / "out.jsonl"
    summary = verify_file(write(tmp_path / "in.jsonl", ROWS), "math", out, CONFIG)
    written = [json.loads(line) for line in out.read_text().splitlines()]
    assert written == [
        {**row, "verdict": verdict} for row, verdict in zip(ROWS, ["correct", "wrong", "wrong", "error"], strict=True)
    ]
    assert (summary.num_rows, summary.num_correct, summary.num_wrong, summary.num_errors) == (4, 1, 2, 1)
    assert (summary.num_expected, summary.agreement) == (3, pytest.approx(2 / 3))
    assert [(found.line, found.expected) for found in summary.disagreements] == [(2, True)]
    assert summary.lines() == [
        "4 rows: 1 correct, 2 wrong, 1 errors",
        "agreement with `expected`: 2 of 3 (66.67%)",
        "line 2: expected correct, judged wrong: gold '5', answer '6'",
    ]


def test_rows_that_expect_nothing_have_no_agreement(tmp_path: Path):
    summary = verify_file(write(tmp_path / "in.jsonl", ROWS[2:3]), "exact", None, CONFIG)
    assert summary.agreement is None
    assert summary.lines() == ["1 rows: 0 correct, 1 wrong, 0 errors"]


def test_metadata_reaches_the_verifier(tmp_path: Path):
    rows = [{"gold": "B", "completion": "Paris", "metadata": {"choices": ["Rome", "Paris"]}}]
    assert verify_file(write(tmp_path / "in.jsonl", rows), "choice", None, CONFIG).num_correct == 1


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", r":2: not JSON"),
        ("[]", r":2: not an object"),
        ('{"completion": "5"}', r":2: gold="),
        ('{"gold": 5, "completion": "5"}', r":2: gold='5'"),
        ('{"gold": "5"}', r":2: completion="),
        ('{"gold": "5", "completion": "5", "expected": "yes"}', r":2: expected='yes'"),
        ('{"gold": "5", "completion": "5", "metadata": 3}', r":2: metadata="),
    ],
)
def test_broken_lines_are_named(tmp_path: Path, line: str, message: str):
    path = tmp_path / "in.jsonl"
    path.write_text(json.dumps(ROWS[0]) + "\n" + line + "\n")
    with pytest.raises(UserError, match=message):
        verify_file(path, "math", tmp_path / "out.jsonl", CONFIG)
    assert not (tmp_path / "out.jsonl").exists()


def test_missing_file_and_unknown_kind(tmp_path: Path):
    with pytest.raises(UserError, match="no such file"):
        verify_file(tmp_path / "none.jsonl", "math", None, CONFIG)
    with pytest.raises(UserError, match="did you mean math"):
        verify_file(write(tmp_path / "in.jsonl", ROWS), "meth", None, CONFIG)
