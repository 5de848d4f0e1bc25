import pytest
from hypothesis import given
from hypothesis import strategies as st

from sgpo_jax.rewards import exact, numeric
from sgpo_jax.types import UserError, Verdict

ARITHMETIC = {"answer_after": ":", "answer_end": "$"}


@pytest.mark.parametrize(
    ("gold", "text", "metadata", "is_correct"),
    [
        ("42", "42", {}, True),
        ("42", " 42\n", {}, True),
        ("42", "it is 42", {}, False),
        ("42", "42.", {}, False),
        ("42", "17+25: 42$", ARITHMETIC, True),
        ("42", "17+25: 41: 42 $", ARITHMETIC, True),
        ("42", "17+25: 42: 41$", ARITHMETIC, False),
        ("42", "17+25: 42", ARITHMETIC, False),
        ("42", "17+25 42$", ARITHMETIC, False),
        ("42", "17+25: 42$$", ARITHMETIC, False),
        ("42", "", ARITHMETIC, False),
        ("42", "so: 42", {"answer_after": ":"}, True),
        ("42", "42$", {"answer_end": "$"}, True),
        ("2H2 + O2 = 2H2O", "So \\boxed{2H2+O2 = 2H2O}.", {"boxed": True}, True),
        ("2H2 + O2 = 2H2O", "\\boxed{2H2+O2 = 2H2O} or \\boxed{H2}", {"boxed": True}, False),
        ("2H2 + O2 = 2H2O", "2H2 + O2 = 2H2O", {"boxed": True}, False),
    ],
)
def test_exact(gold: str, text: str, metadata: dict, is_correct: bool):
    judgement = exact.judge(gold, text, metadata)
    assert judgement.verdict is (Verdict.CORRECT if is_correct else Verdict.WRONG)
    assert judgement.reward == float(is_correct)


@given(st.text(st.characters()), st.text(st.characters()))
def test_exact_is_equality(gold: str, text: str):
    assert (exact.judge(gold, text, {}).verdict is Verdict.CORRECT) is (gold.strip() == text.strip())


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("3.14", 3.14),
        ("-3", -3),
        (".5", 0.5),
        ("5.", 5),
        ("1,234.5", 1234.5),
        ("1{,}234", 1234),
        ("12,345,678", 12345678),
        ("1.5e-3", 1.5e-3),
        ("1.5E3 J", 1500),
        (r"1.5 \times 10^{-3}", 1.5e-3),
        (r"1.5 \cdot 10^3", 1500),
        ("1.5 × 10⁻³ mol", 1.5e-3),
        ("6.02 x 10^23", 6.02e23),
        ("10^{5}", 1e5),
        ("−4", -4),
        ("$5.20$ kJ/mol", 5.2),
        ("no number", None),
        ("", None),
    ],
)
def test_first_number(text: str, value: float | None):
    assert numeric.first_number(text) == (None if value is None else pytest.approx(value, rel=1e-12))


@pytest.mark.parametrize(
    ("text", "is_correct"),
    [
        (r"\boxed{2.00}", True),
        (r"\boxed{2.019\ \text{kJ}}", True),
        (r"\boxed{2.021}", False),
        (r"\boxed{-2}", False),
        ("The answer is 1.99 m/s.", True),
        ("First 7, then 2.0", True),
        ("First 2.0, then 7", False),
        (r"2.0 and then \boxed{2.0", False),
        (r"2.0 \boxed{}", False),
        ("nothing", False),
    ],
)
def test_numbers_within_a_percent(text: str, is_correct: bool):
    assert (numeric.judge("2.0 kJ", text, {}).verdict is Verdict.CORRECT) is is_correct


def test_tolerances():
    def is_correct(gold: str, text: str, **metadata: float) -> bool:
        return numeric.judge(gold, text, metadata).verdict is Verdict.CORRECT

    assert is_correct("100", "104", relative_tolerance=0.05)
    assert not is_correct("100", "104", relative_tolerance=0.03)
    assert is_correct("100", "104", relative_tolerance=0.0, absolute_tolerance=5)
    assert not is_correct("0", "0.01")
    assert is_correct("0", "0.01", absolute_tolerance=0.1)


def test_gold_without_a_number_is_an_error():
    with pytest.raises(UserError, match="holds no number"):
        numeric.judge("many", "5", {})


@given(st.text(st.characters()))
def test_no_text_raises(text: str):
    assert numeric.judge("5", text, {}).verdict in (Verdict.CORRECT, Verdict.WRONG)
    assert isinstance(numeric.first_number(text), float | None)
