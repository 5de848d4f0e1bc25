"""Whether two formulas are equal: by value, at random points, and last by math-verify, whose parser reads them."""

import logging
import re
from collections.abc import Callable
from fractions import Fraction
from functools import lru_cache
from random import Random
from typing import Any

import sympy
from latex2sympy2_extended import latex2sympy
from math_verify import LatexExtractionConfig, verify
from math_verify import parse as parse_math
from math_verify.grader import should_treat_as_complex

from sgpo_jax.rewards.answers import Leaf
from sgpo_jax.rewards.values import TooLargeError, UnsupportedError, Value, evaluate, same_value

NUM_POINTS = 4
"""Random points of which one has negative values: |x| is not x."""
_PLAIN_NUMBER = re.compile(r"[-+]?\d{1,60}(?:\.\d{1,60})?(?:/\d{1,60})?")
_PLAIN_FRACTION = re.compile(r"(-?)\\frac\{(-?\d{1,60})\}\{(\d{1,60})\}")
_BLANK = re.compile(r" (?!\d)|(?<!\d) ")
_SIDE_BY_SIDE = re.compile(r"\d\s+\d")
_BASE = re.compile(r"([0-9A-F]+)_\{?(?:\\text\{)?(\d+|[a-z]+)\}*")
logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns that its own time limits are off; ours are on


def same_leaf(gold: Leaf, answer: Leaf) -> bool:
    """Raises TooLargeError where both are numbers beyond all bounds."""
    texts = [_squeezed(leaf.latex) for leaf in (gold, answer)]
    if texts[0] == texts[1]:
        return True
    if any(_BASE.fullmatch(text) for text in texts):
        return _same_digits(*texts)
    values = [leaf_value(gold), leaf_value(answer)]
    too_large = [value for value in values if isinstance(value, TooLargeError)]
    if len(too_large) == 2:
        raise too_large[0]
    if too_large:
        return False
    if None in values:
        return same_formula(gold.latex, answer.latex)
    if same_value(*values):
        return True
    if gold.is_percent != answer.is_percent:  # 28% is 28, the number of percent, and is 0.28
        shares = [value if leaf.is_percent else value * 100 for leaf, value in zip((gold, answer), values, strict=True)]
        return same_value(*shares)
    return False


def leaf_value(leaf: Leaf) -> Value:
    """The number that a leaf is (of a percentage: the number of percent); None where it is none or is not evaluated.

    A TooLargeError is returned, not raised: such a number still differs from all others.
    """
    text = _squeezed(leaf.latex)
    try:
        if _PLAIN_NUMBER.fullmatch(text):
            top, _, bottom = text.partition("/")
            return Fraction(top) / Fraction(bottom or 1)
        if found := _PLAIN_FRACTION.fullmatch(text):
            return Fraction(int(found[2]), int(found[3])) * (-1 if found[1] else 1)
        tree = parse_tree(leaf.latex)
        return None if tree is None or unknowns(tree) else evaluate(tree)
    except (UnsupportedError, ZeroDivisionError):
        return None
    except TooLargeError as error:
        return error


def same_formula(gold: str, answer: str) -> bool:
    """Equal at random points. What cannot be evaluated, or is equal at some points only, goes to math-verify."""
    trees = parse_tree(gold), parse_tree(answer)
    verdicts = at_points(same_value, *trees)
    if len(verdicts) == NUM_POINTS and len(set(verdicts)) == 1:
        return bool(verdicts[0])
    return math_verify_agrees(gold, answer)


def at_points(compare: Callable[[Value, Value], Any], gold: Any, answer: Any) -> list[Any]:
    """What `compare` says of two trees at random points; points where one of them has no value are left out."""
    if gold is None or answer is None:
        return []
    names = sorted(unknowns(gold) | unknowns(answer))
    results = []
    for point in range(NUM_POINTS):
        draw = Random(point)
        sign = -1 if point == NUM_POINTS - 1 else 1
        symbols = {name: sign * Fraction(draw.randrange(101, 700), 97) for name in names}
        try:
            results.append(compare(evaluate(gold, symbols), evaluate(answer, symbols)))
        except (UnsupportedError, TooLargeError, ZeroDivisionError):
            continue
    return results


def unknowns(tree: sympy.Expr) -> set[str]:
    return {symbol.name for symbol in tree.free_symbols} - {"i"}


def math_verify_agrees(gold: str, answer: str) -> bool:
    """math-verify's own verdict on two formulas, gold first: it is not symmetric.

    Sharper than its defaults (6 decimals, 15 digits), by which 0.1 is 0.10000001 and 1/2004! is 0. Of its extractors
    only the LaTeX one is used: the other hands text to SymPy's parse_expr, which evaluates it as Python.
    """
    trees = [parse_math(f"${text}$", [LatexExtractionConfig()], parsing_timeout=None) for text in (gold, answer)]
    return verify(*trees, float_rounding=15, numeric_precision=40, allow_set_relation_comp=True, timeout_seconds=None)


@lru_cache(maxsize=512)
def parse_tree(latex: str) -> sympy.Expr | None:
    """math-verify's reading of a formula as an unevaluated SymPy tree; None where it has none, or no expression."""
    if _SIDE_BY_SIDE.search(latex):  # it would add them up
        return None
    is_real = not should_treat_as_complex(latex)
    try:
        tree = latex2sympy(latex, is_real=is_real, convert_degrees=False, normalization_config=None)
    except MemoryError:
        raise
    except Exception:  # its parser raises whatever it meets
        return None
    return tree if isinstance(tree, sympy.Expr) else None


def _squeezed(text: str) -> str:
    """Without blanks, but 1 2 stays apart from 12."""
    return _BLANK.sub("", text)


def _same_digits(gold: str, answer: str) -> bool:
    """Numbers with a base, such as 1011_2: the same digits, and the same base where both name one."""
    (gold_digits, *gold_base), (answer_digits, *answer_base) = (
        found.groups() if (found := _BASE.fullmatch(text)) else (text,) for text in (gold, answer)
    )
    return gold_digits == answer_digits and (not gold_base or not answer_base or gold_base == answer_base)
