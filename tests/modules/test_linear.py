"""Several linear maps with weights in one matrix."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from loglinear_jax.modules import LinearMaps

SIZES = 5, 0, 3
INIT = nn.initializers.normal(0.5)


@pytest.mark.parametrize("apart", [False, True])
def test_the_maps_are_the_parts_of_one_map(apart):
    x = jax.random.normal(jax.random.key(0), (2, 7, 4))
    maps, whole = LinearMaps(SIZES, INIT, apart=apart), nn.Dense(sum(SIZES), use_bias=False, kernel_init=INIT)
    params = maps.init(jax.random.key(1), x)
    np.testing.assert_array_equal(params["params"]["kernel"], whole.init(jax.random.key(1), x)["params"]["kernel"])
    mapped = maps.apply(params, x)
    assert [y.shape[-1] for y in mapped] == list(SIZES)
    np.testing.assert_allclose(jnp.concatenate(mapped, axis=-1), whole.apply(params, x), rtol=1e-5, atol=1e-6)


def test_products_are_in_the_dtype_that_is_asked_for():
    maps = LinearMaps(SIZES, INIT, jnp.bfloat16)
    params = maps.init(jax.random.key(0), jnp.zeros((1, 4)))
    assert params["params"]["kernel"].dtype == jnp.float32
    assert {y.dtype for y in maps.apply(params, jnp.zeros((1, 4)))} == {jnp.dtype(jnp.bfloat16)}


@pytest.mark.parametrize("apart", [False, True])
def test_gradients_of_the_maps_are_never_put_together(apart):
    x = jnp.ones((2, 7, 4))
    maps = LinearMaps(SIZES, INIT, apart=apart)
    params = maps.init(jax.random.key(0), x)
    gradients = jax.grad(lambda params, x: sum(jnp.sum(jnp.sin(y)) for y in maps.apply(params, x)), argnums=(0, 1))
    equations = jax.make_jaxpr(gradients)(params, x).jaxpr.eqns
    assert equations
    assert (2, 7, sum(SIZES)) not in [out.aval.shape for equation in equations for out in equation.outvars]
