import jax.numpy as jnp
import numpy as np
from flax import nnx
from helpers import tiny_model

from sgpo_jax.models.qwen import token_logprobs
from sgpo_jax.rollouts.probe import Prober


def test_a_probe_has_the_logprobs_of_each_prompt_read_alone():
    model = tiny_model(seed=1)
    other = tiny_model(seed=2)
    rng = np.random.default_rng(0)
    prompts = [tuple(rng.integers(1, 16, length).tolist()) for length in (1, 5, 90)]
    prober = Prober(model, prompts, 0, chunk_tokens=64)
    for params_of in (model, other):
        probe = prober(nnx.state(params_of))
        assert probe.token_ids == ((*prompts[0], 0), (*prompts[1], 0), (*prompts[2][-64:], 0))
        for ids, logprobs in zip(probe.token_ids, probe.logprobs, strict=True):
            length = len(ids)
            alone = token_logprobs(
                params_of,
                jnp.asarray([ids]),
                jnp.arange(length)[None],
                jnp.ones((1, length), jnp.int32),
                temperature=1.0,
                chunk_tokens=64,
            )
            np.testing.assert_allclose(logprobs, np.asarray(alone.logprobs_BT)[0, 1:], atol=1e-5)
