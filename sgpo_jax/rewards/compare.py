"""Whether two parsed answers mean the same: item by item for structures, by value for formulas."""

import re
from collections.abc import Sequence
from fractions import Fraction

import sympy

from sgpo_jax.rewards.answers import (
    EQUALITIES,
    ORDERINGS,
    Group,
    Leaf,
    Listing,
    Matrix,
    Node,
    Ratio,
    Relation,
    Words,
)
from sgpo_jax.rewards.formulas import at_points, parse_tree, same_leaf
from sgpo_jax.rewards.real_sets import as_set, unknown_names
from sgpo_jax.rewards.values import is_real, same_value

_NAME = re.compile(
    r"\\?[A-Za-z]+(?:_\{?\w+\}?)?'*(?:\s*\(\s*\w+\s*\))?|\\(?:angle|triangle|overline)\s*\{?\s*\w+\s*\}?"
)
_MIRROR = {"<": ">", r"\le": r"\ge"}


def same(gold: Node, answer: Node) -> bool:
    """Whether the answer means what gold means. Not symmetric: only an answer may carry a name that gold leaves out."""
    if gold == answer:
        return True
    gold, answer = _without_names(gold, answer)
    match gold, answer:
        case Leaf(), Leaf():
            return same_leaf(gold, answer)
        case (Words(text=words), Leaf(latex=other)) | (Leaf(latex=other), Words(text=words)):
            return words == other.casefold()
        case Matrix(), Matrix():
            return _same_matrix(gold, answer)
        case Ratio(), Ratio():
            return _same_ratio(gold.parts, answer.parts)
        case (Ratio(parts=(Leaf(a), Leaf(b))), Leaf() as share) | (Leaf() as share, Ratio(parts=(Leaf(a), Leaf(b)))):
            return same_leaf(Leaf(rf"\frac{{{a}}}{{{b}}}"), share)
        case (Group(opening=r"\{", items=(single,)), Leaf()):
            return same(single, answer)
        case (Leaf(), Group(opening=r"\{", items=(single,))):
            return same(gold, single)
        case (Group() | Listing(), Group() | Listing()) if _same_items(gold, answer):
            return True
        case Relation(), Relation() if _same_relation(gold, answer):
            return True
    return _same_real_set(gold, answer)


def _without_names(gold: Node, answer: Node) -> tuple[Node, Node]:
    """Drop what only names the answer: x = 5 is 5 where the other side names nothing."""
    if isinstance(answer, Relation) and not isinstance(gold, Relation):
        return gold, _named_value(answer, must_be_name=False)
    if isinstance(gold, Relation) and not isinstance(answer, Relation):
        return _named_value(gold, must_be_name=True), answer
    return gold, answer


def _named_value(relation: Relation, *, must_be_name: bool) -> Node:
    r"""What a chain such as x = 3 + 4 = 7 says of its name. Of x = \sqrt{2} \approx 1.41 the exact value."""
    if relation.operators == (r"\in",):
        return relation.parts[1]
    if not set(relation.operators) <= EQUALITIES:
        return relation
    parts = relation.parts
    if r"\approx" in relation.operators:
        exact = parts[: relation.operators.index(r"\approx") + 1]
        parts = parts if _is_name(exact[-1]) else exact
    if _is_name(parts[-1]) and not _is_name(parts[0]):
        return parts[0]
    return parts[-1] if _is_name(parts[0]) or not must_be_name or len(parts) == 1 else relation


def _is_name(node: Node) -> bool:
    if isinstance(node, Group):
        return all(map(_is_name, node.items))
    return isinstance(node, Words) or (isinstance(node, Leaf) and _NAME.fullmatch(node.latex) is not None)


def _same_items(gold: Group | Listing, answer: Group | Listing) -> bool:
    """Sets and bare lists have no order; a bare list also equals a tuple, and brackets of vectors may differ."""
    if not _is_ordered(gold) and not _is_ordered(answer):
        if isinstance(gold, Group) or isinstance(answer, Group):
            return _in_any_order(_distinct(gold.items), _distinct(answer.items))
        return _in_any_order(gold.items, answer.items)
    if isinstance(gold, Group) and isinstance(answer, Group):
        same_brackets = (gold.opening, gold.closing) == (answer.opening, answer.closing)
        is_vector = _is_ordered(gold) and _is_ordered(answer) and len(gold.items) > 2  # two items may be an interval
        return (same_brackets or is_vector) and _in_order(gold.items, answer.items)
    bracketed = gold if isinstance(gold, Group) else answer
    is_tuple = isinstance(bracketed, Group) and bracketed.opening == "("
    return is_tuple and _in_order(_by_name(gold.items), _by_name(answer.items))


