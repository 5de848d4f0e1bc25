"""Short ways to say a binary verdict."""

from sgpo_jax.types import Judgement, Verdict


def binary(is_correct: bool, extracted: str | None = None, detail: str | None = None) -> Judgement:
    """Correct with reward 1, or wrong with reward 0."""
    verdict = Verdict.CORRECT if is_correct else Verdict.WRONG
    return Judgement(verdict, reward=float(is_correct), extracted=extracted, detail=detail)


NO_ANSWER = binary(False, detail="no answer found")
