import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sgpo_jax.rewards import latex, math_answers
from sgpo_jax.rewards.answers import Group, Leaf, Listing, parse
from sgpo_jax.rewards.math_answers import judge, same_answer
from sgpo_jax.types import Verdict

CASES = [json.loads(line) for line in Path(__file__).with_name("math_cases.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case['gold']}~{case['answer']}")
def test_known_traps(case: dict):
    """Answers of the kinds that verifiers misjudge: gold, answer, whether they mean the same."""
    assert same_answer(case["gold"], case["answer"]) is case["same"]


@pytest.mark.parametrize("case", [case for case in CASES if case["same"]][::3], ids=lambda case: case["gold"])
def test_every_answer_equals_itself(case: dict):
    assert same_answer(case["gold"], case["gold"])
    assert same_answer(case["answer"], case["answer"])


@given(st.integers(-(10**12), 10**12), st.integers(-(10**12), 10**12))
def test_integers_are_equal_when_they_are(a: int, b: int):
    assert same_answer(str(a), f"{a:,}")
    assert same_answer(f"{a:,}".replace(",", "{,}"), str(a))
    assert same_answer(str(a), str(b)) is (a == b)


@given(st.fractions(max_denominator=1000), st.fractions(max_denominator=1000))
def test_fractions_are_equal_when_they_are(a, b):
    written = rf"\dfrac{{{b.numerator}}}{{{b.denominator}}}"
    assert same_answer(f"{a.numerator}/{a.denominator}", written) is (a == b)


@given(st.decimals(-1000, 1000, places=8), st.integers(0, 3))
def test_near_equal_decimals_differ(number, num_zeros: int):
    assert same_answer(f"{number:f}", f"{number:f}" + "0" * num_zeros)
    assert not same_answer(f"{number:f}", f"{number:f}" + "0" * num_zeros + "1")


@given(st.lists(st.integers(0, 999), min_size=2, max_size=4))
def test_tuples_are_ordered_and_never_fused(items: list[int]):
    written = f"({','.join(map(str, items))})"
    assert same_answer(written, f"({', '.join(map(str, items))})")
    assert same_answer(written, f"({','.join(map(str, items[::-1]))})") is (items == items[::-1])
    assert not same_answer(written, "".join(map(str, items)))
    assert not same_answer("".join(map(str, items)), written)


@given(st.lists(st.integers(0, 99), min_size=2, max_size=4), st.randoms())
def test_sets_have_no_order(items: list[int], random):
    shuffled = random.sample(items, len(items))
    gold = rf"\{{{','.join(map(str, items))}\}}"
    assert same_answer(gold, rf"\left\{{{', '.join(map(str, shuffled))}\right\}}")
    assert not same_answer(gold, rf"\{{{','.join(map(str, [*items, 100]))}\}}")


def test_the_last_box_counts_and_an_unclosed_one_is_no_answer():
    twice = r"First \boxed{3}, then, correcting myself, \boxed{5}"
    assert judge("5", twice, {}).verdict is Verdict.CORRECT
    assert judge("3", twice, {}).verdict is Verdict.WRONG
    for text in (r"so it is \boxed{3", r"\boxed{3} or rather \boxed{", "", r"\boxed{}", "\\boxed{" * 5000):
        judgement = judge("3", text, {})
        assert judgement.verdict is Verdict.WRONG
        assert judgement.extracted is None


@pytest.mark.parametrize(
    ("gold", "text"),
    [
        ("42", "The answer is 42."),
        ("42", "work: 6*7 = 42\nA: 42"),
        ("42", "#### 42"),
        (r"\frac12", r"The answer is $\frac12$ of them."),
        ("B", "The answer is (B)."),
        ("1,2", "The answers are $1$ and $2$."),
    ],
)
def test_stated_answers_count_where_they_are_allowed(gold: str, text: str):
    assert judge(gold, text, {}).verdict is Verdict.WRONG
    assert judge(gold, text, {}, accept_stated=True).verdict is Verdict.CORRECT
    assert judge("41", text, {}, accept_stated=True).verdict is Verdict.WRONG


def test_control_characters_do_not_hide_a_box():
    assert judge("42", "\x00\ud7ff ‮\\boxed{4\u200b2}", {}).verdict is Verdict.CORRECT


def test_answers_beyond_the_length_bound_are_right_only_if_identical():
    long = "1+" * math_answers.MAX_ANSWER_CHARS + "1"
    assert same_answer(long, long)
    assert not same_answer(str(math_answers.MAX_ANSWER_CHARS + 1), long)
    assert not same_answer("5", "(" * 100_000 + "5" + ")" * 100_000)


def test_numbers_beyond_all_bounds_cannot_be_told_apart():
    with pytest.raises(Exception, match=r"2\^"):
        same_answer("9^{9^{9^{9}}}", "9^{9^{9^{8}}}")


def test_a_missing_rule_is_noticed(monkeypatch: pytest.MonkeyPatch):
    """The traps depend on the rules: without one of them, or with math-verify alone, some fail."""

    def num_right() -> int:
        return sum(same_answer(case["gold"], case["answer"]) is case["same"] for case in CASES[:120])

    assert num_right() == 120
    monkeypatch.setattr(latex, "_RULES", [])
    assert num_right() < 100


def test_structure_is_read_from_the_brackets():
    one, two = Leaf("1"), Leaf("2")
    assert parse("(1,2)") == Group("(", (one, two), ")")
    assert parse("[1,2)") == Group("[", (one, two), ")")
    assert parse("1,2") == Listing((one, two))
    assert parse("1,234") == Leaf("1234")
    assert parse("1,234", join_thousands=False) == Listing((one, Leaf("234")))
    assert parse("(1,234)") == Group("(", (one, Leaf("234")), ")")


@settings(deadline=None, max_examples=150)
@given(
    st.text(st.characters(), max_size=60)
    | st.lists(
        st.sampled_from(["{", "}", "(", ")", "[", "]", "\\{", "\\}", ",", "1", "x", "\\pm", "=", "<", "\\frac"])
    ).map("".join)
)
def test_no_answer_raises(text: str):
    assert isinstance(same_answer("(1,2)", text), bool)
    assert isinstance(same_answer(text, "x<5"), bool)
