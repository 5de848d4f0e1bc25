import sys
from pathlib import Path
from types import ModuleType

import pytest

from sgpo_jax.config import RewardsConfig
from sgpo_jax.rewards import reasoning_gym, resolve_verifier
from sgpo_jax.types import Judgement, UserError, Verdict

CUSTOM = """
from sgpo_jax.types import Judgement, Verdict

def score(gold, completion, metadata):
    return metadata["score"]

def verdict(gold, completion, metadata):
    return gold == completion

def judgement(gold, completion, metadata):
    return Judgement(Verdict.ERROR, detail="cannot say")

constant = 5
"""


@pytest.fixture
def custom(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "custom_rewards.py").write_text(CUSTOM)
    monkeypatch.syspath_prepend(tmp_path)
    yield
    sys.modules.pop("custom_rewards", None)


def test_built_in_kinds_judge():
    assert resolve_verifier("math")("1/2", r"\boxed{0.5}", {}).verdict is Verdict.CORRECT
    assert resolve_verifier("exact")("5", "5", {}).verdict is Verdict.CORRECT
    assert resolve_verifier("choice")("B", "(B)", {}).verdict is Verdict.CORRECT
    assert resolve_verifier("numeric")("5", "5.01", {}).verdict is Verdict.CORRECT


def test_the_configuration_reaches_the_math_verifier():
    for accepts in (True, False):
        judge = resolve_verifier("math", RewardsConfig(accept_stated_answer=accepts))
        assert (judge("5", "The answer is 5.", {}).verdict is Verdict.CORRECT) is accepts


@pytest.mark.parametrize(
    ("score", "verdict"),
    [(0.0, "wrong"), (0.79, "wrong"), (0.8, "correct"), (1.0, "correct"), (0, "wrong"), (1, "correct")],
)
def test_a_score_is_cut_at_the_threshold(custom, score: float, verdict: str):
    judge = resolve_verifier("custom_rewards:score", RewardsConfig(correct_threshold=0.8))
    assert judge("", "", {"score": score}) == Judgement(Verdict(verdict), reward=float(score))


@pytest.mark.parametrize("score", [-0.1, 1.1, float("nan"), "1", None])
def test_what_is_no_score_is_refused(custom, score: object):
    with pytest.raises(ValueError, match=r"score in \[0, 1\]"):
        resolve_verifier("custom_rewards:score")("", "", {"score": score})


def test_custom_functions_may_return_a_bool_or_a_judgement(custom):
    assert resolve_verifier("custom_rewards:verdict")("a", "a", {}) == Judgement(Verdict.CORRECT, reward=1.0)
    assert resolve_verifier("custom_rewards:verdict")("a", "b", {}) == Judgement(Verdict.WRONG, reward=0.0)
    assert resolve_verifier("custom_rewards:judgement")("a", "b", {}).detail == "cannot say"


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("maths", "did you mean math?"),
        ("zzz", "known are math, exact"),
        ("no_such_module:f", "no_such_module"),
        ("custom_rewards:missing", "missing"),
        ("custom_rewards:constant", "no function"),
        (":f", "cannot be imported"),
    ],
)
def test_unknown_kinds(custom, kind: str, message: str):
    with pytest.raises(UserError, match=message.replace("?", r"\?")) as caught:
        resolve_verifier(kind)
    assert "\n" not in str(caught.value)


def test_reasoning_gym_scores_the_answer_by_its_own_rule(monkeypatch: pytest.MonkeyPatch):
    gym = ModuleType("reasoning_gym")

    def get_score_answer_fn(task: str):
        if task != "chain_sum":
            raise ValueError(task)
        return lambda answer, entry: 1.0 if answer == entry["answer"] else 0.01

    gym.get_score_answer_fn = get_score_answer_fn  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "reasoning_gym", gym)
    reasoning_gym._scorer.cache_clear()
    judge = resolve_verifier("reasoning_gym")
    metadata = {"task": "chain_sum", "entry": {"answer": "4"}}
    for text in ("4", "<answer> 4 </answer>", r"\boxed{4}", "The answer is 4."):
        assert judge("4", text, metadata) == Judgement(Verdict.CORRECT, reward=1.0)
    assert judge("4", r"4 \boxed{", metadata) == Judgement(Verdict.WRONG, reward=0.01)
    with pytest.raises(UserError, match="no task 'sums'"):
        judge("4", "4", {"task": "sums", "entry": {}})
    reasoning_gym._scorer.cache_clear()


def test_reasoning_gym_that_is_missing_is_named(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "reasoning_gym", None)
    reasoning_gym._scorer.cache_clear()
    with pytest.raises(UserError, match="pip install reasoning-gym"):
        resolve_verifier("reasoning_gym")("4", "4", {"task": "chain_sum", "entry": {}})
