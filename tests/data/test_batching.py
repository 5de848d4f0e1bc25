import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from sgpo_jax.data.batching import BatchShape, TrainSequence, batch_shape, completions_of, pack, padding_frac


def sequence(prompt, completion, number, *, is_trained=True):
    token_ids = np.arange(prompt + completion) + 100 * number + 1
    return TrainSequence(
        prompt_ids_P=token_ids[:prompt],
        completion_ids_C=token_ids[prompt:],
        sampler_logprobs_C=-token_ids[prompt:].astype(np.float32),
        advantage=float(number + 1),
        group_id=number // 2,
        is_trained=is_trained,
    )


@given(
    lengths=st.lists(st.tuples(st.integers(1, 10), st.integers(1, 20), st.booleans()), min_size=1, max_size=30),
    num_rows=st.integers(1, 5),
    extra=st.integers(0, 40),
)
@settings(deadline=None)
def test_every_token_stands_exactly_once_with_its_own_values(lengths, num_rows, extra):
    sequences = [sequence(p, c, i, is_trained=t) for i, (p, c, t) in enumerate(lengths)]
    batches = pack(sequences, BatchShape(num_rows, 30 + extra))
    assert len({batch.token_ids_BT.shape for batch in batches}) == 1
    found = {}
    for batch in batches:
        assert batch.num_loss_tokens == sum(s.num_loss_tokens for s in sequences)
        assert batch.num_sequences == sum(s.is_trained for s in sequences)
        for row in range(num_rows):
            for segment in range(1, int(batch.segment_ids_BT[row].max()) + 1):
                here = batch.segment_ids_BT[row] == segment
                [number] = set(batch.sequence_ids_BT[row][here].tolist())
                assert number not in found
                found[number] = {
                    name: getattr(batch, name)[row][here]
                    for name in batch.__dataclass_fields__
                    if name.endswith("_BT") and getattr(batch, name) is not None
                }
        empty = batch.segment_ids_BT == 0
        assert not batch.loss_mask_BT[empty].any()
        assert (batch.sequence_ids_BT[empty] == -1).all()
    assert sorted(found) == list(range(len(sequences)))
    for number, slots in found.items():
        own = sequences[number]
        prompt = len(own.prompt_ids_P)
        np.testing.assert_array_equal(slots["token_ids_BT"], [*own.prompt_ids_P, *own.completion_ids_C])
        np.testing.assert_array_equal(slots["positions_BT"], np.arange(own.num_tokens))
        np.testing.assert_array_equal(
            slots["loss_mask_BT"], [False] * prompt + [own.is_trained] * (own.num_tokens - prompt)
        )
        np.testing.assert_array_equal(slots["sampler_logprobs_BT"][prompt:], own.sampler_logprobs_C)
        assert (slots["advantages_BT"][:prompt] == 0).all()
        assert (slots["advantages_BT"][prompt:] == own.advantage).all()
        assert (slots["group_ids_BT"] == own.group_id).all()


def test_real_lengths_pack_tightly():
    """Completions with a long tail, mean about 30% of the longest: at most 8% of the slots stay empty."""
    rng = np.random.default_rng(0)
    lengths = np.clip(rng.lognormal(5.4, 0.6, 512), 10, 1000).astype(int)
    batches = pack([sequence(100, int(n), i) for i, n in enumerate(lengths)], batch_shape(100, 1000, 4400, 1))
    assert padding_frac(batches) < 0.08


def test_shape_fits_the_longest_sequence_and_the_devices():
    assert batch_shape(100, 1000, 4400, 1) == BatchShape(3, 1104)
    assert batch_shape(100, 1000, 100, 1) == BatchShape(1, 1104)
    assert batch_shape(100, 1000, 4400, 8) == BatchShape(8, 1104)
    assert batch_shape(100, 1000, 20000, 8) == BatchShape(16, 1104)


@given(lengths=st.lists(st.tuples(st.integers(1, 10), st.integers(1, 20)), min_size=1, max_size=30))
@settings(deadline=None)
def test_values_come_back_to_their_completions(lengths):
    sequences = [sequence(p, c, i) for i, (p, c) in enumerate(lengths)]
    batches = pack(sequences, BatchShape(2, 40))
    found = completions_of(sequences, batches, [batch.token_ids_BT for batch in batches])
    for s, values_C in zip(sequences, found, strict=True):
        np.testing.assert_array_equal(values_C, s.completion_ids_C)


def test_what_is_left_out_counts_in_the_denominators_only():
    kept, left_out = [sequence(2, 5, 0)], [sequence(2, 7, 1), sequence(2, 9, 2, is_trained=False)]
    (batch,) = pack(kept, BatchShape(1, 30), left_out)
    assert (batch.num_loss_tokens, batch.num_sequences) == (12, 2)
    assert int((batch.segment_ids_BT > 0).sum()) == 7
