"""Sources to queries: converted, filtered, merged, rendered, and an account of every row that did not become one."""

import hashlib
import json
import re
import unicodedata
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from transformers import PreTrainedTokenizerBase

from sgpo_jax.config import DataConfig, SourceConfig, source_name
from sgpo_jax.data.draw import draw
from sgpo_jax.data.formats import Example, Refusal, to_example
from sgpo_jax.data.language import is_english
from sgpo_jax.data.sources import read_rows
from sgpo_jax.data.templates import PromptTemplate
from sgpo_jax.types import Query, UserError

DUPLICATE = "duplicate"
CONFLICT = "conflicting answers"
TOO_LONG = "prompt too long"
NOT_DRAWN = "beyond max_queries"


@dataclass(frozen=True, slots=True)
class SourceReport:
    """What became of a source's rows: num_rows is num_queries and the sum of dropped, which counts by reason.

    first_dropped: the first row of each reason that is a finding about the row, by file and line.
    """

    name: str
    num_rows: int
    num_queries: int
    dropped: Mapping[str, int]
    first_dropped: Mapping[str, str]

    def line(self) -> str:
        return "; ".join(
            (f"{self.name}: {self.num_queries} queries of {self.num_rows} rows", *map(self._reason, self.dropped))
        )

    def _reason(self, reason: str) -> str:
        first = self.first_dropped.get(reason)
        return f"{self.dropped[reason]} {reason}" + (f" (first {first})" if first else "")


@dataclass(frozen=True, slots=True)
class Conflict:
    """One question that was found with several gold answers."""

    question: str
    golds: tuple[str, ...]
    where: tuple[str, ...]

    def line(self) -> str:
        rows = ", ".join(f"{gold!r} ({where})" for gold, where in zip(self.golds, self.where, strict=True))
        return f"conflicting answers, dropped: {self.question[:60]!r}: {rows}"


@dataclass(frozen=True, slots=True)
class DataReport:
    sources: tuple[SourceReport, ...]
    conflicts: tuple[Conflict, ...]

    def lines(self) -> list[str]:
        return [*(source.line() for source in self.sources), *(conflict.line() for conflict in self.conflicts)]


@dataclass(frozen=True, slots=True)
class LoadedQueries:
    """Queries in the order of their sources, each once."""

    queries: tuple[Query, ...]
    report: DataReport


@dataclass(slots=True)
class _Source:
    """One source on its way: the examples that are still in, and a count of those that are not."""

    config: SourceConfig
    num_rows: int = 0
    examples: list[Example] = field(default_factory=list)
    dropped: Counter[str] = field(default_factory=Counter)
    first_dropped: dict[str, str] = field(default_factory=dict)

    def drop(self, reason: str, where: str) -> None:
        self.dropped[reason] += 1
        self.first_dropped.setdefault(reason, where)

    def report(self, num_queries: int) -> SourceReport:
        return SourceReport(
            source_name(self.config), self.num_rows, num_queries, dict(self.dropped), dict(self.first_dropped)
        )


def load_queries(
    sources: Sequence[SourceConfig], data: DataConfig, tokenizer: PreTrainedTokenizerBase, seed: int
) -> LoadedQueries:
    """Read sources and render every question that can be trained or evaluated on, once.

    In this order: rows without a verifiable answer and those in another language than `data.language` are dropped;
    equal questions with equal answers are merged (the first row stays), with different answers all dropped, over
    all sources together; prompts longer than `data.max_prompt_tokens` are dropped; `max_queries` of a source are drawn
    with the seed. Equal means: up to white space. `data.train` is not read.
    Raises UserError: whatever read_rows and to_example raise; no query left, with what was dropped why.
    """
    template = PromptTemplate(data, tokenizer)
    read = [_read(source, data.language) for source in sources]
    conflicts = _merge(read)
    queries: list[Query] = []
    reports = []
    for source in read:
        kept = _draw(source, _render(source, template, data.max_prompt_tokens), seed)
        queries += kept
        reports.append(source.report(len(kept)))
    report = DataReport(tuple(reports), conflicts)
    if not queries:
        raise UserError(f"no query is left of the data: {' | '.join(source.line() for source in report.sources)}")
    return LoadedQueries(tuple(queries), report)


def _read(config: SourceConfig, language: str) -> _Source:
    source = _Source(config)
    for row in read_rows(config):
        source.num_rows += 1
        example = to_example(row, config.kind)
        if isinstance(example, Refusal):
            source.drop(example.reason, example.where)
        elif language == "english" and not is_english(example.question):
            source.drop("not English", example.where)
        else:
            source.examples.append(example)
    return source


