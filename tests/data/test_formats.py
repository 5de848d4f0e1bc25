import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sgpo_jax.data.formats import Example, Refusal, bare_question, to_example
from sgpo_jax.data.sources import LocatedRow
from sgpo_jax.types import UserError

QUESTION = "What is $1 + 1$?"


def convert(values: dict[str, Any], kind: str = "auto") -> Example | Refusal:
    return to_example(LocatedRow("rows.jsonl:7", values), kind)


def example(values: dict[str, Any], kind: str = "auto") -> Example:
    found = convert(values, kind)
    assert isinstance(found, Example)
    return found


def refusal(values: dict[str, Any], kind: str = "auto") -> str:
    found = convert(values, kind)
    assert isinstance(found, Refusal)
    assert found.where == "rows.jsonl:7"
    return found.reason


def verl(content: Any = QUESTION, gold: Any = "2", **other: Any) -> dict[str, Any]:
    prompt = [{"role": "user", "content": content}]
    return {"prompt": prompt, "reward_model": {"ground_truth": gold, "style": "rule"}, "ability": "math", **other}


def sciknoweval(question_type: str, **other: Any) -> dict[str, Any]:
    empty = {"choices": {"text": [], "label": []}, "answerKey": "", "answer": ""}
    return {"question": QUESTION, "type": question_type, "domain": "Physics", **empty, **other}


# Question and answer.


@pytest.mark.parametrize(
    ("row", "gold"),
    [
        ({"problem": QUESTION, "answer": "\\frac{1}{2}", "solution": "long", "level": None}, "\\frac{1}{2}"),
        ({"question": QUESTION, "gold": "025"}, "025"),
        ({"question": QUESTION, "answer": 204}, "204"),
        ({"question": QUESTION, "answer": 204.0}, "204"),
        ({"question": QUESTION, "answer": 0.25}, "0.25"),
        ({"question": QUESTION, "answer": "He sold <<4/2=2>>2.\n#### 2"}, "2"),
        ({"question": QUESTION, "answer": "#### -1,234,567.5 "}, "-1234567.5"),
        ({"question": QUESTION, "answer": "so\n#### 1,2"}, "1,2"),
        ({"question": QUESTION, "gold": "#### 2"}, "#### 2"),
    ],
)
def test_question_and_answer(row: dict[str, Any], gold: str) -> None:
    assert example(row) == Example(QUESTION, gold, "math", "rows.jsonl:7")


def test_row_with_kind_and_metadata() -> None:
    found = example({"question": "3+4=", "gold": "7", "kind": "exact", "metadata": {"answer_after": "="}})
    assert (found.kind, found.metadata) == ("exact", {"answer_after": "="})


def test_configured_kind_replaces_the_rows() -> None:
    assert example({"question": "q", "gold": "7", "kind": "exact"}, "numeric").kind == "numeric"
    assert example(verl(), "my.rewards:score").kind == "my.rewards:score"


def test_row_may_not_name_code_to_run() -> None:
    with pytest.raises(UserError, match=r"rows\.jsonl:7: kind='os:system', allowed in a row is math, exact"):
        convert({"question": "q", "answer": "a", "kind": "os:system"})


# verl and DAPO.


@pytest.mark.parametrize(
    "text",
    [
        QUESTION,
        f"  {QUESTION}\n",
        "Solve the following math problem step by step. The last line of your response should be of the form Answer: "
        f"$Answer (without quotes) where $Answer is the answer to the problem.\n\n{QUESTION}\n\n"
        'Remember to put your answer on its own line after "Answer:".',
        f'{QUESTION} Let\'s think step by step and output the final answer after "####".',
        f"{QUESTION} Let's think step by step and output the final answer within \\boxed{{}}.",
        f"{QUESTION}\nPlease reason step by step, and put your final answer within \\boxed{{}}.",
    ],
)
def test_instructions_around_the_question_are_removed(text: str) -> None:
    assert bare_question(text) == QUESTION
    assert example(verl(text)) == Example(QUESTION, "2", "math", "rows.jsonl:7")


@pytest.mark.parametrize(
    "text",
    [
        "Solve the following math problem: what is 1 + 1?",
        "Solve the following math problem step by step.\nWhat is 1 + 1?",
        "Remember to put your answer on its own line after you found it. What is 1 + 1?",
        "Ann says: let's think step by step, and the answer will come.\nHow many steps?",
        "If the answer is of the form $m/n$, find $m+n$. Please reason step by step.",
    ],
)
def test_questions_that_sound_alike_stay_whole(text: str) -> None:
    assert bare_question(text) == text


