"""The kernels of the delta rule inside chunks against plain JAX in float64: in Pallas's interpreter, or on a GPU if there is
one."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallas_kernels
from loglinear_jax.fenwick import num_levels
from loglinear_jax.ops.levels import level_of_pairs, select_level
from loglinear_jax.ops.transitions import transitions
from tests.pallas_kernels.modes import DTYPES, LOWER, PRECISIONS, TOLERANCE, assert_exact_enough, exact_results, results

pytestmark = pytest.mark.usefixtures("run_kernels")
CHUNK = 32
NAMES = "out", "reads", "lost", "states", "q", "k", "v", "log_decay", "beta", "lam"


def draw(batch, num_chunks, groups, heads, key_dim, value_dim, *, chunk=CHUNK, dtype=np.float32):
    rng, length = np.random.default_rng(0), num_chunks * chunk
    q, k = rng.normal(size=(2, batch, length, groups, key_dim))
    k /= np.linalg.norm(k, axis=-1, keepdims=True)
    v = rng.normal(size=(batch, length, heads, value_dim))
    log_decay = -0.3 * rng.uniform(size=(batch, length, heads)) ** 2
    beta = rng.uniform(0, 2, log_decay.shape)
    lam = rng.uniform(size=(*log_decay.shape, num_levels(chunk)))
    arrays = q / key_dim**0.5, k, v, log_decay, beta, lam
    return [jnp.asarray(x, np.float32).astype(dtype if i < 3 else np.float32) for i, x in enumerate(arrays)]


def by_matrices(q, k, v, log_decay, beta, lam=None, *, chunk):
    """The same of `transitions`."""

    def parts(x):  # [B, G or H, N, C, ...]
        return jnp.moveaxis(x.reshape(len(x), -1, chunk, *x.shape[2:]), 3, 1)

    repeats = v.shape[2] // q.shape[2]
    q, k = (jnp.repeat(parts(x), repeats, axis=1) for x in (q, k))
    run = transitions(q, k, *(parts(x)[:, :, None] for x in (log_decay, beta)), "highest")
    of_pairs = 1
    if lam is not None:
        of_pairs = select_level(parts(lam)[:, :, None], level_of_pairs(np.arange(chunk)))
    v = parts(v)[:, :, None]
    out = (run.weights * of_pairs) @ v
    out = jnp.moveaxis(out[:, :, 0], 1, 3).reshape(len(v), -1, v.shape[1], v.shape[-1])
    states = run.own(v[..., None, :, :], "highest")[..., 0, :, :]
    return out, *(x[:, :, 0] for x in (run.reads, run.maps("highest").lost, states))


def check(mode, inputs, chunk=CHUNK):
    def run(q, k, v, log_decay, beta, lam=None):
        settings = dict(chunk_size=chunk, precision=PRECISIONS[mode])
        return pallas_kernels.delta_chunks(q, k, v, log_decay, beta, lam, **settings)

    found = results(run, inputs)
    expected = exact_results(functools.partial(by_matrices, chunk=chunk), inputs)
    assert [x.dtype for x in found] == [np.float32, *[inputs[0].dtype] * 3, *(x.dtype for x in inputs)]
    assert_exact_enough(mode, NAMES[: len(found)], found, expected, floor=1e-3)


SHAPES = {  # B, N, G, H, K, V
    "one chunk": (1, 1, 1, 1, 16, 16),
    "groups, and dims that are no powers of two": (2, 2, 2, 4, 24, 20),
}


@pytest.mark.parametrize("shape", SHAPES)
def test_full_float32(shape):
    check("f32", draw(*SHAPES[shape]))


def test_without_a_lambda():
    check("f32", draw(*SHAPES["groups, and dims that are no powers of two"])[:-1])


@pytest.mark.parametrize("mode", LOWER)
def test_other_precisions(mode):
    check(mode, draw(1, 2, 1, 2, 16, 16, dtype=DTYPES[mode]))


@pytest.mark.parametrize("dims", [(100, 70), (128, 16), (16, 128)])
@pytest.mark.slow
def test_several_blocks_of_columns(dims):
    """Of keys and of values, or of one of them: a block has 64."""
    check("bf16", draw(1, 2, 1, 2, *dims, dtype=DTYPES["bf16"]))


@pytest.mark.parametrize(("mode", "chunk"), [("f32", 16), ("f32", 64), ("bf16", 128)])
@pytest.mark.slow
def test_chunk_sizes(mode, chunk):
    check(mode, draw(1, 1, 1, 1, 16, 16, chunk=chunk, dtype=DTYPES[mode]), chunk)


@pytest.mark.slow
def test_batched_by_vmap():
    inputs = draw(3, 2, 1, 2, 16, 16)
    run = functools.partial(pallas_kernels.delta_chunks, chunk_size=CHUNK, precision="highest")
    found = results(jax.vmap(run), [x[:, None] for x in inputs])
    for a, b in zip(found, results(run, inputs), strict=True):
        np.testing.assert_allclose(a[:, 0], b, rtol=1e-6, atol=1e-6)


def test_equal_keys_that_are_reflected_again_and_again():
    """β = 2 and one key: each token undoes what the one before has done, and powers of A reach 10¹⁸."""
    inputs = draw(1, 1, 1, 1, 16, 16)
    q, k, v, log_decay, beta, lam = inputs
    check("f32", [q, jnp.broadcast_to(k[:, :1], k.shape), v, 0 * log_decay, (0 * beta + 2).at[:, 0].set(1), lam])


@pytest.mark.gpu
@pytest.mark.parametrize("mode", TOLERANCE)
@pytest.mark.parametrize("dim", [8, 32, None])
def test_on_a_gpu(mode, dim):
    """In the chunks that are taken there, of small keys and values too, which have fewer warps."""
    dim = dim or (128 if mode == "bf16" else 64)
    chunk = pallas_kernels.delta_chunk(dim, dim, DTYPES[mode])
    inputs = draw(2, 5, 3, 6, dim, dim, chunk=chunk, dtype=DTYPES[mode])
    check(mode, inputs, chunk)
    check(mode, inputs[:-1], chunk)
