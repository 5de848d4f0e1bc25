import json
import re
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerBase

from sgpo_jax.config import DataConfig, SourceConfig
from sgpo_jax.data.queries import LoadedQueries, load_queries, overlap
from sgpo_jax.types import Query, UserError


def write(path: Path, rows: list[dict[str, object]]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def load(
    tokenizer: PreTrainedTokenizerBase, *sources: SourceConfig | str, seed: int = 0, **knobs: object
) -> LoadedQueries:
    read = [SourceConfig(path=source) if isinstance(source, str) else source for source in sources]
    knobs = {"template": "plain", **knobs}
    return load_queries(read, DataConfig(train=(SourceConfig(path="unread"),), **knobs), tokenizer, seed)


def questions(loaded: LoadedQueries) -> list[str]:
    return [query.question for query in loaded.queries]


def qa(*pairs: tuple[str, str]) -> list[dict[str, object]]:
    return [{"question": question, "answer": answer} for question, answer in pairs]


def test_a_query_has_all_that_later_stages_need(tmp_path: Path, tokenizer: PreTrainedTokenizerBase) -> None:
    row = {"question": "Which?", "gold": "B", "kind": "choice", "metadata": {"choices": ["x", "y"]}}
    path = write(tmp_path / "rows.jsonl", [row])
    (query,) = load(tokenizer, SourceConfig(path=path, name="mine")).queries
    assert (query.question, query.gold, query.kind, query.source) == ("Which?", "B", "choice", "mine")
    assert query.metadata == {"choices": ["x", "y"]}
    assert query.prompt == "Which?\n\nA. x\nB. y"
    assert list(query.prompt_ids) == tokenizer(query.prompt)["input_ids"]


def test_query_id_depends_on_question_choices_and_gold_alone(
    tmp_path: Path, tokenizer: PreTrainedTokenizerBase
) -> None:
    rows = qa(("1 + 1?", "2"), ("1 + 1 ?", "2"), ("2 + 2?", "4"))
    here = load(tokenizer, write(tmp_path / "here.jsonl", rows)).queries
    there = load(tokenizer, write(tmp_path / "there.jsonl", qa((" 1 +  1?\n", "2 ")))).queries
    assert here[0].query_id == there[0].query_id
    assert len({query.query_id for query in here}) == 3
    assert here[0].query_id == "4af7124203825bd5"  # stable over runs and versions: profiles refer to it
    choices = [
        {"question": "Which?", "gold": "A", "kind": "choice", "metadata": {"choices": list(texts)}}
        for texts in ("xy", "yx")
    ]
    assert len(load(tokenizer, write(tmp_path / "choices.jsonl", choices)).queries) == 2


def test_duplicates_are_merged_over_sources(tmp_path: Path, tokenizer: PreTrainedTokenizerBase) -> None:
    first = write(tmp_path / "first.jsonl", qa(("a", "1"), ("b", "2"), (" a\n", "1")))
    second = write(tmp_path / "second.jsonl", qa(("b", "2"), ("c", "3")))
    loaded = load(tokenizer, first, second)
    assert [(query.question, query.source) for query in loaded.queries] == [
        ("a", "first"),
        ("b", "first"),
        ("c", "second"),
    ]
    assert [source.dropped for source in loaded.report.sources] == [{"duplicate": 1}, {"duplicate": 1}]
    assert loaded.report.lines() == [
        f"first: 2 queries of 3 rows; 1 duplicate (first {first}:3)",
        f"second: 1 queries of 2 rows; 1 duplicate (first {second}:1)",
    ]


def test_conflicting_answers_are_reported_and_dropped(tmp_path: Path, tokenizer: PreTrainedTokenizerBase) -> None:
    first = write(tmp_path / "first.jsonl", qa(("a", "1"), ("b", "2"), ("a", "1")))
    second = write(tmp_path / "second.jsonl", qa(("a", "-1"), ("c", "3")))
    loaded = load(tokenizer, first, second)
    assert questions(loaded) == ["b", "c"]
    (conflict,) = loaded.report.conflicts
    assert (conflict.golds, conflict.where) == (("1", "-1"), (f"{first}:1", f"{second}:1"))
    assert [source.dropped for source in loaded.report.sources] == [
        {"conflicting answers": 2},
        {"conflicting answers": 1},
    ]
    assert loaded.report.lines()[-1] == (f"conflicting answers, dropped: 'a': '1' ({first}:1), '-1' ({second}:1)")


def test_questions_with_many_right_answers_do_not_conflict(tmp_path: Path, tokenizer: PreTrainedTokenizerBase) -> None:
    entries = [
        {"question": "Reach 24 with 4, 6.", "answer": answer, "metadata": {"source_dataset": "countdown"}}
        for answer in ("4*6", "6*4")
    ]
    loaded = load(tokenizer, write(tmp_path / "rows.jsonl", entries))
    assert [query.gold for query in loaded.queries] == ["4*6"]
    assert loaded.report.sources[0].dropped == {"duplicate": 1}


def test_long_prompts_are_counted(tmp_path: Path, tokenizer: PreTrainedTokenizerBase) -> None:
    path = write(tmp_path / "rows.jsonl", qa(("x" * 10, "1"), ("y" * 11, "1")))
    loaded = load(tokenizer, path, max_prompt_tokens=10)
    assert questions(loaded) == ["x" * 10]
    assert loaded.report.sources[0].dropped == {"prompt too long": 1}


def test_language_filter_is_a_knob(tmp_path: Path, tokenizer: PreTrainedTokenizerBase) -> None:
    path = write(tmp_path / "rows.jsonl", qa(("Find x.", "1"), ("求 x", "1")))
    assert len(load(tokenizer, path).queries) == 2
    loaded = load(tokenizer, path, language="english")
    assert questions(loaded) == ["Find x."]
    assert loaded.report.sources[0].dropped == {"not English": 1}


def test_refused_types_are_counted_by_type(tmp_path: Path, tokenizer: PreTrainedTokenizerBase) -> None:
    types = ["open-ended-qa", "relation_extraction", "open-ended-qa", "true_or_false"]
    rows = [{"question": f"q{n}", "type": name, "answerKey": "", "answer": "Yes"} for n, name in enumerate(types)]
    path = write(tmp_path / "rows.jsonl", rows)
    (report,) = load(tokenizer, path).report.sources
    assert report.dropped == {"SciKnowEval type 'open-ended-qa'": 2, "SciKnowEval type 'relation_extraction'": 1}
    assert report.first_dropped["SciKnowEval type 'relation_extraction'"] == f"{path}:2"


def test_max_queries_is_drawn_with_the_seed(tmp_path: Path, tokenizer: PreTrainedTokenizerBase) -> None:
    path = write(tmp_path / "rows.jsonl", qa(*((f"q{number}", "1") for number in range(100))))
    source = SourceConfig(path=path, max_queries=10)
    drawn = [questions(load(tokenizer, source, seed=seed)) for seed in (0, 0, 1)]
    assert len(drawn[0]) == 10
    assert drawn[0] == drawn[1] != drawn[2]
    assert drawn[0] == sorted(drawn[0], key=lambda question: int(question[1:]))
    assert load(tokenizer, source).report.lines() == ["rows: 10 queries of 100 rows; 90 beyond max_queries"]


def test_no_query_left_says_which_filter_took_how_many(tmp_path: Path, tokenizer: PreTrainedTokenizerBase) -> None:
    rows = qa(("求 x", "1"), ("a", "1"), ("a", "2"), ("x" * 50, "1"), ("b", ""))
    path = write(tmp_path / "rows.jsonl", rows)
    expected = (
        rf"no query is left of the data: rows: 0 queries of 5 rows; 1 not English \(first {re.escape(path)}:1\); "
    )
    expected += r"1 empty question or answer .*; 2 conflicting answers .*; 1 prompt too long"
    with pytest.raises(UserError, match=expected):
        load(tokenizer, path, language="english", max_prompt_tokens=20)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None, max_examples=50)
