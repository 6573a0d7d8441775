"""Sums of log decays."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from loglinear_jax.ops.decays import SUMMED, cumulative_sum


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("length", [SUMMED, 5 * SUMMED - 3, SUMMED**2 + 7])
def test_long_sums_go_by_blocks(length, reverse):
    x = np.random.default_rng(length).normal(size=(2, length))
    weight = np.random.default_rng(0).normal(size=x.shape)

    def expected(x, reverse):
        return np.cumsum(x[:, ::-1], axis=1)[:, ::-1] if reverse else np.cumsum(x, axis=1)

    with jax.enable_x64(True):
        out, vjp = jax.vjp(lambda x: cumulative_sum(x, reverse), jnp.asarray(x))
        np.testing.assert_allclose(out, expected(x, reverse), rtol=0, atol=1e-10)
        np.testing.assert_allclose(vjp(jnp.asarray(weight))[0], expected(weight, not reverse), rtol=0, atol=1e-10)
        both = jax.make_jaxpr(lambda x, weight: jax.vjp(lambda x: cumulative_sum(x, reverse), x)[1](weight))(x, weight)
    sums = [equation.invars[0].aval.shape[-1] for equation in both.eqns if equation.primitive.name == "cumsum"]
    assert sums and max(sums) <= SUMMED
