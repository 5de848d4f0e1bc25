"""Values of closed expressions, exact or to many digits, computed so that no input can blow up time or memory.

Powers and factorials are bounded before they are taken: what would not fit as an exact number is evaluated with
unbounded exponents (mpmath), so that 1/2004! differs from 1/2006!, and 9^(9^9) is a number like any other.
"""

import math
from collections.abc import Callable, Mapping
from fractions import Fraction
from typing import Any

import mpmath
import sympy

DIGITS = 100
"""Working precision in decimal digits; a comparison believes half of them."""
MAX_EXACT_BITS = 100_000
MAX_LOG2 = 2.0**200
"""A number whose base-2 logarithm is beyond this is refused."""
MAX_EXACT_FACTORIAL = 5_000
MAX_FACTORIAL = 10**15
MAX_ANGLE = 10**30
"""Larger arguments of periodic functions need as many digits as they have: refused."""

_mp = mpmath.MPContext()
_mp.dps = DIGITS

Value = Any
"""A Fraction where the value is exact, else an mpmath real or complex number."""


class UnsupportedError(Exception):
    """The expression holds something that is not evaluated here, or has no value (1/0)."""


class TooLargeError(Exception):
    """The value is so large or so small that even its logarithm is."""


def evaluate(expression: Any, symbols: Mapping[str, Fraction] | None = None) -> Value:
    """The value of a SymPy expression, with `symbols` giving values by name; a symbol `i` is the imaginary unit.

    Raises UnsupportedError and TooLargeError. A sum whose terms cancel to the last digit is exactly 0.
    """
    value = _evaluate(expression, symbols or {})
    if isinstance(value, Fraction) or not abs(value) < _mp.mpf(10) ** (-DIGITS // 3):
        return value
    if value == 0:  # exponents do not underflow: all digits cancelled
        return Fraction(0)
    _mp.dps = 2 * DIGITS
    try:
        precise = _evaluate(expression, symbols or {})
    finally:
        _mp.dps = DIGITS
    is_rounding = abs(precise) <= abs(value) * _mp.mpf(10) ** (-DIGITS // 3)
    return Fraction(0) if is_rounding else precise


def same_value(a: Value, b: Value) -> bool:
    """Exactly equal where both are exact, else equal in half of the working digits."""
    if isinstance(a, Fraction) and isinstance(b, Fraction):
        return a == b
    a, b = _inexact(a), _inexact(b)
    if _mp.isinf(a) or _mp.isinf(b):
        return bool(a == b)
    return bool(abs(a - b) <= max(abs(a), abs(b)) * _mp.mpf(10) ** (-DIGITS // 2))


def is_real(value: Value) -> bool:
    return isinstance(value, Fraction) or _mp.im(value) == 0


def rational_key(value: Value) -> sympy.Rational:
    """A real value as a rational number, the same one for all values that `same_value` calls equal."""
    if isinstance(value, Fraction) and value.denominator.bit_length() <= 1000:
        return sympy.Rational(value.numerator, value.denominator)
    if _mp.isinf(_inexact(value)):
        return sympy.oo if value > 0 else -sympy.oo
    return sympy.Rational(_mp.nstr(_mp.re(_inexact(value)), DIGITS // 2))


def _evaluate(expression: Any, symbols: Mapping[str, Fraction]) -> Value:
    match expression:
        case sympy.Rational():
            return Fraction(int(expression.p), int(expression.q))
        case sympy.Float():
            return Fraction(str(expression))
        case sympy.Symbol(name=name) if name in symbols:
            return symbols[name]
        case sympy.Symbol(name="i"):
            return _mp.mpc(0, 1)
    if (constant := _CONSTANTS.get(expression)) is not None:
        return constant()
    operation = _OPERATIONS.get(expression.func) if isinstance(expression, sympy.Basic) else None
    if operation is None:
        raise UnsupportedError(str(expression)[:100])
    arguments = [_evaluate(argument, symbols) for argument in expression.args]
    try:
        return operation(*arguments)
    except (ZeroDivisionError, ValueError, TypeError) as error:
        raise UnsupportedError(f"{expression.func.__name__}: {error}") from None


def _inexact(value: Value) -> Value:
    return _mp.mpf(value.numerator) / value.denominator if isinstance(value, Fraction) else value


def _bits(value: Fraction) -> int:
    return max(value.numerator.bit_length(), value.denominator.bit_length())


def _fold(operator: Callable[[Value, Value], Value]) -> Callable[..., Value]:
    def fold(first: Value, *rest: Value) -> Value:
        result = first
        for value in rest:
            exact = isinstance(result, Fraction) and isinstance(value, Fraction)
            if exact and _bits(result) + _bits(value) <= MAX_EXACT_BITS:
                result = operator(result, value)
            else:
                result = operator(_inexact(result), _inexact(value))
        return result

    return fold


def _power(base: Value, exponent: Value) -> Value:
    if isinstance(base, Fraction) and isinstance(exponent, Fraction):
        if exponent.denominator == 1 and _bits(base) * abs(exponent) <= MAX_EXACT_BITS:
            return base ** int(exponent)
        if base < 0 and exponent.numerator == 1 and exponent.denominator % 2:
            return -_power(-base, exponent)  # the real odd root, as answers mean it
        if base in (0, 1):
            return base ** (1 if exponent > 0 or base else -1)
    base, exponent = _inexact(base), _inexact(exponent)
    if base == 0:
        return base**exponent
    _check_log2(abs(exponent) * abs(_mp.log(abs(base), 2)))
    return _mp.power(base, exponent)


def _exp(value: Value) -> Value:
    _check_log2(abs(_inexact(value)) * 2)
    return _mp.exp(_inexact(value))


def _check_log2(log2: Value) -> None:
    if not log2 < MAX_LOG2:
        raise TooLargeError(f"2^(10^{int(_mp.log10(log2)) if _mp.isfinite(log2) else 'inf'})")


def _factorial(value: Value) -> Value:
    if not is_real(value) or value > MAX_FACTORIAL:
        raise TooLargeError(f"{_mp.nstr(_inexact(value), 5)}!")
    if isinstance(value, Fraction) and value.denominator == 1 and 0 <= value <= MAX_EXACT_FACTORIAL:
        return Fraction(math.factorial(int(value)))
    return _mp.factorial(_inexact(value))


def _logarithm(value: Value, base: Value = None) -> Value:
    if base is None:
        return _mp.log(_inexact(value))
    return _mp.log(_inexact(value)) / _mp.log(_inexact(base))


def _function(function: Callable[[Value], Value]) -> Callable[[Value], Value]:
    def apply(value: Value) -> Value:
        if abs(value) > MAX_ANGLE:
            raise UnsupportedError("argument too large")
        return function(_inexact(value))

    return apply


def _round(rounding: Callable[[Any], Any]) -> Callable[[Value], Value]:
    def apply(value: Value) -> Value:
        if not isinstance(value, Fraction):
            raise UnsupportedError("rounding of an inexact number")
        return Fraction(rounding(value))

    return apply


_CONSTANTS: dict[Any, Callable[[], Value]] = {
    sympy.pi: lambda: +_mp.pi,
    sympy.E: lambda: +_mp.e,
    sympy.I: lambda: _mp.mpc(0, 1),
    sympy.oo: lambda: _mp.inf,
    -sympy.oo: lambda: -_mp.inf,
}
_OPERATIONS: dict[Any, Callable[..., Value]] = {
    sympy.Add: _fold(lambda a, b: a + b),
    sympy.Mul: _fold(lambda a, b: a * b),
    sympy.Pow: _power,
    sympy.exp: _exp,
    sympy.log: _logarithm,
    sympy.factorial: _factorial,
    sympy.Abs: abs,
    sympy.floor: _round(math.floor),
    sympy.ceiling: _round(math.ceil),
    sympy.UnevaluatedExpr: lambda value: value,
    **{
        getattr(sympy, name): _function(getattr(_mp, name))
        for name in ("sin", "cos", "tan", "cot", "sec", "csc", "asin", "acos", "atan", "sinh", "cosh", "tanh")
    },
}
