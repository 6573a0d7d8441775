"""The kernel of SwiGLU's gradients against plain JAX in float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import swiglu

pytestmark = pytest.mark.usefixtures("run_kernels")


def inputs_of(shape, dtype):
    rng = np.random.default_rng(0)
    return [jnp.asarray(3 * rng.normal(size=shape), dtype) for _ in range(3)]


def gradients(gate, up, dy):
    """By the sigmoid σ: d_up = dy gate σ, d_gate = dy up σ (1 + gate (1 - σ)), in float64."""
    gate, up, dy = (np.asarray(x, np.float64) for x in (gate, up, dy))
    share = 1 / (1 + np.exp(-gate))
    return gate * share * up, dy * up * share * (1 + gate * (1 - share)), dy * gate * share


def value_and_gradients(gate, up, dy):
    out, vjp = jax.vjp(swiglu, gate, up)
    return out, *vjp(dy)


@pytest.mark.parametrize("shape", [(3, 5), (2048,), (2, 3, 700)])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_value_and_gradients(shape, dtype):
    inputs = inputs_of(shape, dtype)
    for found, wanted in zip(jax.jit(value_and_gradients)(*inputs), gradients(*inputs), strict=True):
        assert found.dtype == dtype
        tolerance = 1e-5 if dtype == jnp.float32 else 2e-2
        np.testing.assert_allclose(np.asarray(found, np.float64), wanted, rtol=tolerance, atol=tolerance)


def test_vmap():
    inputs = inputs_of((3, 2, 40), jnp.float32)
    for found, wanted in zip(jax.jit(jax.vmap(value_and_gradients))(*inputs), gradients(*inputs), strict=True):
        np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-5)
