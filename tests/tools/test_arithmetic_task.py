"""The demo's task against an oracle that reads the text: exact integers, reduced once at the end."""

import json
import re
from itertools import islice

import arithmetic_task as task
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

QUIET = task.Style(slips=0, direct=0, merged=0, depth_weights=(1,) * 6)
SHALLOW = (1, 0, 0, 0, 0, 0)
SEEDS = st.integers(0, 2**32 - 1)


def exact_totals(question: str) -> list[int]:
    """Every running total of a question, from its text."""
    start, operations = re.fullmatch(r"(\d\d)((?:[-+*]\d){1,6})=", question).groups()
    value, totals = int(start), []
    for symbol, digit in re.findall(r"([-+*])(\d)", operations):
        value = {"+": value.__add__, "-": value.__sub__, "*": value.__mul__}[symbol](int(digit))
        totals.append(value % 100)
    return totals


def steps_of(demonstration: str) -> list[tuple[str, int]]:
    """[(operations copied, total named)] of a demonstration."""
    assert re.fullmatch(r"(?:(?:[-+*]\d)*:\d\d?)+\$", demonstration)
    return [(operations, int(total)) for operations, total in re.findall(r"((?:[-+*]\d)*):(\d+)", demonstration)]


def demonstrations(style: task.Style, count: int) -> list[tuple[task.Expression, str]]:
    return list(islice(task.draw_demonstrations(np.random.default_rng(5), style), count))


def test_the_documented_example() -> None:
    expression = task.Expression(23, (task.Operation("+", 8), task.Operation("*", 3)))
    assert expression.question == "23+8*3="
    assert task.demonstrate(np.random.default_rng(0), expression, QUIET) == "+8:31*3:93$"
    assert task.question_row(expression) == {
        "question": "23+8*3=",
        "answer": "93",
        "kind": "exact",
        "metadata": {"answer_after": ":", "answer_end": "$"},
    }
    json.dumps(task.question_row(expression))


def test_totals_stay_in_0_to_99() -> None:
    assert task.Operation("-", 9).apply(3) == 94
    assert task.Operation("*", 4).apply(99) == 96
    assert task.Operation("+", 1).apply(99) == 0


@given(SEEDS, st.integers(1, 6), st.booleans())
def test_answer_and_quiet_demonstration_agree_with_the_oracle(seed: int, depth: int, is_hard: bool) -> None:
    rng = np.random.default_rng(seed)
    expression = task.draw_expression(rng, depth, is_hard=is_hard)
    totals = exact_totals(expression.question)
    assert expression.answer == totals[-1]
    copied = re.findall(r"[-+*]\d", expression.question)
    demonstration = task.demonstrate(rng, expression, QUIET)
    assert steps_of(demonstration) == list(zip(copied, totals, strict=True))
    assert len(expression.question) <= task.MAX_PROMPT_CHARS
    assert len(demonstration) <= task.MAX_COMPLETION_CHARS
    assert set(expression.question + demonstration) <= set(task.ALPHABET)


@given(SEEDS, st.integers(1, 6))
def test_hard_means_one_factor_that_known_expressions_never_have(seed: int, depth: int) -> None:
    rng = np.random.default_rng(seed)
    hard, known = (task.draw_expression(rng, depth, is_hard=is_hard) for is_hard in (True, False))
    assert len(re.findall(r"\*[6-9]", hard.question)) == 1
    assert hard.is_hard
    assert not known.is_hard
    assert re.fullmatch(r"[1-9]\d(?:[+-][1-9]|\*[234])+=", known.question)


def test_share_of_direct_answers() -> None:
    style = task.Style(slips=0, direct=0.25, merged=0, depth_weights=(0, 1, 0, 0, 0, 0))
    shares = [demonstration == f":{expression.answer}$" for expression, demonstration in demonstrations(style, 4000)]
    assert np.mean(shares) == pytest.approx(0.25, abs=0.03)


