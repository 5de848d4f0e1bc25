"""avg@k, pass@k and maj@k on held-out questions (sGPO, arXiv 2606.08854, section 5). Charged to no ledger."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from sgpo_jax.algorithms.compute import TokenCounts
from sgpo_jax.algorithms.estimators import Interval, avg_at_k, bootstrap_interval, majority_at_k, pass_at_k
from sgpo_jax.rollouts.collect import Collector
from sgpo_jax.telemetry import progress
from sgpo_jax.types import FinishReason, GroupRequest, Purpose, Query, RolloutGroup, SamplingParams


@dataclass(frozen=True, slots=True)
class QuestionScore:
    """One question; avg and majority are over its judged samples, None where none was judged."""

    query_id: str
    num_samples: int
    num_judged: int
    num_correct: int
    num_truncated: int
    num_tokens: int
    avg: float | None
    majority: float | None


@dataclass(frozen=True, slots=True)
class SetScore:
    """One evaluation set. Means are over the questions that have a judged sample; the others are counted.

    avg: avg@k with its 95% interval over questions, None where nothing could be judged.
    pass_at: k' -> pass@k' for powers of two up to k, over the questions with at least k' judged samples.
    """

    num_samples: int
    num_questions: int
    num_unjudged: int
    avg: Interval | None
    pass_at: Mapping[int, float]
    majority: float
    truncated_frac: float
    completion_tokens: float
    counts: TokenCounts
    questions: tuple[QuestionScore, ...]

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def evaluate(
    sets: Mapping[str, Sequence[Query]],
    collector: Collector,
    sampling: SamplingParams,
    *,
    num_samples: int,
    visit: int,
    seed: int,
) -> dict[str, SetScore]:
    """Sample and score every question of every set.

    visit: tells evaluations of one run apart, so that each draws its own noise. seed: of the bootstrap.
    """
    scores = {}
    for name, queries in sets.items():
        requests = [GroupRequest(query, num_samples, Purpose.EVALUATE, visit=visit) for query in queries]
        groups = []
        with progress(f"evaluate {name}", len(queries)) as bar:
            for group in collector.collect(requests, sampling):
                groups.append(group)
                bar.advance()
        order = {query.query_id: i for i, query in enumerate(queries)}
        scores[name] = score_set(sorted(groups, key=lambda g: order[g.query.query_id]), num_samples, seed)
    return scores


def score_set(groups: Sequence[RolloutGroup], num_samples: int, seed: int) -> SetScore:
    questions = tuple(_score_question(group) for group in groups)
    judged = [question for question in questions if question.num_judged]
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    averages = np.array([question.avg for question in judged], np.float64)
    return SetScore(
        num_samples=num_samples,
        num_questions=len(questions),
        num_unjudged=len(questions) - len(judged),
        avg=bootstrap_interval(averages, seed=seed) if judged else None,
        pass_at=_pass_at(judged, num_samples),
        majority=_mean([question.majority for question in judged]),
        truncated_frac=_mean([r.completion.finish_reason is FinishReason.LENGTH for r in rollouts]),
        completion_tokens=_mean([r.num_tokens for r in rollouts]),
        counts=TokenCounts(
            generated=sum(group.num_tokens for group in groups),
            prompt_generated=sum(len(group.query.prompt_ids) for group in groups),
        ),
        questions=questions,
    )


def summary(scores: Mapping[str, SetScore]) -> dict[str, float]:
    """The figures of an evaluation as metrics, eval/SET/..."""
    metrics = {}
    for name, score in scores.items():
        if score.avg is None:
            continue
        metrics[f"eval/{name}/avg"] = score.avg.mean
        metrics |= {f"eval/{name}/pass@{k}": share for k, share in score.pass_at.items()}
        metrics[f"eval/{name}/majority"] = score.majority
    return metrics


def _score_question(group: RolloutGroup) -> QuestionScore:
    judged = [rollout for rollout in group.rollouts if rollout.is_judged]
    num_judged, num_correct = group.num_judged, group.num_correct
    return QuestionScore(
        query_id=group.query.query_id,
        num_samples=len(group.rollouts),
        num_judged=num_judged,
        num_correct=num_correct,
        num_truncated=sum(r.completion.finish_reason is FinishReason.LENGTH for r in group.rollouts),
        num_tokens=group.num_tokens,
        avg=avg_at_k(num_correct, num_judged) if judged else None,
        majority=majority_at_k([r.judgement.extracted for r in judged], [r.is_correct for r in judged])
        if judged
        else None,
    )


def _pass_at(questions: Sequence[QuestionScore], limit: int) -> dict[int, float]:
    scores = {}
    for k in (1 << i for i in range(limit.bit_length())):
        values = [pass_at_k(q.num_correct, q.num_judged, k) for q in questions if q.num_judged >= k]
        if values:
            scores[k] = _mean(values)
    return scores


def _mean(values: Sequence[Any]) -> float:
    return float(np.mean(values)) if values else 0.0
