r"""Clean-up of LaTeX answers: one spelling for what means the same, and splitting outside of brackets.

Made for answers of at most a few thousand characters; some rules are quadratic in runs of blanks.
"""

import re
import unicodedata
from collections.abc import Callable, Collection

_CHARACTERS = str.maketrans({
    "−": "-", "–": "-", "×": r"\times ", "÷": "/", "·": r"\cdot ", "⋅": r"\cdot ", "π": r"\pi ", "∞": r"\infty ",
    "≤": r"\le ", "≥": r"\ge ", "≠": r"\ne ", "≈": r"\approx ", "∪": r"\cup ", "∈": r"\in ", "∖": r"\setminus ",
    "∅": r"\emptyset ", "ø": r"\emptyset ", "°": r"\degree ", "ℝ": r"\mathbb{R}", "±": r"\pm ", "∓": r"\mp ",
    "√": r"\sqrt ", "⟨": "(", "⟩": ")", "½": r"\frac{1}{2}", "¼": r"\frac{1}{4}", "¾": r"\frac{3}{4}",
    "θ": r"\theta ", "α": r"\alpha ", "β": r"\beta ", "∶": ":", "…": r"\ldots ", "’": "'", "‘": "'",
})  # fmt: skip
_SUPERSCRIPTS = dict(zip("⁰¹²³⁴⁵⁶⁷⁸⁹⁻⁺ⁿ", "0123456789-+n", strict=True))
_SUPERSCRIPT_RUN = re.compile(f"[{''.join(_SUPERSCRIPTS)}]+")
_END = r"(?![A-Za-z])"
_BRACED = r"\{(?:[^{}]|\{(?:[^{}]|\{[^{}]*\})*\})*\}"
_UNBRACED = rf"\\[A-Za-z]+{_END}|[^\s{{}}\\\[(]"
_GAP = r"(?:\{,\}|,\\!|\\!,?|,\{\}|\\[,;: ]|\{\\,\}|~)"  # what LaTeX writes between thousands


_POWERS = {"hundred": 2, "thousand": 3, "million": 6, "billion": 9, "trillion": 12}


def _brace(*arguments: str) -> str:
    return "".join(a if a.startswith("{") else f"{{{a}}}" for a in arguments)


def _power_of_ten(found: re.Match[str]) -> str:
    return rf"\cdot 10^{{{_POWERS[found[1]]}}} "


_FRACTION = (
    re.compile(rf"\\frac\s*(?:({_UNBRACED})\s*({_UNBRACED}|{_BRACED})|({_BRACED})\s*({_UNBRACED}))"),
    lambda m: r"\frac" + _brace(*filter(None, m.groups())),
)
_Replacement = str | Callable[[re.Match[str]], str]

