from collections.abc import Iterator

import jax
import jax.extend
import jax.numpy as jnp
import numpy as np
import pytest

from sgpo_jax.models.products import product

CASES = {
    "BTI,IO->BTO": ((2, 3, 4), (4, 5)),
    "XD,VD->XV": ((6, 4), (7, 4)),
    "BKXH,BKSH->BKXS": ((2, 2, 3, 4), (2, 2, 5, 4)),
    "BKXS,BKSH->BKXH": ((2, 2, 3, 5), (2, 2, 5, 4)),
}


def arrays(subscripts: str, x_dtype: str, y_dtype: str) -> tuple[jax.Array, jax.Array]:
    rng = np.random.default_rng(0)
    x_shape, y_shape = CASES[subscripts]
    return jnp.asarray(rng.normal(size=x_shape), x_dtype), jnp.asarray(rng.normal(size=y_shape), y_dtype)


@pytest.mark.parametrize("subscripts", CASES)
def test_value_and_gradients_are_einsums(subscripts):
    x, y = arrays(subscripts, "float32", "float32")

    def found(x, y):
        return jnp.sum(jnp.sin(product(subscripts, x, y, jnp.float32)))

    def wanted(x, y):
        return jnp.sum(jnp.sin(jnp.einsum(subscripts, x, y)))

    for ours, plain in zip(jax.grad(found, (0, 1))(x, y), jax.grad(wanted, (0, 1))(x, y), strict=True):
        np.testing.assert_allclose(ours, plain, atol=1e-5)


@pytest.mark.parametrize("out_dtype", ["float32", "bfloat16"])
def test_every_product_multiplies_in_the_compute_type_and_accumulates_in_float32(out_dtype):
    x, weight = arrays("BTI,IO->BTO", "bfloat16", "float32")

    def loss(x, weight):
        return jnp.sum(product("BTI,IO->BTO", x, weight, out_dtype).astype(jnp.float32) ** 2)

    jaxpr = jax.make_jaxpr(jax.grad(loss, (0, 1)))(x, weight)
    dots = list(_dots(jaxpr.jaxpr))
    assert len(dots) == 3
    for dot in dots:
        assert {variable.aval.dtype for variable in dot.invars} == {jnp.dtype("bfloat16")}
        assert dot.outvars[0].aval.dtype == jnp.float32
    assert [variable.dtype for variable in jaxpr.out_avals] == [jnp.bfloat16, jnp.float32]


def test_a_weight_gradient_is_not_rounded_to_the_compute_type():
    x, weight = jnp.ones((1, 301, 1), jnp.bfloat16), jnp.ones((1, 1), jnp.float32)
    assert float(jnp.asarray(301, jnp.bfloat16)) == 300
    gradient = jax.grad(lambda w: jnp.sum(product("BTI,IO->BTO", x, w, jnp.float32)))(weight)
    assert gradient[0, 0] == 301


def _dots(jaxpr: jax.extend.core.Jaxpr) -> Iterator[jax.extend.core.JaxprEqn]:
    for equation in jaxpr.eqns:
        if equation.primitive.name == "dot_general":
            yield equation
        for inner in jax.extend.core.jaxprs_in_params(equation.params):
            yield from _dots(inner)