@given(
    st.lists(st.tuples(st.sampled_from(["a", "a ", "b", "c", "求", "long" * 9, ""]), st.sampled_from(["1", "2", ""]))),
    st.integers(1, 3),
)
def test_every_row_is_accounted_for(
    tmp_path: Path, tokenizer: PreTrainedTokenizerBase, pairs: list[tuple[str, str]], max_queries: int
) -> None:
    """Against a plain reading of the rules, row by row."""
    path = write(tmp_path / "rows.jsonl", [*qa(*pairs), *qa(("survivor", "1"))])
    source = SourceConfig(path=path, max_queries=max_queries)
    loaded = load(tokenizer, source, language="english", max_prompt_tokens=20)
    (report,) = loaded.report.sources
    assert report.num_rows == len(pairs) + 1 == report.num_queries + sum(report.dropped.values())
    golds: dict[str, set[str]] = {"survivor": {"1"}}
    for question, gold in pairs:
        if question and gold and question != "求":
            golds.setdefault(question.strip(), set()).add(gold)
    left = {question for question, answers in golds.items() if len(answers) == 1 and len(question) <= 20}
    assert report.num_queries == min(len(left), max_queries)
    assert set(questions(loaded)) <= left
    assert len(loaded.report.conflicts) == sum(len(answers) > 1 for answers in golds.values())