# Applied in this order. Each is one rule of spelling; none looks at what the answer is.
_RULES: list[tuple[re.Pattern[str], _Replacement]] = [
    (re.compile(r"\\?[$£€¥₹₩]"), ""),
    (re.compile(rf"\\(?:left|right|[bB]igg?[lrm]?|displaystyle|textstyle|limits|rm|bf|it){_END}\.?"), ""),
    (re.compile(rf"\\(?:boxed|fbox){_END}"), ""),
    (re.compile(r"\\mathrm\s*\{\s*([eid])\s*\}"), r"\1"),
    (re.compile(r"\\(?:text(?:rm|bf|it|normal|sf|tt)?|math(?:rm|bf|it|sf|tt)|mbox)\s*\{"), r"\\text{"),
    (re.compile(rf"(?<=\d){_GAP}\s*(?=\d{{3}}(?!\d))"), ""),
    (re.compile(r"(?<![\d.])(\d{1,3})((?: \d{3})+)(?![\d.])"), lambda m: m[1] + m[2].replace(" ", "")),
    (re.compile(rf"(?<!\\)\\(?:[,;:! ]|q?quad{_END}|hspace\s*\{{[^{{}}]*\}})|~"), " "),
    (re.compile(r",?\s*\\text\s*\{\s*,?\s*(?:and|or)\s*\}\s*|(?:,\s*|\s+)(?:and|or)\s+|\s*\\(?:lor|vee)" + _END), ","),
    (re.compile(rf"\\(?:geqslant|geqq|geq){_END}|>="), r"\\ge "),
    (re.compile(rf"\\(?:leqslant|leqq|leq){_END}|<="), r"\\le "),
    (re.compile(rf"\\gt{_END}|&gt;"), ">"),
    (re.compile(rf"\\lt{_END}|&lt;"), "<"),
    (re.compile(rf"\\neq{_END}|\\not\s*=|!="), r"\\ne "),
    (re.compile(rf"\\(?:varnothing|empty){_END}"), r"\\emptyset "),
    (re.compile(rf"\\bigcup{_END}"), r"\\cup "),
    (re.compile(rf"\\lbrace{_END}"), r"\\{"),
    (re.compile(rf"\\rbrace{_END}"), r"\\}"),
    (re.compile(rf"\\langle{_END}"), "("),
    (re.compile(rf"\\rangle{_END}"), ")"),
    (re.compile(rf"\\[lr]?vert{_END}"), "|"),
    (re.compile(rf"\\colon{_END}"), ":"),
    (re.compile(r"\\(?:bar|dot)\s*\{(\d+)\}"), r"\\overline{\1}"),
    (re.compile(r"(?<![\w.])(\d+\.\d*)\((\d+)\)"), r"\1\\overline{\2}"),
    (re.compile(r"\\%|\s*\\text\s*\{\s*(?:\\?%|percent)\s*\}|(?<=\d)\s*percent\b"), "%"),
    (re.compile(r"\^\s*\{?\s*\\circ\s*\}?"), r"\\degree "),
    (re.compile(rf"\s*\\text\s*\{{\s*degrees?\s*\}}|\\degree{_END}|(?<=\d)\s*degrees?\b"), r"\\degree "),
    (re.compile(r"\*\*"), "^"),
    (re.compile(r"(?<![\w\\}])(\d+(?:\.\d+)?)[eE]([-+]?\d+)"), r"\1\\cdot 10^{\2}"),
    (re.compile(rf"(?<=\d)\s*(?:\\text\s*\{{\s*)?({'|'.join(_POWERS)})\b(?:\s*\}})?"), _power_of_ten),
    (re.compile(r"(?<=\d)\s*(?:\\text\s*\{\s*to\s*\}|\bto\b)\s*(?=\d)"), ":"),
    (re.compile(rf"\\[dtc]frac{_END}"), r"\\frac"),
    _FRACTION,
    _FRACTION,  # again, for those inside of others
    (re.compile(r"(?<![\\A-Za-z])(sqrt|sin|cos|tan|ln|log|exp|pi|infty)(?![A-Za-z])"), r"\\\1 "),
    (re.compile(r"(?<![A-Za-z\\])(?:inf|infinity|oo)(?![A-Za-z])"), r"\\infty "),
    (re.compile(r"\\sqrt\s*\(([^()]*)\)"), r"\\sqrt{\1}"),
    (re.compile(rf"\\sqrt\s*({_UNBRACED})"), r"\\sqrt{\1}"),
    (re.compile(r"\+\s*\\infty"), r"\\infty"),
    (re.compile(r"(?<![\d.])\.(?=\d)"), "0."),
    (re.compile(r"\s+"), " "),
]  # fmt: skip
_OPENING = frozenset({"(", "[", "{", r"\{", r"\begin"})
_CLOSING = frozenset({")", "]", "}", r"\}", r"\end"})
_TOKEN = re.compile(r"\\[A-Za-z]+|\\.|.", re.DOTALL)


def clean(text: str) -> str:
    """The answer in one spelling: no control characters, markdown, currency, spacing commands or thousands marks."""
    text = _SUPERSCRIPT_RUN.sub(lambda run: "^{" + "".join(_SUPERSCRIPTS[c] for c in run[0]) + "}", text)
    text = unicodedata.normalize("NFKC", text.translate(_CHARACTERS))
    text = "".join(c if unicodedata.category(c)[0] != "C" else " " if c in "\n\t" else "" for c in text)
    text = _strip_markdown(text.strip())
    for pattern, replacement in _RULES:
        text = pattern.sub(replacement, text)
    return text.strip(" ,;:.")


def split(text: str, separators: Collection[str]) -> tuple[list[str], list[str]]:
    """The parts of the text between separators that stand outside of all brackets, and the separators found."""
    parts, found, depth, begin = [], [], 0, 0
    for token in _TOKEN.finditer(text):
        if token[0] in _OPENING:
            depth += 1
        elif token[0] in _CLOSING:
            depth -= 1
        elif depth == 0 and token[0] in separators:
            parts.append(text[begin : token.start()])
            found.append(token[0])
            begin = token.end()
    return [*parts, text[begin:]], found


def bracketed(text: str) -> tuple[str, str, str] | None:
    r"""Opening, content and closing of a text that one pair of brackets encloses: `[0, 1)`, `\{1, 2\}`, `{5}`."""
    tokens = list(_TOKEN.finditer(text))
    if len(tokens) < 2 or tokens[0][0] not in _OPENING or tokens[-1][0] not in _CLOSING:
        return None
    depth = 0
    for token in tokens[:-1]:
        depth += (token[0] in _OPENING) - (token[0] in _CLOSING)
        if depth == 0:
            return None
    return tokens[0][0], text[tokens[0].end() : tokens[-1].start()].strip(), tokens[-1][0]


def _strip_markdown(text: str) -> str:
    for mark in ("**", "__", "`", "*", "_"):
        if text.startswith(mark) and text.endswith(mark) and len(text) > 2 * len(mark):
            text = text[len(mark) : -len(mark)].strip()
    return text
