"""Where the answer stands in a completion. Pure, linear in the text's length, and total: no string raises."""

import re

MAX_STATED_CHARS = 1000
"""A stated answer is looked for in so many characters after the words that announce it."""

_BOX_TOKENS = re.compile(r"\\(?:boxed|fbox)(?![A-Za-z])\s*|\\[\s\S]|[{}]")
_BARE_WORD = re.compile(r"(?:(?!\\[)\]])[^\s${}])*")
_MARKER = re.compile(
    # The answer to this is, **Answer:**
    r"\b(?:final\s+)?(?:answers?|result)\b(?:[^.:=\n]{0,60}?\s(?:is|are)\b|[^\w\n]{0,4}[:=])"
    r"|\bfinal\s+answer\b"
    r"|^\W{0,4}A\W{0,3}:"
    r"|^[ \t]*\#{4}(?!\#)",
    re.IGNORECASE | re.MULTILINE,
)
_ANSWER_TAG = re.compile(r"<answer>([^<]*(?:<(?!/?answer>)[^<]*)*)</answer>", re.IGNORECASE)
_SENTENCE_END = re.compile(r"\.(?=\s|$)|\n|,?\s(?:because|since|as|which|so|where)\s")
_MATH = re.compile(r"\$+([^$]+)\$|\\\((.+?)\\\)|\\\[(.+?)\\\]", re.DOTALL)
_DECORATION = " \t\r\n*_`:=>"


def last_boxed(text: str) -> str | None:
    r"""The content of the last \boxed or \fbox; None where there is none, or the last one is unclosed.

    A box inside another belongs to the outer one. Without braces (`\boxed 5`) a box holds the next word.
    """
    last_start = -1
    closed: list[tuple[int, int]] = []  # begin and end of the contents, in the order of their ends
    open_braces: list[int] = []  # where the content of each open brace begins if it is a box's, else -1
    box_brace = -1  # where the brace of the box just seen would stand
    for token in _BOX_TOKENS.finditer(text):
        if token[0] == "{":
            open_braces.append(token.end() if token.start() == box_brace else -1)
        elif token[0] == "}":
            begin = open_braces.pop() if open_braces else -1
            if begin >= 0:
                closed.append((begin, token.start()))
        elif len(token[0]) > 2:
            box_brace = token.end()
            last_start = box_brace + (text[box_brace : box_brace + 1] == "{")
    if last_start == box_brace >= 0:
        word = _BARE_WORD.match(text, box_brace)
        closed.extend([word.span()] if word and word[0] else [])
    last = next((span for span in closed if span[0] == last_start), None)
    if last is None:
        return None
    begin, end = min(span for span in closed if span[0] <= last[0] and last[1] <= span[1])
    return text[begin:end].strip()


def stated_answer(text: str) -> str | None:
    """What follows the last "The answer is", "Final answer:", `A:` or `####`, up to the sentence's end; else None.

    An `<answer>` tag, if there is one, counts as the statement.
    """
    if tags := _ANSWER_TAG.findall(text):
        return tags[-1].strip() or None
    for marker in reversed(list(_MARKER.finditer(text))):
        following = text[marker.end() : marker.end() + MAX_STATED_CHARS].lstrip(_DECORATION)
        stated = _SENTENCE_END.split(following, maxsplit=1)[0].strip(_DECORATION)
        if stated:
            return stated
    return None


def final_answer(text: str, *, accept_stated: bool) -> str | None:
    """The last box's content; without any box, and if allowed, the stated answer. None where there is no answer."""
    if has_box(text) or not accept_stated:
        return last_boxed(text)
    return stated_answer(text)


def has_box(text: str) -> bool:
    """Whether a box is begun, closed or not."""
    return "\\boxed" in text or "\\fbox" in text


def first_math(text: str) -> str | None:
    r"""The first formula between dollars, \( \) or \[ \] in a short text; None where there is none."""
    found = _MATH.search(text[:MAX_STATED_CHARS])
    return next(filter(None, found.groups())).strip() if found else None


def has_think_block(text: str) -> bool:
    """Whether the completion is one `<think>...</think>` block followed by an answer (the format of R1-like models)."""
    before, opening, rest = text.partition("<think>")
    thought, closing, answer = rest.partition("</think>")
    is_single = "<think>" not in thought + answer and "</think>" not in before + answer
    return bool(opening and closing and thought.strip() and answer.strip()) and not before.strip() and is_single
