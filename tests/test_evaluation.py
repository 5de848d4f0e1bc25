import numpy as np
import pytest
from helpers import make_group, make_query

from sgpo_jax.evaluation import score_set, summary
from sgpo_jax.types import Purpose


def groups(*outcomes):
    return [make_group(make_query(f"q{i}"), list(row), purpose=Purpose.EVALUATE) for i, row in enumerate(outcomes)]


def test_scores_are_means_over_questions_of_judged_samples():
    score = score_set(groups([True, True, False, False], [False] * 4, [True, None, None, None], [None] * 4), 4, seed=0)
    assert [q.avg for q in score.questions] == [0.5, 0.0, 1.0, None]
    assert score.avg.mean == pytest.approx(0.5)
    assert (score.num_questions, score.num_unjudged) == (4, 1)
    # pass@1 = avg; pass@2 of 2 correct in 4 is 1 - C(2,2)/C(4,2) = 5/6, and the third question has too few samples
    assert score.pass_at == {1: pytest.approx(0.5), 2: pytest.approx(5 / 12), 4: pytest.approx(0.5)}
    assert score.majority == pytest.approx(np.mean([0.5, 0.0, 1.0]))
    assert score.counts.generated == 16 * 4


def test_nothing_judged_has_no_score():
    score = score_set(groups([None, None]), 2, seed=0)
    assert score.avg is None
    assert score.pass_at == {}
    assert summary({"s": score}) == {}


def test_summary_names_set_and_figure():
    metrics = summary({"s": score_set(groups([True, False]), 2, seed=0)})
    assert metrics == {"eval/s/avg": 0.5, "eval/s/pass@1": 0.5, "eval/s/pass@2": 1.0, "eval/s/majority": 0.5}
