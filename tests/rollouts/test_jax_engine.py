import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from helpers import VOCABULARY, make_query, tiny_model

from sgpo_jax.config import RolloutsConfig
from sgpo_jax.models.qwen import token_logprobs
from sgpo_jax.rollouts.engine import sample_seed
from sgpo_jax.rollouts.jax_engine import JaxEngine
from sgpo_jax.types import FinishReason, GroupRequest, Purpose, SamplingParams, UserError

STOP = 0
SAMPLING = SamplingParams(max_completion_tokens=12)


def make_engine(model=None, *, batch_size=8, decode_steps=3, prefill_tokens=32, seed=7, max_prompt_tokens=40):
    config = RolloutsConfig(batch_size=batch_size, decode_steps=decode_steps, prefill_tokens=prefill_tokens)
    return JaxEngine(
        model or tiny_model(), stop_ids=[STOP], max_prompt_tokens=max_prompt_tokens, config=config, run_seed=seed
    )


def queries(count, longest=20, seed=0):
    rng = np.random.default_rng(seed)
    return [
        make_query(f"q{i}", tuple(rng.integers(1, VOCABULARY, rng.integers(1, longest + 1)).tolist()))
        for i in range(count)
    ]


def completions_of(engine, requests, sampling=SAMPLING):
    """Everything that an engine gave, by query and sample index."""
    return {
        (group.request.query.query_id, completion.sample_index): completion
        for group in engine.generate(requests, sampling)
        for completion in group.completions
    }


def requests_for(some_queries, num_samples=3, purpose=Purpose.TRAIN, visit=0):
    return [GroupRequest(query, num_samples, purpose, visit) for query in some_queries]


def assert_same(left, right):
    assert left.keys() == right.keys()
    for key, completion in left.items():
        np.testing.assert_array_equal(completion.token_ids_C, right[key].token_ids_C)
        np.testing.assert_allclose(completion.sampler_logprobs_C, right[key].sampler_logprobs_C, atol=1e-5)


def test_completion_does_not_depend_on_its_neighbours():
    many = queries(9)
    together = completions_of(make_engine(), requests_for(many))
    assert len({tuple(c.token_ids_C) for c in together.values()}) > 15, "the model must not be degenerate"
    alone: dict = {}
    for query in many:
        alone |= completions_of(make_engine(), requests_for([query]))
    assert_same(together, alone)
    shuffled = completions_of(make_engine(batch_size=3, decode_steps=5, prefill_tokens=16), requests_for(many[::-1]))
    assert_same(together, shuffled)


@pytest.mark.parametrize(
    "other",
    [
        {"requests": {"purpose": Purpose.PROFILE}},
        {"requests": {"purpose": Purpose.EVALUATE}},
        {"requests": {"visit": 1}},
        {"engine": {"seed": 8}},
    ],
)
def test_purpose_visit_and_run_seed_each_change_the_noise(other):
    one_query = queries(1, seed=3)
    base = completions_of(make_engine(), requests_for(one_query, 6))
    changed = completions_of(
        make_engine(**other.get("engine", {})), requests_for(one_query, 6, **other.get("requests", {}))
    )
    same = [np.array_equal(base[key].token_ids_C, changed[key].token_ids_C) for key in base]
    assert not all(same)
    assert len({tuple(c.token_ids_C) for c in base.values()}) > 1, "samples of one group differ"


def test_sample_seeds_never_meet():
    query = make_query("q")
    seeds = {
        sample_seed(run, GroupRequest(query, 8, purpose, visit), index)
        for run in (0, 1)
        for purpose in Purpose
        for visit in range(5)
        for index in range(16)
    }
    assert len(seeds) == 2 * 3 * 5 * 16
    assert all(0 <= seed < 2**63 for seed in seeds)


def test_filling_up_a_group_gives_its_missing_samples():
    [query] = queries(1)
    whole = completions_of(make_engine(), [GroupRequest(query, 5, Purpose.TRAIN)])
    first = completions_of(make_engine(), [GroupRequest(query, 2, Purpose.TRAIN)])
    rest = completions_of(make_engine(), [GroupRequest(query, 3, Purpose.TRAIN, first_sample=2)])
    assert_same(whole, first | rest)


