r"""The structure of a cleaned answer: lists, tuples, sets, intervals, relations, ratios, matrices, words, formulas.

Structure is read from the brackets and separators as they stand, so that (1,2) is never taken for 12 nor for 1,2,
and a comma inside of brackets never for a thousands mark.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass

from sgpo_jax.rewards.latex import bracketed, split

EQUALITIES = frozenset({"=", r"\approx"})
ORDERINGS = frozenset({"<", ">", r"\le", r"\ge"})
_RELATIONS = ORDERINGS | EQUALITIES | {r"\ne", r"\in"}
_NO_SOLUTION = re.compile(
    r"(?:there (?:is|are) )?no (?:real |such |valid |possible |integer )?(?:solutions?|values?|roots?|answer)"
    r"(?: exists?)?|(?:the )?empty set|none"
)
_ALL_REALS = re.compile(r"(?:the set of )?all real(?:s| numbers)?")
_MATRIX = re.compile(
    r"\\begin\s*\{((?:[pbBvV]|small)?matrix|array|cases)\}\s*(?:\{[|lcr\s]*\})?(.*)\\end\s*\{\1\}", re.DOTALL
)
_WHOLE_TEXT = re.compile(r"\\text\s*\{([^{}]*)\}")
_WORDS = re.compile(r"(?=.*[a-z]{4})[a-z][a-z' -]*|yes|no|odd")
_WORDS_IN_TEXT = re.compile(r"[a-z][a-z' -]+")
_FUNCTIONS = re.compile(r"\b(?:arc)?(?:sin|cos|tan|log)h?\b")
_UNIT = r"\\text\s*\{[^{}]*\}(?:\s*\^\s*(?:\{[^{}]*\}|-?\w))?"
_UNIT_FORMULA = re.compile(
    rf"\s*(?:\\frac\s*\{{\s*{_UNIT}\s*\}}\s*\{{\s*{_UNIT}\s*\}}|{_UNIT}(?:\s*(?:/|\\cdot|\\times)\s*{_UNIT})*)+$"
)
_SHORT_UNITS = "mm|cm|dm|km|kg|mg|ml|mL|ft|in|yd|mi|lb|oz|hr|ms|Hz|kJ|eV|m|g|s|L|h|N|J|W|V|K"
_UNIT_WORDS = re.compile(
    rf"(?<=[\d}})!%])(?:\s+(?:(?:{_SHORT_UNITS})\b|[A-Za-z]{{3,}})\D*|(?:{_SHORT_UNITS.split('|m|')[0]}))(?:\s*\^\s*\{{?\d\}}?)?$"
)
_MIXED = re.compile(
    r"(?<![\w.})^])(\d+)\s*\\frac\s*\{\s*(\d+)\s*\}\s*\{\s*(\d+)\s*\}|(?<![\w.})^/])(\d+)\s+(\d+)\s*/\s*(\d+)"
)
_REPEATING = re.compile(r"(\d*)\.(\d*)\\overline\s*\{\s*(\d+)\s*\}")
_ANGLE = re.compile(r"(\d+(?:\.\d+)?)\s*\\degree")


@dataclass(frozen=True, slots=True)
class Leaf:
    """One formula or number, without its unit."""

    latex: str
    is_percent: bool = False


@dataclass(frozen=True, slots=True)
class Words:
    """An answer in words, in lower case."""

    text: str


@dataclass(frozen=True, slots=True)
class Empty:
    """The empty set, or words that say that there is no solution."""


@dataclass(frozen=True, slots=True)
class Listing:
    """Answers side by side, in no order."""

    items: tuple["Node", ...]


@dataclass(frozen=True, slots=True)
class Group:
    r"""Items in brackets: a tuple or interval, or with \{ a set."""

    opening: str
    items: tuple["Node", ...]
    closing: str

    @property
    def is_set(self) -> bool:
        return self.opening == r"\{"


@dataclass(frozen=True, slots=True)
class Relation:
    r"""A chain such as 0 < x \le 5 or x = y = 3."""

    operators: tuple[str, ...]
    parts: tuple["Node", ...]
    text: str


@dataclass(frozen=True, slots=True)
class SetFormula:
    r"""Sets joined by \cup, \cap and \setminus, from left to right."""

    operators: tuple[str, ...]
    items: tuple["Node", ...]


@dataclass(frozen=True, slots=True)
class Ratio:
    parts: tuple["Node", ...]


@dataclass(frozen=True, slots=True)
class Matrix:
    """is_determinant: written between bars."""

    rows: tuple[tuple["Node", ...], ...]
    is_determinant: bool


Node = Leaf | Words | Empty | Listing | Group | Relation | SetFormula | Ratio | Matrix


def parse(text: str, *, join_thousands: bool = True) -> Node:
    """The structure of a cleaned answer. join_thousands: outside of brackets, 1,000 is one number."""
    text = text.strip()
    if whole := _WHOLE_TEXT.fullmatch(text):
        return _words(whole[1], _WORDS_IN_TEXT) or parse(whole[1], join_thousands=join_thousands)
    if node := _words(text):
        return node
    commas, _ = split(text, {",", ";"})
    items = [part for part in (_join(commas) if join_thousands else commas) if part.strip()]
    if len(items) > 1:
        return Listing(tuple(_flat(parse(item, join_thousands=False) for item in items)))
    return _parse_item(items[0].strip() if items else "")


def _parse_item(text: str) -> Node:
    parts, operators = split(text, _RELATIONS)
    if operators:
        nodes = [parse(part) for part in parts]
        if not parts[0].strip():
            nodes, operators = nodes[1:], operators[1:]
        return Relation(tuple(operators), tuple(nodes), text) if operators else nodes[0]
    if r"\pm" in text or r"\mp" in text:
        other = text.replace(r"\pm", "-").replace(r"\mp", "+")
        text = text.replace(r"\pm", "+").replace(r"\mp", "-")
        return Listing(tuple(_flat([parse(text.removeprefix("+")), parse(other)])))
    sets, operators = split(text, {r"\cup", r"\cap", r"\setminus"})
    if operators:
        return SetFormula(tuple(operators), tuple(parse(part) for part in sets))
    ratio, _ = split(text, {":"})
    if len(ratio) > 1 and all(part.strip() for part in ratio):
        return Ratio(tuple(parse(part) for part in ratio))
    return _parse_brackets(text) or _parse_matrix(text) or _leaf(text)


def _parse_brackets(text: str) -> Node | None:
    enclosed = bracketed(text)
    if enclosed is None or enclosed[0] == r"\begin":
        return None
    opening, content, closing = enclosed
    if opening == "{":
        return parse(content, join_thousands=False)
    if opening == r"\{":
        if not content or content == r"\emptyset":
            return Empty()
        condition, bars = split(content, {r"\mid", "|", ":"})
        if len(bars) == 1:
            return parse(condition[1])
    items, _ = split(content, {",", ";"})
    nodes = tuple(_flat(parse(item, join_thousands=False) for item in items))
    if len(nodes) == 1 and (opening == "(" or isinstance(nodes[0], Matrix)):
        return nodes[0]
    return Group(opening, nodes, closing)


def _parse_matrix(text: str) -> Node | None:
    found = _MATRIX.fullmatch(text)
    if not found:
        return None
    lines = [line for line in split(found[2], {r"\\"})[0] if line.strip()]
    if found[1] == "cases":
        return Listing(tuple(parse(line.replace("&", " ")) for line in lines))
    rows = tuple(tuple(parse(entry) for entry in split(line, {"&"})[0]) for line in lines)
    return Matrix(rows, is_determinant=found[1] == "vmatrix")


def _words(text: str, pattern: re.Pattern[str] = _WORDS) -> Node | None:
    """Words where the text is no formula: at least one word of four letters, or a phrase that is known."""
    plain = " ".join(text.replace(r"\text", "").replace("{", "").replace("}", "").split()).casefold().strip(" .")
    if _NO_SOLUTION.fullmatch(plain) or plain == r"\emptyset":
        return Empty()
    if _ALL_REALS.fullmatch(plain):
        return Leaf(r"\mathbb{R}")
    if pattern.fullmatch(plain) and not _FUNCTIONS.search(plain):
        return Words(plain)
    return None


def _leaf(text: str) -> Leaf:
    without_unit = _UNIT_FORMULA.sub("", text).strip()
    text = without_unit or text
    text = _WHOLE_TEXT.sub(r"\1", text)
    text = _UNIT_WORDS.sub("", text).strip()
    if re.search(r"\\(?:sin|cos|tan|cot|sec|csc)", text):
        text = _ANGLE.sub(r"{\\frac{\1\\pi}{180}}", text)
    text = text.replace(r"\degree", "").strip()
    is_percent = text.endswith("%")
    text = text.rstrip("% ")
    text = re.sub(r"(?<=\d),(?=\d{3}(?!\d))", "", text)
    text = _REPEATING.sub(_repeating_fraction, text)
    text = _MIXED.sub(_mixed_fraction, text)
    return Leaf(text, is_percent)


def _mixed_fraction(found: re.Match[str]) -> str:
    whole, top, bottom = (int(group) for group in found.groups() if group is not None)
    return rf"\frac{{{whole * bottom + top}}}{{{bottom}}}"


def _repeating_fraction(found: re.Match[str]) -> str:
    whole, fixed, period = found.groups()
    bottom = (10 ** len(period) - 1) * 10 ** len(fixed)
    top = int(whole + fixed + period) - int(whole + fixed or "0")
    return rf"\frac{{{top}}}{{{bottom}}}"


def _join(parts: list[str]) -> list[str]:
    """Put 1,234,567 together again where it was split at thousands marks."""
    joined: list[str] = []
    is_open = False  # the last part may go on with another three digits
    for part in parts:
        if joined and is_open and re.match(r"\d{3}(?!\d)", part):
            joined[-1] += part
            is_open = len(part.rstrip()) == 3
        else:
            joined.append(part)
            is_open = re.search(r"(?:^|[^\d.])[1-9]\d{0,2}$", part) is not None
    return joined


def _flat(nodes: Iterable[Node]) -> list[Node]:
    flat: list[Node] = []
    for node in nodes:
        flat.extend(node.items if isinstance(node, Listing) else [node])
    return flat
