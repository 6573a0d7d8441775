"""The kernels of the delta rule with one state against its definition in float64: in Pallas's interpreter, or on a GPU if there
is one."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallas_kernels
from tests.pallas_kernels.modes import (
    DTYPES,
    LOWER,
    PRECISIONS,
    TOLERANCE,
    assert_exact_enough,
    but_slow,
    exact_results,
    grids,
    results,
)

pytestmark = pytest.mark.usefixtures("run_kernels")


def draw(batch, length, groups, heads, key_dim, value_dim, dtype=np.float32):
    rng = np.random.default_rng(0)
    q, k = (rng.normal(size=(batch, length, groups, key_dim)) for _ in range(2))
    k /= np.linalg.norm(k, axis=-1, keepdims=True)
    v = rng.normal(size=(batch, length, heads, value_dim))
    log_decay, beta = -rng.uniform(0, 0.1, v.shape[:3]), rng.uniform(size=v.shape[:3])
    first = rng.normal(size=(batch, heads, key_dim, value_dim))
    arrays = q, k, v, log_decay, beta, first
    dtypes = *[dtype] * 3, *[np.float32] * 3
    return [jnp.asarray(x, np.float32).astype(d) for x, d in zip(arrays, dtypes, strict=True)]


def definition(q, k, v, log_decay, beta, state):
    """One token after the other."""
    q, k = (jnp.repeat(x, v.shape[2] // x.shape[2], axis=2) for x in (q, k))

    def step(state, token):
        q, k, v, log_decay, beta = token
        found = jnp.einsum("bhk,bhkv->bhv", k, state)
        state = jnp.exp(log_decay)[..., None, None] * (state - jnp.einsum("bh,bhk,bhv->bhkv", beta, k, found))
        state += jnp.einsum("bh,bhk,bhv->bhkv", beta, k, v)
        return state, jnp.einsum("bhk,bhkv->bhv", q, state)

    by_token = jax.tree.map(lambda x: jnp.moveaxis(x, 1, 0), (q, k, v, log_decay, beta))
    state, out = jax.lax.scan(step, state, by_token)
    return jnp.moveaxis(out, 0, 1), state


NAMES = "out", "last", "q", "k", "v", "log_decay", "beta", "first"


def check(mode, inputs, chunk_size=16, **settings):
    run = functools.partial(pallas_kernels.delta_scan, chunk_size=chunk_size, precision=PRECISIONS[mode], **settings)
    found = results(run, inputs)
    assert [x.dtype for x in found] == [inputs[0].dtype, np.float32, *(x.dtype for x in inputs)]
    assert_exact_enough(mode, NAMES, found, exact_results(definition, inputs))


SHAPES = {  # B, T, G, H, K, V
    "dims that are no powers of two": (2, 48, 3, 3, 24, 20),
    "two heads a group": (1, 32, 1, 2, 16, 32),
    "one chunk": (1, 16, 2, 2, 32, 16),
}


@pytest.mark.parametrize("shape", but_slow(SHAPES, "two heads a group"))
def test_full_float32(shape):
    check("f32", draw(*SHAPES[shape]))


@pytest.mark.parametrize("mode", LOWER)
def test_other_precisions(mode):
    check(mode, draw(1, 48, 1, 2, 16, 32, DTYPES[mode]))


@pytest.mark.slow
def test_several_blocks_of_columns():
    check("bf16", draw(1, 32, 1, 1, 128, 128, jnp.bfloat16))


def test_a_token_that_forgets():
    inputs = draw(1, 48, 2, 2, 16, 16)
    inputs[3] = inputs[3].at[:, 21].set(-1e4).at[:, 32, 0].set(-60.0)
    found = results(
        functools.partial(pallas_kernels.delta_scan, chunk_size=16, precision="highest", segmented=True), inputs
    )
    expected = exact_results(definition, inputs)
    found, expected = ([*x[:5], *x[6:]] for x in (found, expected))
    assert_exact_enough("f32", range(7), found, expected)


@pytest.mark.slow
def test_batched_by_vmap():
    inputs = draw(3, 32, 1, 2, 16, 16)
    run = functools.partial(pallas_kernels.delta_scan, chunk_size=16, precision="highest")
    found = results(jax.vmap(run), [x[:, None] for x in inputs])
    for a, b in zip(found, results(run, inputs), strict=True):
        np.testing.assert_allclose(a[:, 0], b, rtol=1e-5, atol=1e-6)


def test_few_sequences_have_smaller_programs():
    inputs = draw(1, 32, 1, 1, 16, 64)
    assert (2, 1) in grids(functools.partial(pallas_kernels.delta_scan, chunk_size=16), *inputs)


@pytest.mark.gpu
@pytest.mark.parametrize("mode", TOLERANCE)
def test_on_a_gpu(mode):
    dim = 128 if mode == "bf16" else 64
    check(mode, draw(2, 13 * 64, 3, 3, dim, dim, DTYPES[mode]), chunk_size=64)