def test_stops_at_the_stop_token_or_at_the_limit():
    found = completions_of(make_engine(), requests_for(queries(12), 4))
    assert {c.finish_reason for c in found.values()} == {FinishReason.STOP, FinishReason.LENGTH}
    for completion in found.values():
        ids = completion.token_ids_C.tolist()
        assert STOP not in ids[:-1]
        assert len(ids) == len(completion.sampler_logprobs_C) <= SAMPLING.max_completion_tokens
        assert (ids[-1] == STOP) == (completion.finish_reason is FinishReason.STOP)
        if completion.finish_reason is FinishReason.LENGTH:
            assert len(ids) == SAMPLING.max_completion_tokens


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_sampler_logprobs_are_the_trainers(temperature):
    model = tiny_model(seed=2)
    sampling = SamplingParams(max_completion_tokens=12, temperature=temperature)
    some = queries(6, seed=5)
    prompts = {query.query_id: query.prompt_ids for query in some}
    for (query_id, _), completion in completions_of(make_engine(model), requests_for(some), sampling).items():
        ids_T = jnp.asarray([*prompts[query_id], *completion.token_ids_C])[None]
        length = ids_T.shape[1]
        found = token_logprobs(
            model,
            ids_T,
            jnp.arange(length)[None],
            jnp.ones((1, length), jnp.int32),
            temperature=temperature,
            chunk_tokens=64,
        )
        trainer_C = np.asarray(found.logprobs_BT)[0, len(prompts[query_id]) :]
        np.testing.assert_allclose(completion.sampler_logprobs_C, trainer_C, atol=1e-4)


def test_sampled_frequencies_follow_the_model():
    """The first token of many samples of one prompt against the model's own distribution."""
    model = tiny_model(seed=4, sharpness=3.0)
    query = make_query("q", (3, 5, 7))
    found = completions_of(make_engine(model, batch_size=64), requests_for([query], 4000), SamplingParams(1))
    counts_V = np.bincount([c.token_ids_C[0] for c in found.values()], minlength=VOCABULARY)
    hidden = model.hidden(jnp.asarray([[3, 5, 7]]), jnp.arange(3)[None], jnp.ones((1, 3), jnp.int32))
    logits_V = np.asarray(model.logits(hidden))[0, -1].astype(np.float64)
    probs_V = np.exp(logits_V) / np.exp(logits_V).sum()
    sigma_V = np.sqrt(probs_V * (1 - probs_V) / 4000)
    assert (np.abs(counts_V / 4000 - probs_V) < 5 * sigma_V + 1e-9).all()


def test_greedy_is_the_argmax_path():
    model = tiny_model(seed=6)
    query = make_query("q", (3, 5, 7, 2))
    [completion] = completions_of(
        make_engine(model), requests_for([query], 1), SamplingParams(8, temperature=0.0)
    ).values()
    ids = list(query.prompt_ids)
    for token in completion.token_ids_C:
        length = len(ids)
        hidden = model.hidden(jnp.asarray([ids]), jnp.arange(length)[None], jnp.ones((1, length), jnp.int32))
        assert int(jnp.argmax(model.logits(hidden)[0, -1])) == token
        ids.append(int(token))


def test_new_weights_are_used_and_stamped():
    engine, some = make_engine(), requests_for(queries(3))
    before = completions_of(engine, some)
    assert {c.policy_version for c in before.values()} == {0}
    engine.update_weights(nnx.state(tiny_model(seed=9)), 5, None)
    after = completions_of(engine, some)
    assert {c.policy_version for c in after.values()} == {5}
    assert_same(after, completions_of(make_engine(tiny_model(seed=9)), some))


def test_groups_come_as_they_finish_and_are_complete():
    requests = requests_for(queries(10), 4)
    groups = list(make_engine(batch_size=5).generate(requests, SAMPLING))
    assert sorted(g.request.query.query_id for g in groups) == sorted(r.query.query_id for r in requests)
    for group in groups:
        assert [c.sample_index for c in group.completions] == [0, 1, 2, 3]


@pytest.mark.parametrize("length", [0, 41])
def test_prompt_lengths_are_checked_before_anything_is_drawn(length):
    with pytest.raises(UserError, match=r"q0: a prompt of \d+ tokens; allowed are 1 to 40"):
        list(make_engine().generate([GroupRequest(make_query("q0", (1,) * length), 1, Purpose.TRAIN)], SAMPLING))


def test_programs_are_compiled_once_for_each_shape():
    engine = make_engine()
    for seed in range(3):
        completions_of(engine, requests_for(queries(7, longest=16, seed=seed)))
    assert engine._decode._cache_size() == 1
    assert engine._admit._cache_size() == 1


def test_bfloat16_engine_gives_the_logprobs_of_a_bfloat16_trainer():
    """The engine casts the matrices once; the trainer casts them in every product: the same numbers."""
    model = tiny_model(seed=2, compute_dtype=jnp.bfloat16)
    some = queries(4, seed=5)
    prompts = {query.query_id: query.prompt_ids for query in some}
    gaps = []
    for (query_id, _), completion in completions_of(make_engine(model), requests_for(some)).items():
        ids_T = jnp.asarray([*prompts[query_id], *completion.token_ids_C])[None]
        length = ids_T.shape[1]
        found = token_logprobs(
            model, ids_T, jnp.arange(length)[None], jnp.ones((1, length), jnp.int32), temperature=1.0, chunk_tokens=64
        )
        gaps.extend(completion.sampler_logprobs_C - np.asarray(found.logprobs_BT)[0, len(prompts[query_id]) :])
    assert np.mean(np.abs(gaps)) < 5e-3
    assert np.max(np.abs(gaps)) < 0.1
