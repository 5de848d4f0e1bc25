"""Intervals, inequalities and unions as sets of real numbers."""

from typing import Any

import sympy

from sgpo_jax.rewards.answers import ORDERINGS, Empty, Group, Leaf, Listing, Node, Relation, SetFormula
from sgpo_jax.rewards.formulas import leaf_value
from sgpo_jax.rewards.values import is_real, rational_key

_JOIN = {r"\cup": sympy.Union, r"\cap": sympy.Intersection, r"\setminus": sympy.Complement}
_REALS = (r"\mathbb{R}", r"\mathbb R", r"\R", r"\Re")
_MIRROR = {"<": ">", ">": "<", r"\le": r"\ge", r"\ge": r"\le"}


def as_set(node: Node, *, is_union: bool) -> sympy.Set | None:
    """The real numbers that an answer stands for; None where it is no such set.

    is_union: several inequalities side by side are alternatives, else conditions that hold together.
    """
    match node:
        case Empty():
            return sympy.S.EmptySet
        case Leaf(latex=text) if text in _REALS:
            return sympy.S.Reals
        case Group(items=items, is_set=True):
            points = [_point(item) for item in items]
            return None if None in points else sympy.FiniteSet(*points)
        case Group(opening=opening, items=(low, high), closing=closing):
            return _interval(_point(low), _point(high), opening == "(", closing == ")")
        case SetFormula(operators=operators, items=items):
            return _joined([as_set(item, is_union=is_union) for item in items], [_JOIN[o] for o in operators])
        case Relation():
            return _solutions(node, is_union=is_union)
        case Listing(items=items) if all(isinstance(item, Relation) for item in items):
            operation = sympy.Union if is_union else sympy.Intersection
            return _joined([as_set(item, is_union=is_union) for item in items], [operation] * (len(items) - 1))
    return None


def unknown_names(node: Node) -> set[str]:
    """What an answer's relations call their unknowns."""
    match node:
        case Relation(parts=parts):
            return {part.latex for part in parts if isinstance(part, Leaf) and leaf_value(part) is None}
        case Listing(items=items) | SetFormula(items=items):
            return set().union(*map(unknown_names, items))
    return set()


def _joined(sets: list[sympy.Set | None], operations: list[Any]) -> sympy.Set | None:
    result = sets[0]
    for operation, other in zip(operations, sets[1:], strict=True):
        if result is None or other is None:
            return None
        result = operation(result, other)
    return result


def _solutions(relation: Relation, *, is_union: bool) -> sympy.Set | None:
    """Of a chain around one unknown that stands alone: 0 < x <= 5, x >= 2, x != 0, x in [0, 1]."""
    unknowns = [i for i, part in enumerate(relation.parts) if isinstance(part, Leaf) and leaf_value(part) is None]
    if len(unknowns) != 1 or len({*relation.operators} - ORDERINGS) > (len(relation.operators) == 1):
        return None
    place = unknowns[0]
    if relation.operators == (r"\in",):
        return as_set(relation.parts[1], is_union=is_union) if place == 0 else None
    result: sympy.Set = sympy.S.Reals
    for i, operator in enumerate(relation.operators):
        if place not in (i, i + 1):
            continue
        bound = _point(relation.parts[i + 1 if place == i else i])
        if bound is None:
            return None
        half = _half_line(operator if place == i else _MIRROR.get(operator, operator), bound)
        if half is None:
            return None
        result = sympy.Intersection(result, half)
    return result


def _half_line(operator: str, bound: Any) -> sympy.Set | None:
    match operator:
        case "<" | r"\le":
            return sympy.Interval(-sympy.oo, bound, True, operator == "<")
        case ">" | r"\ge":
            return sympy.Interval(bound, sympy.oo, operator == ">", True)
        case r"\ne":
            return sympy.Complement(sympy.S.Reals, sympy.FiniteSet(bound))
        case "=":
            return sympy.FiniteSet(bound)
    return None


def _interval(low: Any, high: Any, is_open_low: bool, is_open_high: bool) -> sympy.Set | None:
    if low is None or high is None:
        return None
    return sympy.Interval(low, high, is_open_low, is_open_high)


def _point(node: Node) -> Any:
    value = leaf_value(node) if isinstance(node, Leaf) else None
    if value is None or isinstance(value, Exception) or not is_real(value):
        return None
    return rational_key(value)
