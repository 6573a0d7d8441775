"""The kernels that carry one state of the delta rule from chunk to chunk against its definition in float64: in Pallas's
interpreter, or on a GPU if there is one."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallas_kernels
from pallas_kernels.common.gpu import DEFAULT
from pallas_kernels.common.tiles import MIN_TILE
from pallas_kernels.delta.tiles import carry_columns
from tests.pallas_kernels.modes import (
    DTYPES,
    LOWER,
    PRECISIONS,
    TOLERANCE,
    assert_exact_enough,
    exact_results,
    grids,
    results,
)

pytestmark = pytest.mark.usefixtures("run_kernels")


def draw(batch, heads, num_chunks, chunk, key_dim, value_dim, dtype=np.float32):
    rng, by_chunk = np.random.default_rng(0), (batch, heads, num_chunks)
    inside = rng.normal(size=(batch, num_chunks * chunk, heads, value_dim))
    reads = rng.normal(size=(*by_chunk, chunk, key_dim))
    lost = 0.5 * rng.normal(size=(*by_chunk, key_dim, key_dim)) / key_dim**0.5
    states = rng.normal(size=(*by_chunk, key_dim, value_dim))
    first = rng.normal(size=(batch, heads, key_dim, value_dim))
    arrays = inside, reads, rng.uniform(0.8, 1, by_chunk), lost, states, first
    dtypes = np.float32, dtype, np.float32, dtype, dtype, np.float32
    return [jnp.asarray(x, np.float32).astype(d) for x, d in zip(arrays, dtypes, strict=True)]


def definition(inside, reads, decay, lost, states, state):
    """One chunk after the other."""
    size, out = reads.shape[3], []
    for chunk in range(reads.shape[2]):
        read = jnp.swapaxes(reads[:, :, chunk] @ state, 1, 2)
        out.append(inside[:, chunk * size : (chunk + 1) * size] + read)
        state = decay[:, :, chunk, None, None] * state - lost[:, :, chunk] @ state + states[:, :, chunk]
    return jnp.concatenate(out, axis=1), state


NAMES = "out", "last", "inside", "reads", "decay", "lost", "states", "first"


def check(mode, inputs):
    run = functools.partial(pallas_kernels.carry_state, precision=PRECISIONS[mode])
    found = results(run, inputs)
    assert [x.dtype for x in found] == [inputs[1].dtype, np.float32, *(x.dtype for x in inputs)]
    assert_exact_enough(mode, NAMES, found, exact_results(definition, inputs))


SHAPES = {  # B, H, N, C, K, V
    "dims that are no powers of two": (2, 3, 5, 16, 24, 20),
    "one chunk": (1, 2, 1, 32, 16, 32),
}


@pytest.mark.parametrize("shape", SHAPES)
def test_full_float32(shape):
    check("f32", draw(*SHAPES[shape]))


@pytest.mark.parametrize("mode", LOWER)
def test_other_precisions(mode):
    check(mode, draw(1, 2, 3, 16, 16, 32, DTYPES[mode]))


def test_batched_by_vmap():
    inputs = draw(3, 2, 3, 16, 16, 16)
    run = functools.partial(pallas_kernels.carry_state, precision="highest")
    found = results(jax.vmap(run), [x[:, None] for x in inputs])
    for a, b in zip(found, results(run, inputs), strict=True):
        np.testing.assert_allclose(a[:, 0], b, rtol=1e-6, atol=1e-6)


def test_few_sequences_have_smaller_programs():
    assert carry_columns(2 * DEFAULT.multiprocessors, 64) == 64
    assert carry_columns(1, 64) == MIN_TILE
    inputs = draw(1, 2, 2, 16, 16, 32)
    assert (32 // MIN_TILE, 2) in grids(pallas_kernels.carry_state, *inputs)


def test_programs_of_all_columns(monkeypatch):
    """As where there are many sequences; and more columns than gradients take at a time."""
    monkeypatch.setattr("pallas_kernels.delta.tiles.gpu", lambda: dataclasses.replace(DEFAULT, multiprocessors=1))
    inputs = draw(1, 2, 2, 16, 16, 128, jnp.bfloat16)
    assert (1, 2) in grids(pallas_kernels.carry_state, *inputs)
    check("bf16", inputs)


def test_states_that_are_forgotten():
    inputs = draw(1, 2, 3, 16, 16, 16)
    inputs[2] = inputs[2].at[:, :, 1].set(0.0).at[:, 0, 2].set(1e-30)
    check("f32", inputs)


def test_vmap_over_some_arguments():
    """The others are the same for all."""
    inputs = draw(1, 2, 2, 16, 16, 16)
    lost = jnp.stack([inputs[3], -inputs[3]])
    run = functools.partial(pallas_kernels.carry_state, precision="highest")
    found = jax.vmap(run, in_axes=(None, None, None, 0, None, None))(*inputs[:3], lost, *inputs[4:])
    for index in range(2):
        for a, b in zip(found, run(*inputs[:3], lost[index], *inputs[4:]), strict=True):
            np.testing.assert_allclose(a[index], b, rtol=1e-5, atol=1e-5)


@pytest.mark.gpu
@pytest.mark.parametrize("mode", TOLERANCE)
def test_on_a_gpu(mode):
    dim = 128 if mode == "bf16" else 64
    check(mode, draw(2, 3, 13, 64, dim, dim, DTYPES[mode]))
