"""The counter against hand arithmetic, and against the same model without loops."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from helpers import make_config, tiny_architecture

from sgpo_jax.check.flops import matmul_flops
from sgpo_jax.check.programs import Inputs, trace_programs
from sgpo_jax.config import load_config
from sgpo_jax.data.batching import BatchShape
from sgpo_jax.models.published import PUBLISHED
from sgpo_jax.models.qwen import Transformer, token_logprobs
from sgpo_jax.models.weights import num_parameters, weight_table

X, Y = np.ones((6, 5, 3), np.float32), np.ones((6, 3, 4), np.float32)
PRODUCT = 2 * 6 * 5 * 4 * 3


def flops(function, *args, **kwargs):
    return matmul_flops(jax.make_jaxpr(function)(*args), **kwargs)


def test_products_by_hand():
    assert flops(jnp.matmul, X, Y) == PRODUCT
    assert flops(jax.grad(lambda x, y: jnp.matmul(x, y).sum(), argnums=(0, 1)), X, Y) == 3 * PRODUCT
    assert flops(lambda x: x + jnp.sin(x).sum(), X) == 0
    images, kernel = np.ones((2, 9, 9, 6), np.float32), np.ones((3, 3, 2, 8), np.float32)  # three groups of channels
    kernel = np.concatenate([kernel, kernel[..., :4]], axis=-1)

    def convolve(x, k):
        dims = ("NHWC", "HWIO", "NHWC")
        return jax.lax.conv_general_dilated(x, k, (1, 1), "SAME", dimension_numbers=dims, feature_group_count=3)

    assert flops(convolve, images, kernel) == 2 * (2 * 9 * 9 * 12) * (3 * 3 * 2)


def test_loops_and_branches_by_hand():
    square = np.ones((4, 4), np.float32)
    once = 2 * 4**3

    def in_scan(x):
        def body(carry, _):
            return jax.lax.scan(lambda c, _: (c @ square, None), carry @ square, None, length=3)[0], None

        return jax.lax.scan(jax.checkpoint(body), x, None, length=5)[0]

    assert flops(jax.jit(in_scan), square) == 5 * (1 + 3) * once

    def in_while(x):
        return jax.lax.while_loop(lambda c: c.sum() < 9, lambda c: c @ square, x)

    assert flops(in_while, square) == once
    assert flops(in_while, square, while_trips=7) == 7 * once

    def branches(x):
        return jax.lax.cond(x.sum() > 0, lambda c: c @ c, lambda c: c @ c @ c, x)

    assert flops(branches, square) == 2 * once


def test_a_kernel_that_hides_its_work_is_refused():
    from jax.experimental import pallas

    def kernel(x_ref, o_ref):
        o_ref[...] = x_ref[...] @ x_ref[...]

    call = pallas.pallas_call(kernel, out_shape=jax.ShapeDtypeStruct((8, 8), jnp.float32), interpret=True)
    with pytest.raises(NotImplementedError, match="pallas_call"):
        flops(call, np.ones((8, 8), np.float32))


ROWS = (np.ones((2, 12), np.int32), np.tile(np.arange(12, dtype=np.int32), (2, 1)), np.ones((2, 12), np.int32))


def gradient(remat, *, chunk_tokens=6):
    model = Transformer(tiny_architecture(num_layers=3), rngs=nnx.Rngs(0), remat=remat)
    graphdef, params = nnx.split(model)

    def loss(params):
        model = nnx.merge(graphdef, params)
        return token_logprobs(model, *ROWS, temperature=1.0, chunk_tokens=chunk_tokens).logprobs_BT.sum()

    return flops(jax.grad(loss), params)


def test_a_model_by_hand():
    """Without rematerialisation: a product has two more in the backward pass; those of logits are computed again."""
    arch = tiny_architecture(num_layers=3)
    tokens, length = ROWS[0].size, ROWS[0].shape[1]
    layers = sum(np.prod(weight.shape) for weight in weight_table(arch) if weight.is_matrix and weight.is_stacked)
    attention = 3 * 2 * (2 * tokens * length * arch.num_heads * arch.head_dim)
    logits = 2 * tokens * arch.vocab_size * arch.model_dim
    assert gradient("none") == 3 * (2 * tokens * layers + attention) + 4 * logits


@pytest.mark.parametrize("remat", ["none", "dots", "full"])
def test_scanned_layers_cost_what_unrolled_ones_do(remat, monkeypatch):
    scanned = gradient(remat)

    def unrolled_scan(body, carry, xs, length=None):
        results = []
        for i in range(len(jax.tree.leaves(xs)[0])):
            carry, result = body(carry, jax.tree.map(lambda x, i=i: x[i], xs))
            results.append(result)
        return carry, jax.tree.map(lambda *parts: jnp.stack(parts), *results)

    monkeypatch.setattr(jax.lax, "scan", unrolled_scan)
    monkeypatch.setattr(jax.lax, "map", lambda f, xs: unrolled_scan(lambda c, x: (c, f(x)), None, xs)[1])
    assert gradient(remat) == scanned


def test_the_7b_update_costs_at_most_1_45_times_6p():
    """Full rematerialisation at 4,096 tokens, attention counted whole; a layer's last product is not computed again."""
    config = load_config("configs/qwen2.5-math-7b.yaml", ["model.attention=plain"])
    arch = PUBLISHED[config.model.path]
    shape = BatchShape(num_rows=4, row_length=4096)
    programs = trace_programs(config, Inputs(arch, shape, 1024, "plain"), mesh=None)
    num_params, tokens = num_parameters(arch), 4 * 4096
    matrices = num_params - arch.vocab_size * arch.model_dim  # the embedding multiplies nothing
    attention = 4 * arch.num_layers * 4 * tokens * 4096 * arch.num_heads * arch.head_dim
    kept = 2 * tokens * arch.num_layers * arch.mlp_dim * arch.model_dim
    found = matmul_flops(programs["accumulate"].jaxpr)
    assert found == pytest.approx(8 * matrices * tokens + attention - kept, rel=1e-3)
    assert 1.25 < found / (6 * num_params * tokens) < 1.45


def test_sampling_counts_a_token_for_every_decode_step():
    config = make_config(rollouts={"batch_size": 4, "max_completion_tokens": 8, "decode_steps": 5})
    inputs = Inputs(tiny_architecture(), BatchShape(2, 16), 8, "plain")
    programs = trace_programs(config, inputs, mesh=None)
    one, five = (matmul_flops(programs["decode"].jaxpr, while_trips=trips) for trips in (1, 5))
    assert five == 5 * one > 0
