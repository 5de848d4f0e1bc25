import numpy as np
from helpers import make_config, make_group, make_query

from sgpo_jax.training.sequences import is_informative, train_sequences

LOSS = make_config().train.loss


def test_advantages_are_over_the_judged_rollouts_of_each_group():
    groups = [
        make_group(make_query("a", (1, 2)), [True, False, False, False]),
        make_group(make_query("b"), [True, None, False], seed=1),
        make_group(make_query("c"), [True, True], seed=2),
        make_group(make_query("d"), [True, None], seed=3),
    ]
    sequences = train_sequences(groups, LOSS)
    assert [s.group_id for s in sequences] == [0] * 4 + [1] * 3 + [2] * 2 + [3] * 2
    np.testing.assert_allclose([s.advantage for s in sequences[:4]], [np.sqrt(3), *[-1 / np.sqrt(3)] * 3], atol=1e-5)
    np.testing.assert_allclose([s.advantage for s in sequences[4:7]], [1, 0, -1], atol=1e-5)
    assert [s.advantage for s in sequences[7:]] == [0.0] * 4
    assert [s.is_trained for s in sequences] == [True] * 5 + [False] + [True] * 4 + [False]
    assert list(sequences[0].prompt_ids_P) == [1, 2]
    np.testing.assert_array_equal(sequences[5].completion_ids_C, groups[1].rollouts[1].completion.token_ids_C)


def test_informative_is_what_has_an_advantage():
    for outcomes in ([True, False], [True, True], [False, None], [True, None, False], [None, None]):
        group = make_group(make_query("a"), outcomes)
        has_advantage = any(s.advantage != 0 for s in train_sequences([group], LOSS))
        assert is_informative(group) == has_advantage
