"""The kernel of one decoding step against the recurrent form."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import loglinear_jax
from loglinear_jax.fenwick import FenwickState
from loglinear_jax.ops import log_linear
from pallas_kernels import fenwick_step
from pallas_kernels.common import support

pytestmark = pytest.mark.usefixtures("run_kernels")


def draw(batch, groups, heads, levels, key_dim, value_dim, seed=0):
    rng = np.random.default_rng(seed)
    shapes = [(batch, heads, levels, key_dim, value_dim), (batch, groups, key_dim), (batch, groups, key_dim)]
    states, q, k, v = (
        jnp.asarray(rng.normal(size=shape), jnp.float32) for shape in (*shapes, (batch, heads, value_dim))
    )
    log_decay = -jnp.asarray(rng.uniform(0, 1, (batch, heads)), jnp.float32)
    return states, q, k, v, log_decay, jnp.asarray(rng.uniform(0, 2, (batch, heads, levels)), jnp.float32)


def expected(states, position, *inputs):
    out, state = log_linear.step(FenwickState(states, jnp.int32(position)), *inputs, precision="highest")
    return out, state.levels


@pytest.mark.parametrize(
    "shape",
    [(1, 1, 2, 5, 32, 16), (2, 2, 4, 7, 16, 64), (1, 1, 1, 1, 16, 16), (1, 1, 1, 3, 256, 16), (1, 1, 1, 3, 16, 256)],
)
@pytest.mark.parametrize("position", [0, 1, 2, 12, 15, 32])
def test_it_is_a_step_of_the_recurrent_form(shape, position):
    states, *inputs = draw(*shape)
    positions = jnp.full((shape[0],), position)
    for result, wanted in zip(
        jax.jit(fenwick_step)(states, positions, *inputs), expected(states, position, *inputs), strict=True
    ):
        np.testing.assert_allclose(result, wanted, rtol=1e-5, atol=1e-5)


def test_vmap():
    states, *inputs = (jnp.stack(x) for x in zip(*(draw(1, 1, 2, 4, 16, 16, seed) for seed in range(3)), strict=True))
    outs, after = jax.jit(jax.vmap(fenwick_step))(states, jnp.arange(3)[:, None], *inputs)
    for index in range(3):
        wanted = expected(states[index], index, *(x[index] for x in inputs))
        np.testing.assert_allclose(outs[index], wanted[0], rtol=1e-5, atol=1e-5)
        np.testing.assert_allclose(after[index], wanted[1], rtol=1e-5, atol=1e-5)


def test_mapped_twice():
    states, *inputs = (
        jnp.stack(x).reshape(2, 2, *x[0].shape)
        for x in zip(*(draw(1, 1, 2, 4, 16, 16, seed) for seed in range(4)), strict=True)
    )
    outs, after = jax.jit(jax.vmap(jax.vmap(fenwick_step)))(states, jnp.arange(4).reshape(2, 2, 1), *inputs)
    wanted = expected(states[1, 0], 2, *(x[1, 0] for x in inputs))
    np.testing.assert_allclose(outs[1, 0], wanted[0], rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(after[1, 0], wanted[1], rtol=1e-5, atol=1e-5)


def test_gradients_are_those_of_the_recurrent_form():
    """Each of its own argument: they are computed by that form."""
    states, *inputs = draw(1, 1, 2, 4, 16, 16)

    def loss(step, states, inputs):
        out, after = step(FenwickState(states, jnp.int32(6)), *inputs)
        return jnp.sum(jnp.sin(out)) + jnp.sum(jnp.cos(after.levels))

    found, wanted = (
        jax.jit(jax.grad(loss, (1, 2)), static_argnums=0)(step, states, inputs)
        for step in (log_linear.kernel_step, log_linear.step)
    )
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("implementation", "dtype", "levels", "key_dim", "by_kernel"),
    [
        (None, jnp.float32, 32, 64, True),
        ("pallas", jnp.float32, 4, 16, True),
        ("xla", jnp.float32, 4, 16, False),
        ("recurrent", jnp.float32, 4, 16, False),
        (None, jnp.bfloat16, 4, 16, False),
        (None, jnp.float32, 4, 48, False),
        (None, jnp.float32, 33, 16, False),
    ],
)
def test_decoding_on_a_gpu_takes_it_where_it_can(
    implementation, dtype, levels, key_dim, by_kernel, compiling_for_a_gpu, monkeypatch
):
    monkeypatch.setattr(support, "runs_on_gpu", lambda: True)
    states, *inputs = draw(1, 1, 1, levels, key_dim, 16)
    step = functools.partial(loglinear_jax.fenwick_step, implementation=implementation)
    text = str(jax.make_jaxpr(step)(FenwickState(states.astype(dtype), jnp.int32(1)), *inputs))
    assert ("pallas_call" in text) == by_kernel