def _by_name(items: Sequence[Node]) -> Sequence[Node]:
    """y = 3, x = 2 in the order of a tuple (x, y)."""
    named = {str(item.parts[0]): item for item in items if isinstance(item, Relation) and _is_name(item.parts[0])}
    return [named[name] for name in sorted(named)] if len(named) == len(items) else items


def _is_ordered(node: Group | Listing) -> bool:
    return isinstance(node, Group) and not node.is_set


def _in_order(gold: Sequence[Node], answer: Sequence[Node]) -> bool:
    return len(gold) == len(answer) and all(map(same, gold, answer))


def _in_any_order(gold: Sequence[Node], answer: Sequence[Node]) -> bool:
    left = list(answer)
    for item in gold:
        place = next((place for place, other in enumerate(left) if same(item, other)), None)
        if place is None:
            return False
        del left[place]
    return not left


def _distinct(items: Sequence[Node]) -> list[Node]:
    distinct: list[Node] = []
    for item in items:
        if not any(same(item, other) for other in distinct):
            distinct.append(item)
    return distinct


def _same_matrix(gold: Matrix, answer: Matrix) -> bool:
    same_kind = gold.is_determinant == answer.is_determinant and len(gold.rows) == len(answer.rows)
    return same_kind and all(map(_in_order, gold.rows, answer.rows))


def _same_ratio(gold: Sequence[Node], answer: Sequence[Node]) -> bool:
    """Proportional: every part over the first."""
    if len(gold) != len(answer):
        return False
    numbers = [[part.latex for part in parts if isinstance(part, Leaf)] for parts in (gold, answer)]
    if any(len(found) < len(gold) for found in numbers):
        return False
    shares = [[Leaf(rf"\frac{{{part}}}{{{found[0]}}}") for part in found[1:]] for found in numbers]
    return _in_order(*shares)


def _same_relation(gold: Relation, answer: Relation) -> bool:
    """Equal part by part, or one equation or inequality a multiple of the other."""
    if gold.operators == answer.operators and _in_order(gold.parts, answer.parts):
        return True
    if len(gold.operators) > 1 or len(answer.operators) > 1:
        are_equalities = {*gold.operators, *answer.operators} <= EQUALITIES
        return are_equalities and same(gold.parts[0], answer.parts[0]) and same(gold.parts[-1], answer.parts[-1])
    operators = [_MIRROR.get(relation.operators[0], relation.operators[0]) for relation in (gold, answer)]
    differences = [_difference(relation) for relation in (gold, answer)]
    if operators[0] != operators[1] or None in differences:
        return False
    factors = at_points(lambda g, a: a / g, *differences)
    if (
        not factors
        or not all(same_value(factors[0], factor) for factor in factors)
        or same_value(factors[0], Fraction(0))
    ):
        return False
    return operators[0] not in ORDERINGS or (is_real(factors[0]) and factors[0] > 0)


def _difference(relation: Relation) -> sympy.Expr | None:
    """The larger side of a relation minus the smaller."""
    left, right = relation.parts[::-1] if relation.operators[0] in _MIRROR else relation.parts
    if not isinstance(left, Leaf) or not isinstance(right, Leaf):
        return None
    trees = parse_tree(left.latex), parse_tree(right.latex)
    if trees[0] is None or trees[1] is None:
        return None
    return sympy.Add(trees[0], sympy.Mul(-1, trees[1], evaluate=False), evaluate=False)


def _same_real_set(gold: Node, answer: Node) -> bool:
    """Equal as sets of real numbers, such as [0, 1) and 0 <= x < 1; two named unknowns must have the same name."""
    if len(unknown_names(gold) | unknown_names(answer)) > 1:
        return False
    for is_union in (True, False):
        gold_set, answer_set = as_set(gold, is_union=is_union), as_set(answer, is_union=is_union)
        if gold_set is not None and gold_set == answer_set:
            return True
    return False
