import pytest
from hypothesis import given
from hypothesis import strategies as st

from sgpo_jax.rewards.choice import judge, same_letter
from sgpo_jax.types import Verdict

CITIES = ["London", "Paris", "Rome", "Bonn"]


@pytest.mark.parametrize(
    "text",
    [
        "B", "b", "(B)", "[B]", "B.", "B)", "B:", "**B**", "B. Paris", "B) Paris", "(B) Paris", "B: Paris", "B - Paris",
        "`B`", "$B$", r"\boxed{B}", r"\boxed{\text{B}}", r"\boxed{\textbf{(B)}}", r"\boxed{(B)\ \text{Paris}}",
        r"$\boxed{\mathrm{B}}$", r"\fbox{B}", "The answer is B.", "The answer is (B).", "the answer is: **B**",
        "Answer: B",
        "**Answer: (B)**", "Final answer: B", "The correct answer is option B.", "Option B is correct.",
        "The correct option is B", "I choose B.", "So (B) is the right one.", "Therefore, B is correct.",
        "<answer>B</answer>",
        "A is wrong, so the answer is B", "Let me think. A fails.\nB", "long text\n(B)",
        "Paris", "The answer is Paris.",
        r"\boxed{Paris}", "（B）", "Ｂ", "The answer is B because A is not the capital.", "B is the correct answer",
        r"\boxed{A} no wait, \boxed{B}", "B\n\nExplanation: it is the capital.", "Answer:\nB", "answer = B",
    ],
)  # fmt: skip
def test_ways_to_choose(text: str):
    assert judge("B", text, {"choices": CITIES}).verdict is Verdict.CORRECT
    assert judge("C", text, {"choices": CITIES}).verdict is Verdict.WRONG


@pytest.mark.parametrize(
    "text", ["", "I do not know.", r"\boxed{}", r"\boxed{B", "A good question indeed, " * 10, "Berlin"]
)
def test_no_choice_is_wrong(text: str):
    assert judge("B", text, {"choices": CITIES}).verdict is Verdict.WRONG


@pytest.mark.parametrize("gold", ["B", "(B)", "B.", r"\text{B}", "Paris"])
def test_ways_to_write_gold(gold: str):
    assert judge(gold, "The answer is B", {"choices": CITIES}).verdict is Verdict.CORRECT


def test_words_are_options_too():
    for text in ("True", "true.", "The answer is True.", r"\boxed{\text{True}}"):
        assert judge("True", text, {}).verdict is Verdict.CORRECT
        assert judge("False", text, {}).verdict is Verdict.WRONG


def test_the_text_of_two_options_chooses_neither():
    assert judge("A", "Rome", {"choices": ["Rome", "Rome"]}).verdict is Verdict.WRONG


def test_a_bare_letter_is_a_letter_even_where_it_is_an_option():
    assert judge("C", r"\boxed{C}", {"choices": ["C", "CC", "CCC"]}).verdict is Verdict.CORRECT
    assert judge("A", r"\boxed{C}", {"choices": ["C", "CC", "CCC"]}).verdict is Verdict.WRONG
    assert judge("B", r"\boxed{CC}", {"choices": ["C", "CC", "CCC"]}).verdict is Verdict.CORRECT


def test_same_letter_speaks_of_letters_only():
    assert same_letter("B", r"\text{(B)}") is True
    assert same_letter("B", "D") is False
    assert same_letter("x", "x") is None
    assert same_letter("12", "B") is None


@given(st.text(st.characters()))
def test_no_text_raises(text: str):
    assert judge("B", text, {"choices": CITIES}).verdict in (Verdict.CORRECT, Verdict.WRONG)
