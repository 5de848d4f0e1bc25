import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sgpo_jax.rewards.extract import (
    final_answer,
    first_math,
    has_think_block,
    last_boxed,
    stated_answer,
)

ANY_TEXT = st.text(st.characters())  # surrogates and NUL included
PIECES = st.sampled_from(
    [
        "\\boxed",
        "\\fbox",
        "{",
        "}",
        "\\{",
        "\\}",
        "\\\\",
        "\\(",
        "\\)",
        " ",
        "5",
        "$",
        "\n",
        ".",
        "**",
        "\x00",
        "\ud800",
    ]
) | st.sampled_from(["answer", " is ", ":", "A:", "####", "<answer>", "</answer>", "final ", "<think>", "</think>"])


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (r"so \boxed{5}", "5"),
        (r"\boxed{3} no, \boxed{5}", "5"),
        (r"\boxed{\frac{1}{\sqrt{2}}}.", r"\frac{1}{\sqrt{2}}"),
        (r"\boxed{\{1,2\}}", r"\{1,2\}"),
        (r"\boxed{a\}b}", r"a\}b"),
        (r"\fbox{7}", "7"),
        (r"\boxed 5 is it", "5"),
        (r"$\boxed5$", "5"),
        (r"\(\boxed 5\)", "5"),
        (r"\boxed  {5}", "5"),
        (r"\boxed{\boxed{42}}", r"\boxed{42}"),
        (r"\boxed{x = \fbox{3}} ok", r"x = \fbox{3}"),
        (r"{ \boxed{5}", "5"),
        (r"} \boxed{5}", "5"),
        (r"\boxed{}", ""),
        (r"\boxed{3", None),
        (r"\boxed{3} and then \boxed{5", None),
        (r"\boxed{3} and then \boxed", None),
        (r"\boxed{ \boxed{5}", "5"),
        (r"\boxedtext{5}", None),
        ("5", None),
        ("", None),
    ],
)
def test_last_boxed(text: str, expected: str | None):
    assert last_boxed(text) == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("The answer is 42.", "42"),
        ("The answer is 3.5. Done.", "3.5"),
        ("the answers are $2$ and $3$", "$2$ and $3$"),
        ("The answer to the first problem is 7, because 3+4=7.", "7"),
        ("Final Answer: The final answer is $\\frac12$. I hope it is correct.", "$\\frac12$"),
        ("**Final Answer**\n\n$5$", "$5$"),
        ("**Answer:** 5", "5"),
        ("work\nA: 7000", "7000"),
        ("#### 1,234", "1,234"),
        ("The answer is 3. No, the answer is 4.", "4"),
        ("The answer is 4.\nAnswer:", "4"),
        ("<answer> 4 </answer>", "4"),
        ("The answer is 5 <answer>6</answer> <answer>7</answer>", "7"),
        ("A is wrong, so the answer is D", "D"),
        ("I do not know.", None),
        ("", None),
    ],
)
def test_stated_answer(text: str, expected: str | None):
    assert stated_answer(text) == expected


def test_a_box_rules_out_a_stated_answer():
    assert final_answer("The answer is 5.", accept_stated=True) == "5"
    assert final_answer("The answer is 5.", accept_stated=False) is None
    assert final_answer(r"The answer is 5. \boxed{6}", accept_stated=True) == "6"
    assert final_answer(r"The answer is 5. \boxed{6", accept_stated=True) is None


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("<think>hm</think> 5", True),
        ("<think>hm</think>", False),
        ("hm 5", False),
        ("<think></think> 5", False),
        ("5 <think>hm</think> 5", False),
        ("<think>a<think>b</think> 5", False),
        ("<think>a</think> b</think> 5", False),
    ],
)
def test_think_block(text: str, expected: bool):
    assert has_think_block(text) is expected


def test_first_math():
    assert first_math(r"it is $5$ or \(6\)") == "5"
    assert first_math(r"it is \(6\)") == "6"
    assert first_math("it is 6") is None


@given(ANY_TEXT | st.lists(PIECES).map("".join))
def test_no_text_raises(text: str):
    assert isinstance(last_boxed(text), str | None)
    assert isinstance(stated_answer(text), str | None)
    assert isinstance(first_math(text), str | None)
    assert isinstance(has_think_block(text), bool)


@given(st.lists(st.sampled_from(["{x}", "\\{", "5", "\\frac{1}{2}", " ", "\\\\"])).map("".join), ANY_TEXT)
def test_a_closed_box_at_the_end_is_found(content: str, before: str):
    before = before.replace("box", "").replace("\\", "")  # a lone backslash hides what follows, as in LaTeX
    assert last_boxed(f"{before} \\boxed{{{content} }}") == content.strip()


BOXES = ["\\boxed{", "\\boxed{}", "\\boxed", "\\boxed ", "{", "\\", "\\(", "$", " ", "\n"]
STATEMENTS = ["answer", "answer ", "answer is\n", "final ", "<answer>", "<answer><", "<think>", "A:", "A:\n", "####\n"]


@pytest.mark.parametrize("piece", BOXES + STATEMENTS)
def test_time_is_linear_in_length(piece: str):
    text = piece * (400_000 // len(piece))
    begin = time.process_time()
    last_boxed(text)
    stated_answer(text)
    first_math(text)
    has_think_block(text)
    assert time.process_time() - begin < 2  # quadratic would take minutes