def test_verl_system_message_and_text_prompt() -> None:
    row = verl()
    row["prompt"].insert(0, {"role": "system", "content": "Box it."})
    assert example(row).question == QUESTION
    assert example({**verl(), "prompt": QUESTION}).question == QUESTION


@pytest.mark.parametrize(
    "prompt",
    [
        [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}, {"role": "user", "content": "c"}],
        [{"role": "system", "content": "a"}],
        [],
        ["a"],
        5,
    ],
)
def test_verl_prompt_must_be_one_user_message(prompt: Any) -> None:
    with pytest.raises(UserError, match=r"rows\.jsonl:7: prompt "):
        convert({**verl(), "prompt": prompt})


def test_verl_rows_without_a_rule_are_refused_by_type() -> None:
    assert refusal(verl(ability="code")).startswith("verl ability 'code'")
    assert example(verl(ability="code"), "my.rewards:run").kind == "my.rewards:run"
    assert example(verl(ability="MATH")).kind == "math"
    model_judged = {"ground_truth": "2", "style": "model"}
    assert refusal({**verl(), "reward_model": model_judged}) == "verl reward style 'model'"


# SciKnowEval.


def test_sciknoweval_choice() -> None:
    choices = {"text": [" 310 Å³\n", "299 Å³"], "label": ["A", "B"]}
    found = example(sciknoweval("mcq-2-choices", choices=choices, answerKey="B"))
    assert (found.kind, found.gold, found.metadata) == ("choice", "B", {"choices": ["310 Å³", "299 Å³"]})


def test_sciknoweval_choice_with_other_labels_becomes_letters() -> None:
    choices = {"text": ["w", "x", "y", "z"], "label": ["1", "2", "3", "4"]}
    assert example(sciknoweval("mcq-4-choices", choices=choices, answerKey="3")).gold == "C"


@pytest.mark.parametrize("answer", ["Yes", "No"])
def test_sciknoweval_true_or_false(answer: str) -> None:
    found = example(sciknoweval("true_or_false", answer=answer))
    assert found.metadata["choices"]["AB".index(found.gold)] == answer


def test_sciknoweval_filling() -> None:
    assert example(sciknoweval("filling", answer="-1.5e-3")).kind == "numeric"
    found = example(sciknoweval("filling", answer="2H2 + O2 = 2H2O"))
    assert (found.kind, found.gold) == ("exact", "2H2 + O2 = 2H2O")
    assert found.metadata == {"boxed": True}


@pytest.mark.parametrize(
    "row",
    [
        sciknoweval("open-ended-qa", answer="A derivation."),
        sciknoweval("relation_extraction", answer="(a, b)"),
        sciknoweval("true_or_false", answer="perhaps"),
        sciknoweval("mcq-4-choices", choices={"text": ["a", "b", "c"], "label": ["A", "B"]}, answerKey="A"),
        sciknoweval("mcq-4-choices", choices={"text": ["a", "b"], "label": ["A", "B"]}, answerKey="C"),
    ],
)
def test_sciknoweval_without_a_verifiable_answer_is_refused(row: dict[str, Any]) -> None:
    assert refusal(row).startswith("SciKnowEval ")


# reasoning-gym.


def test_reasoning_gym_entry_is_kept_for_its_scorer() -> None:
    entry = {
        "question": "How many legs?",
        "answer": None,
        "metadata": {"source_dataset": "leg_counting", "grid": ((1, 2),)},
    }
    found = example(entry)
    assert (found.kind, found.gold) == ("reasoning_gym", "")
    assert found.metadata == {"task": "leg_counting", "entry": entry}
    assert found.metadata["entry"]["metadata"]["grid"] == ((1, 2),)  # not lists


def test_reasoning_gym_scores_what_was_kept() -> None:
    reasoning_gym = pytest.importorskip("reasoning_gym")
    for task in ("leg_counting", "countdown", "arc_agi"):
        entry = reasoning_gym.create_dataset(task, size=1, seed=1)[0]
        metadata = example(entry).metadata
        assert reasoning_gym.get_score_answer_fn(metadata["task"])(entry["answer"], metadata["entry"]) == 1.0


# What is wrong is named.


