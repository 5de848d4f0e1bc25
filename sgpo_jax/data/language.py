"""The language filter: a rule that reads letters and a few words, and needs no model."""

import re
import unicodedata

# LaTeX commands are English words in every language.
_WORD = re.compile(r"(?<![\\a-zA-Z])[a-zA-Z]{2,}")
_MIN_WORDS = 8
_MAX_FOREIGN_FRAC = 0.01
_COMMON_WORDS = frozenset(
    "the of and is are if that for with what how many find be by which there each all from let show compute".split()  # noqa: SIM905
)


def is_english(text: str) -> bool:
    """Whether a question counts as English.

    At most one letter in a hundred is of another script than Latin and Greek: a mathematical question may have two
    Chinese characters as its only words, but a stray letter is a slip of the keyboard. And a text of at least eight
    words has one of the most common English words. So formulas alone pass, and so does a very short question in
    another language of Latin script.
    """
    words = _WORD.findall(text.casefold())
    num_foreign = sum(_is_foreign(letter) for letter in text if ord(letter) > 127 and letter.isalpha())
    num_letters = num_foreign + sum(map(len, words))
    if num_foreign > _MAX_FOREIGN_FRAC * num_letters:
        return False
    return len(words) < _MIN_WORDS or not _COMMON_WORDS.isdisjoint(words)


def _is_foreign(letter: str) -> bool:
    is_symbol = 0x2100 <= ord(letter) < 0x2150 or 0x1D400 <= ord(letter) < 0x1D800  # letterlike, mathematical
    is_modifier = unicodedata.category(letter) == "Lm"
    name = unicodedata.name(letter, "")
    is_western = name.startswith(("LATIN ", "GREEK ", "MICRO ", "FEMININE ", "MASCULINE ", "FULLWIDTH LATIN "))
    return not (is_symbol or is_modifier or is_western)