def test_share_of_merged_operations_and_their_totals() -> None:
    style = task.Style(slips=0, direct=0, merged=0.35, depth_weights=(0, 0, 0, 1, 0, 0))
    skipped = 0
    for expression, demonstration in demonstrations(style, 2000):
        steps = steps_of(demonstration)
        assert "".join(operations for operations, _ in steps) == expression.question[2:-1]
        place = np.cumsum([len(operations) // 2 for operations, _ in steps])
        assert [total for _, total in steps] == [exact_totals(expression.question)[i - 1] for i in place]
        skipped += expression.depth - len(steps)
    assert skipped / (3 * 2000) == pytest.approx(0.35, abs=0.03)


def test_share_of_slips_and_that_the_wrong_total_is_carried_on() -> None:
    style = task.Style(slips=0.06, direct=0, merged=0, depth_weights=(0, 0, 0, 1, 0, 0))
    slips = 0
    for expression, demonstration in demonstrations(style, 2000):
        value = expression.start
        for operation, (_, total) in zip(expression.operations, steps_of(demonstration), strict=True):
            slips += total != operation.apply(value)
            value = total
    assert slips / (4 * 2000) == pytest.approx(0.06, abs=0.012)


def test_depths_follow_the_weights() -> None:
    depths = [expression.depth for expression, _ in demonstrations(task.CAREFUL, 4000)]
    assert np.bincount(depths, minlength=7)[1:] / 4000 == pytest.approx(np.array([2, 2, 1, 1, 1, 1]) / 8, abs=0.03)


@pytest.mark.parametrize(("mix", "least_depth"), [(task.HARD_WHEN_DEEP, 3), (task.HARD_ANYWHERE, 1)])
def test_queries_differ_and_follow_the_mix(mix: task.QueryMix, least_depth: int) -> None:
    queries = task.draw_queries(np.random.default_rng(1), mix, 3000)
    assert len(set(queries)) == 3000
    hard = [query for query in queries if query.is_hard]
    assert len(hard) / 3000 == pytest.approx(mix.hard_frac, abs=0.04)
    assert min(query.depth for query in hard) == least_depth
    depths = np.bincount([query.depth for query in queries if not query.is_hard], minlength=7)[1:]
    assert depths / depths.sum() == pytest.approx(mix.depth_weights, abs=0.04)


def test_a_depth_that_is_nearly_used_up_keeps_its_share() -> None:
    """Depth 1 has 1,890 known expressions."""
    weights = (0.5, 0.5, 0, 0, 0, 0)
    mix = task.QueryMix(hard_frac=0, hard_depth_weights=weights, depth_weights=weights)
    queries = task.draw_queries(np.random.default_rng(4), mix, 3000)
    assert np.mean([query.depth == 1 for query in queries]) == pytest.approx(0.5, abs=0.04)


def test_more_than_there_are_is_refused() -> None:
    mix = task.QueryMix(hard_frac=0, hard_depth_weights=SHALLOW, depth_weights=SHALLOW)
    with pytest.raises(ValueError, match="depth 1 found; 1891 are too many"):
        task.draw_queries(np.random.default_rng(4), mix, 1891)


def test_nothing_excluded_is_drawn() -> None:
    """Without exclusion, both draws would meet some of the thousand again."""
    mix = task.QueryMix(hard_frac=0, hard_depth_weights=SHALLOW, depth_weights=SHALLOW)
    style = task.Style(slips=0, direct=0, merged=0, depth_weights=SHALLOW)
    rng = np.random.default_rng(2)
    held_out = set(task.draw_queries(rng, mix, 1000))
    assert held_out.isdisjoint(task.draw_queries(rng, mix, 600, exclude=held_out))
    shown = islice(task.draw_demonstrations(rng, style, exclude=held_out), 600)
    assert held_out.isdisjoint(expression for expression, _ in shown)


def test_a_seed_decides_everything() -> None:
    def draw(seed: int) -> tuple[list[task.Expression], list[tuple[task.Expression, str]]]:
        rng = np.random.default_rng(seed)
        return (
            task.draw_queries(rng, task.HARD_WHEN_DEEP, 20),
            list(islice(task.draw_demonstrations(rng, task.SLOPPY), 20)),
        )

    assert draw(3) == draw(3)
    assert draw(3) != draw(4)


@pytest.mark.parametrize(
    ("completion", "is_solved"),
    [("+8:31*3:93$", True), (":93$", True), ("+8:31*3:93", False), ("+8:31*3:92$", False), ("93$", False), ("", False)],
)
def test_what_counts_as_solved(completion: str, is_solved: bool) -> None:
    expression = task.Expression(23, (task.Operation("+", 8), task.Operation("*", 3)))
    assert task.is_solved(expression, completion) is is_solved