@pytest.mark.parametrize(
    ("row", "kind", "message"),
    [
        ({"text": "q", "label": "a"}, "auto", r"unknown row format with the keys 'label', 'text'; known are verl/DAPO"),
        ({}, "auto", r"unknown row format"),
        ({"question": ["q"], "answer": "a"}, "auto", r"question is of type list"),
        ({"question": "q", "answer": True}, "auto", r"answer is of type bool"),
        ({"question": "q", "answer": math.nan}, "auto", r"answer=nan is no finite number"),
        ({"question": "q", "answer": 10**5000}, "auto", r"answer cannot be written as text"),
        ({"question": "\ud800", "answer": "a"}, "auto", r"question cannot be written as text"),
        ({"question": "q", "answer": "a", "metadata": "m"}, "auto", r"metadata is of type str"),
        ({"question": "q", "answer": "a", "metadata": {"x": math.inf}}, "auto", r"metadata is not JSON"),
        ({"question": "q", "answer": "a", "metadata": {"x": "\udfff"}}, "auto", r"metadata is not JSON"),
        ({"question": "q", "answer": "a", "metadata": {"x": {1}}}, "auto", r"metadata is not JSON"),
        ({"question": "q", "answer": "a"}, "choice", r"kind choice needs metadata\.choices"),
        (
            {"question": "q", "answer": "c", "metadata": {"choices": ["x", "y"]}},
            "choice",
            r"'c' is no letter from A to B",
        ),
        ({"question": "q", "answer": "a"}, "reasoning_gym", r"kind reasoning_gym needs an entry"),
        (verl(gold=["2"]), "auto", r"ground_truth is of type list"),
        ({**verl(), "reward_model": "2"}, "auto", r"reward_model is of type str"),
        (sciknoweval("mcq-4-choices", choices=None), "auto", r"choices is of type NoneType"),
        (sciknoweval("mcq-4-choices", choices={"text": "a", "label": "A"}), "auto", r"no lists `label` and `text`"),
    ],
)
def test_wrong_rows_are_named(row: dict[str, Any], kind: str, message: str) -> None:
    with pytest.raises(UserError, match=rf"^rows\.jsonl:7: .*{message}") as caught:
        convert(row, kind)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "row",
    [
        {"question": " \n", "answer": "2"},
        {"question": "q", "answer": None},
        {"question": "q", "answer": "I do not know.\n####"},
        verl(gold=""),
        verl("Let's think step by step and output the final answer within \\boxed{}."),
        sciknoweval("filling"),
    ],
)
def test_gaps_are_refused_and_so_counted(row: dict[str, Any]) -> None:
    assert refusal(row) == "empty question or answer"


# Whatever a row holds, the outcome is an example, a refusal or a UserError of one line.

_scalars = st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(), st.just("a\udfff"))
_anything = st.recursive(
    _scalars | st.sampled_from(["user", "math", "choice", "filling", "mcq-4-choices", "A", "x" * 200_000, 10**400]),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(["role", "content", "ground_truth", "style", "text", "label", "choices"]), inner
        )
        | st.dictionaries(st.text(max_size=3), inner, max_size=3)
    ),
    max_leaves=8,
)
_keys = ("prompt", "reward_model", "ability", "question", "problem", "answer", "gold", "kind", "metadata", "type",
         "choices", "answerKey", "other")  # fmt: skip


def convert_or_complain(row: dict[str, Any], kind: str) -> Example | Refusal | UserError:
    try:
        return convert(row, kind)
    except UserError as error:
        return error


@given(
    st.dictionaries(st.sampled_from(_keys), _anything),
    st.sampled_from(["auto", "math", "choice", "numeric", "reasoning_gym", "my.module:function"]),
)
def test_no_row_raises_anything_else(row: dict[str, Any], kind: str) -> None:
    found = convert_or_complain(row, kind)
    if isinstance(found, UserError):
        assert str(found).startswith("rows.jsonl:7: ")
        assert len(str(found).splitlines()) == 1
        assert len(str(found)) < 1000
    if isinstance(found, Example):
        assert found.question
        assert found.question.encode()
        assert found.gold or found.kind == "reasoning_gym"


@given(_anything)
def test_every_format_meets_every_type(value: Any) -> None:
    """The keys of each format, all with the same arbitrary value: the converters themselves are reached."""
    for keys in (("prompt", "reward_model"), ("question", "type", "answerKey", "choices"), ("question", "answer")):
        convert_or_complain(dict.fromkeys(keys, value), "auto")