# Contamination.


def query(question: str, source: str = "train", **other: object) -> Query:
    return Query(
        query_id="", question=question, gold="1", kind="math", source=source, prompt="", prompt_ids=(), **other
    )


POLYNOMIAL = (
    "Let the polynomial $p(x) = x^2 + 12x - 5$ have the roots $r$ and $s$. Find $\\dfrac{1}{r^{2}} + \\frac{1}{s^2}.$"
)


@pytest.mark.parametrize(
    ("other", "is_exact"),
    [
        (POLYNOMIAL, True),
        (
            "Let the polynomial \\(p(x)=x^2+12x-5\\)  have the roots \\(r\\) and \\(s\\).\n\nFind "
            "$$\\frac 1{r^2}+\\frac 1{s^2}$$",
            True,
        ),
        (f"{POLYNOMIAL} The original answer is \\frac{{m}}{{n}}, please give the value of m + n.", False),
        (f"Consider the following. {POLYNOMIAL}", False),
    ],
)
def test_overlap_sees_through_typesetting_and_additions(other: str, is_exact: bool) -> None:
    (found,) = overlap([query("What is 2 + 2?"), query(other)], [query("New?", "test"), query(POLYNOMIAL, "test")])
    assert (found.train.question, found.evaluation.question, found.is_exact) == (other, POLYNOMIAL, is_exact)
    assert found.line().startswith("test: 'Let the polynomial $p(x) = x^2")


@pytest.mark.parametrize(
    "other",
    [
        POLYNOMIAL.replace("+ 12x", "- 12x"),
        POLYNOMIAL.replace("12", "13"),
        POLYNOMIAL.replace("x^2", "x^3"),
        POLYNOMIAL[:70],
    ],
)
def test_other_problems_do_not_overlap(other: str) -> None:
    assert not overlap([query(other)], [query(POLYNOMIAL, "test")])


def test_short_questions_are_not_found_inside_others() -> None:
    assert not overlap([query("Find x. What is 2 + 2?")], [query("What is 2 + 2?")])
    assert overlap([query("what is 2+2")], [query("What is 2 + 2?")])


def test_no_question_is_found_across_two_others() -> None:
    assert not overlap([query(POLYNOMIAL[:50]), query(POLYNOMIAL[50:])], [query(POLYNOMIAL)])


def test_overlap_of_choices_compares_the_options_in_any_order() -> None:
    def choice(*choices: str) -> Query:
        row = query("Which of these molecules is the product?", metadata={"choices": list(choices)})
        return Query(**{**{name: getattr(row, name) for name in row.__slots__}, "kind": "choice"})

    assert overlap([choice("CCO", "CO")], [choice("CO", "CCO")])
    assert not overlap([choice("CCO", "CO")], [choice("CCO", "CN")])