def _merge(sources: Sequence[_Source]) -> tuple[Conflict, ...]:
    """Leave each question in once, and none that has several answers."""
    by_question: dict[str, dict[str, Example]] = defaultdict(dict)  # the first example of each answer
    for source in sources:
        for example in source.examples:
            by_question[_identity(example)].setdefault(_answer(example), example)
    for source in sources:
        kept = []
        for example in source.examples:
            answers = by_question[_identity(example)]
            if len(answers) > 1:
                source.drop(CONFLICT, example.where)
            elif answers[_answer(example)] is not example:
                source.drop(DUPLICATE, example.where)
            else:
                kept.append(example)
        source.examples = kept
    return tuple(_conflict(answers.values()) for answers in by_question.values() if len(answers) > 1)


def _conflict(examples: Iterable[Example]) -> Conflict:
    found = list(examples)
    golds, where = tuple(example.gold for example in found), tuple(example.where for example in found)
    return Conflict(found[0].question, golds, where)


def _render(source: _Source, template: PromptTemplate, max_prompt_tokens: int) -> list[Query]:
    prompts = [template.render(example) for example in source.examples]
    queries = []
    for example, prompt, prompt_ids in zip(source.examples, prompts, template.encode(prompts), strict=True):
        if len(prompt_ids) > max_prompt_tokens:
            source.drop(TOO_LONG, example.where)
        else:
            queries.append(_query(example, prompt, prompt_ids, source_name(source.config)))
    return queries


def _draw(source: _Source, queries: list[Query], seed: int) -> list[Query]:
    if source.config.max_queries is None:
        return queries
    drawn = draw((query.query_id for query in queries), source.config.max_queries, seed)
    kept = [query for query in queries if query.query_id in drawn]
    if len(kept) < len(queries):
        source.dropped[NOT_DRAWN] = len(queries) - len(kept)
    return kept


def _query(example: Example, prompt: str, prompt_ids: tuple[int, ...], source: str) -> Query:
    identity = json.dumps([_identity(example), _collapse(example.gold)])
    return Query(
        query_id=hashlib.sha256(identity.encode()).hexdigest()[:16],
        question=example.question,
        gold=example.gold,
        kind=example.kind,
        source=source,
        prompt=prompt,
        prompt_ids=prompt_ids,
        metadata=example.metadata,
    )


def _identity(example: Example) -> str:
    """What makes a question the same question: its text and its choices, up to white space."""
    choices = example.metadata["choices"] if example.kind == "choice" else ()
    return "\n".join(_collapse(text) for text in (example.question, *choices))


def _answer(example: Example) -> str:
    """What must agree where a question is found twice. A reasoning-gym entry's answer is one of possibly many."""
    return "" if example.kind == "reasoning_gym" else _collapse(example.gold)


def _collapse(text: str) -> str:
    return " ".join(text.split())


# Contamination.

_MIN_CONTAINED = 60  # characters of a normalised question; shorter ones may be contained in others by chance
_TYPESETTING = re.compile(r"\\(?:left|right|displaystyle|quad|qquad)(?![a-z])|\\[,;:! \[\]()]|[\s${}.,;:?!]+")


@dataclass(frozen=True, slots=True)
class Overlap:
    """An evaluation question that is also in the training data, word for word or inside a longer question."""

    train: Query
    evaluation: Query
    is_exact: bool

    def line(self) -> str:
        how = "equals" if self.is_exact else "is contained in"
        return f"{self.evaluation.source}: {self.evaluation.question[:60]!r} {how} a question of {self.train.source}"


def question_texts(source: SourceConfig) -> frozenset[str]:
    """The questions of a source in the form that `overlap` compares, whatever a run would drop of them included. No
    tokenizer is needed. Raises UserError as `load_queries`.
    """
    return frozenset(_normalise(example) for example in _read(source, "any").examples)


def overlap(train: Sequence[Query], evaluation: Sequence[Query]) -> tuple[Overlap, ...]:
    """The evaluation questions that are in the training data, at most one for each.

    Compared are texts, with their options in any order, without white space, punctuation and what only typesets
    (operators and signs stay: two problems that differ in a minus are two problems). Contained counts as well, since
    training sets append how to give the answer.
    """
    by_text: dict[str, Query] = {}
    for query in train:
        by_text.setdefault(_normalise(query), query)
    everything = "\1".join(by_text)
    found = []
    for query in evaluation:
        text = _normalise(query)
        if text in by_text:
            found.append(Overlap(by_text[text], query, is_exact=True))
        elif len(text) >= _MIN_CONTAINED and text in everything:
            container = next(other for known, other in by_text.items() if text in known)
            found.append(Overlap(container, query, is_exact=False))
    return tuple(found)


def _normalise(query: Query | Example) -> str:
    choices = sorted(query.metadata["choices"]) if query.kind == "choice" else ()
    text = unicodedata.normalize("NFKC", "\0".join((query.question, *choices))).casefold()
    return _TYPESETTING.sub("", text.replace("\\dfrac", "\\frac").replace("\\tfrac", "\\frac"))
