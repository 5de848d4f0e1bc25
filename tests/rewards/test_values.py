import math
from fractions import Fraction

import mpmath
import pytest
import sympy
from hypothesis import given
from hypothesis import strategies as st

from sgpo_jax.rewards.values import TooLargeError, UnsupportedError, evaluate, is_real, rational_key, same_value

x = sympy.Symbol("x")


def power(base: object, exponent: object) -> sympy.Expr:
    return sympy.Pow(sympy.sympify(base), sympy.sympify(exponent), evaluate=False)


def test_rational_arithmetic_is_exact():
    expression = sympy.Add(sympy.Rational(1, 3), sympy.Mul(2, power(5, -3), evaluate=False), evaluate=False)
    assert evaluate(expression) == Fraction(1, 3) + 2 * Fraction(1, 125)
    assert evaluate(sympy.Float("0.1")) == Fraction(1, 10)
    assert evaluate(sympy.factorial(7, evaluate=False)) == math.factorial(7)
    assert evaluate(x**2 + 1, {"x": Fraction(1, 2)}) == Fraction(5, 4)


@pytest.mark.parametrize(
    "expression",
    [
        sympy.sqrt(2) + sympy.pi,
        sympy.exp(-3),
        sympy.log(7, evaluate=False),
        sympy.sin(2),
        sympy.acos(sympy.Rational(1, 3)),
    ],
)
def test_other_values_have_many_digits(expression: sympy.Expr):
    with mpmath.workdps(60):
        oracle = mpmath.mpf(sympy.Float(expression.evalf(60), 60)._mpf_)
        assert abs(mpmath.mpf(evaluate(expression)._mpf_) - oracle) < mpmath.mpf(10) ** -50 * abs(oracle)


def test_cancelling_terms_are_exactly_zero_but_tiny_numbers_are_not():
    nested = sympy.sqrt(3 + 2 * sympy.sqrt(2), evaluate=False)
    assert evaluate(sympy.Add(nested, -1, -sympy.sqrt(2), evaluate=False)) == 0
    tiny = evaluate(power(10, -1000) * sympy.sqrt(2))
    assert tiny != 0
    assert not same_value(tiny, Fraction(0))


def test_what_differs_beyond_floats_differs():
    def inverse_factorial(n: int) -> object:
        return evaluate(power(sympy.factorial(n, evaluate=False), -1))

    assert not same_value(inverse_factorial(2004), inverse_factorial(2006))
    assert not same_value(inverse_factorial(10**6), inverse_factorial(10**6 + 1))
    assert same_value(evaluate(power(2, 10**6)), evaluate(power(4, 5 * 10**5)))


@pytest.mark.parametrize(
    "expression",
    [
        power(9, power(9, 9)),
        sympy.factorial(power(10, 10), evaluate=False),
        power(2, -power(2, 64)),
        sympy.exp(power(10, 20)),
    ],
)
def test_gigantic_numbers_have_values(expression: sympy.Expr):
    value = evaluate(expression)
    assert is_real(value)
    assert not same_value(value, Fraction(1))
    assert same_value(value, evaluate(expression))


def test_numbers_beyond_all_bounds_are_refused():
    with pytest.raises(TooLargeError):
        evaluate(power(9, power(9, power(9, 9))))
    with pytest.raises(TooLargeError):
        evaluate(sympy.factorial(power(10, 40), evaluate=False))
    with pytest.raises(UnsupportedError):
        evaluate(sympy.sin(power(10, 100), evaluate=False))


@pytest.mark.parametrize(
    "expression", [x, power(0, -1), sympy.Function("f")(1), sympy.Integral(x, x), sympy.nan, sympy.zoo]
)
def test_what_has_no_value_is_refused(expression: sympy.Expr):
    with pytest.raises(UnsupportedError):
        evaluate(expression)


def test_the_odd_root_of_a_negative_number_is_real():
    assert same_value(evaluate(power(-8, sympy.Rational(1, 3))), Fraction(-2))
    assert not is_real(evaluate(power(-4, sympy.Rational(1, 2))))


@given(st.fractions())
def test_rational_key_of_an_exact_value_is_the_value(value: Fraction):
    assert rational_key(value) == sympy.Rational(value.numerator, value.denominator)


def test_rational_key_is_the_same_for_the_same_number():
    assert rational_key(evaluate(sympy.sqrt(8))) == rational_key(evaluate(2 * sympy.sqrt(2)))
    assert rational_key(evaluate(sympy.oo)) == sympy.oo
    assert rational_key(evaluate(-sympy.oo)) == -sympy.oo
