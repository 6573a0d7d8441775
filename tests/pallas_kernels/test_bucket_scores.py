"""The kernels of bucket scores against the parallel form in float64: in Pallas's interpreter, or on a GPU if there is one."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import pallas_kernels
from loglinear_jax import bucket_scores
from pallas_kernels.common.tiles import Launch
from pallas_kernels.scores.tiles import ScoreTiles, choose_score_tiles
from tests.ops.inputs import random_inputs, relative_error
from tests.pallas_kernels.conftest import HAS_GPU
from tests.pallas_kernels.modes import DTYPES, LOWER, PRECISIONS, TOLERANCE, but_slow, grids

pytestmark = pytest.mark.usefixtures("run_kernels")


def inputs_of(mode, batch, length, groups, heads, key_dim, seed=0, **kwargs):
    q, k, _, log_decay, _ = random_inputs(seed, batch, length, groups, heads, key_dim, 1, dtype=np.float32, **kwargs)
    return *(x.astype(DTYPES[mode]) for x in (q, k)), log_decay


@functools.cache
def compiled(**kwargs):
    def scores_and_gradients(inputs):
        scores, vjp = jax.vjp(functools.partial(bucket_scores, **kwargs), *inputs)
        cotangent = np.random.default_rng(1).normal(size=scores.shape)
        return scores, *vjp(jnp.asarray(cotangent, scores.dtype))

    return jax.jit(scores_and_gradients)


def check(mode, inputs, against="parallel", **kwargs):
    got = compiled(implementation="pallas", precision=PRECISIONS[mode], **kwargs)(inputs)
    with jax.enable_x64(True):
        exact = [jnp.asarray(np.asarray(x, np.float64)) for x in inputs]
        expected = jax.tree.map(np.asarray, compiled(implementation=against)(exact))
    assert got[0].dtype == jnp.float32 and [x.dtype for x in got[1:]] == [x.dtype for x in inputs]
    for name, x, wanted in zip(("scores", "q", "k", "log_decay"), got, expected, strict=True):
        assert np.isfinite(np.asarray(x, np.float32)).all(), name
        assert np.linalg.norm(np.asarray(x, np.float64) - wanted) <= TOLERANCE[mode] * (
            1e-3 + np.linalg.norm(wanted)
        ), name


SHAPES = {  # batch, length, groups, heads, K
    "one token": ((1, 1, 1, 1, 16), {}),
    "heads in groups, an odd length": ((1, 77, 2, 6, 16), dict(chunk_size=16)),
    "heads of a group in several programs": ((1, 40, 1, 34, 24), dict(chunk_size=16)),
    "one chunk more than a power of two": ((1, 145, 1, 1, 16), dict(chunk_size=16)),
    "tiles chosen from the shapes": ((1, 300, 1, 2, 32), {}),
}


@pytest.mark.parametrize("shape", but_slow(SHAPES, "one token", "heads in groups, an odd length"))
def test_full_float32(shape):
    sizes, kwargs = SHAPES[shape]
    check("f32", inputs_of("f32", *sizes), **kwargs)


# Chunks of a sequence, its heads, and K: how many heads' sums are read at once depends on all three.
READS = {
    "fewer rows than a tile has, height 1": (2, 1, 16),
    "rows of heads that there are not, 2 heights": (3, 3, 16),
    "several programs, 3 heights of 4": (7, 48, 128),
    "half of the last heads are not there, 5 heights of 8": (17, 6, 128),
    "as many heads as fit, 8 heights": (129, 4, 128),
    "a head at a time, 9 heights of 16": (257, 3, 256),
}


@pytest.mark.slow
@pytest.mark.parametrize("reads", READS)
def test_heads_whose_sums_are_read_at_once(reads):
    chunks, heads, key_dim = READS[reads]
    inputs = inputs_of("f32", 1, 16 * chunks - 3, 1, heads, key_dim, min_decay=-0.02)
    check("f32", inputs, against="xla", chunk_size=16)


@pytest.mark.slow
@pytest.mark.parametrize("tiles", [(1, 3), (2, 6), (3, 2), (6, 1)])
def test_tiles_change_nothing(tiles):
    chunks, size = 5, 16
    q, k, log_decay = inputs_of("f32", 1, chunks * size, 1, 6, 128, min_decay=-0.1)

    def run(tiles):
        score = functools.partial(pallas_kernels.chunk_scores, chunk_size=size, precision="highest", tiles=tiles)
        scores, vjp = jax.vjp(score, q, k, log_decay)
        return scores, *jax.tree.leaves(vjp(jnp.cos(scores)))

    for x, expected in zip(run(ScoreTiles(*(Launch(heads, 4, 1) for heads in tiles))), run(None), strict=True):
        assert relative_error(x, expected) < 1e-5


@pytest.mark.parametrize(
    ("group_heads", "chunks", "heads"),
    [(48, 512, 48), (48, 128, 16), (34, 400, 34), (7, 1000, 7), (96, 5000, 48), (8, 3, 1)],
)
def test_as_many_heads_a_program_as_leave_enough_programs(group_heads, chunks, heads):
    assert choose_score_tiles(group_heads, chunks).gradients.heads == heads


@pytest.mark.parametrize("min_decay", [-2.0, -50.0])
@pytest.mark.parametrize("sizes", [(1, 300, 1, 2, 32), (1, 77, 2, 6, 16)])
@pytest.mark.parametrize("mode", LOWER)
def test_lower_precision(mode, sizes, min_decay):
    check(mode, inputs_of(mode, *sizes, min_decay=min_decay))


@pytest.mark.slow
@settings(max_examples=3)
@given(
    length=st.integers(2, 120),
    groups=st.integers(1, 2),
    group_heads=st.integers(1, 2),
    key_dim=st.integers(16, 40),
    min_decay=st.sampled_from([0.0, -0.1, -5.0]),
    seed=st.integers(0, 2**32 - 1),
)
def test_any_shape(length, groups, group_heads, key_dim, min_decay, seed):
    inputs = inputs_of("f32", 1, length, groups, groups * group_heads, key_dim, seed=seed, min_decay=min_decay)
    with pallas_kernels.interpret(not HAS_GPU):
        check("f32", inputs, chunk_size=16)


@pytest.mark.slow
def test_nested_vmap_over_some_arguments_is_a_loop():
    score = functools.partial(bucket_scores, implementation="pallas", chunk_size=16, precision="highest")
    seeds = [inputs_of("f32", 1, 40, 1, 2, 16, seed=seed) for seed in range(4)]
    q, k, log_decay = (jnp.stack(x).reshape(2, 2, *x[0].shape) for x in zip(*seeds, strict=True))
    arguments = q[0, 0], k[:, 0], log_decay
    outer, inner = (None, 0, 0), (None, None, 0)

    def loss(q, k, log_decay):
        return jnp.sum(jnp.sin(score(q, k, log_decay)))

    gradients = jax.grad(loss, argnums=(0, 1, 2))
    mapped = jax.vmap(jax.vmap(gradients, inner), outer)
    got = jax.jit(mapped)(*arguments)
    for i in range(2):
        for j in range(2):
            for x, expected in zip(got, jax.jit(gradients)(q[0, 0], k[i, 0], log_decay[i, j]), strict=True):
                assert relative_error(x[i, j], expected) < 1e-5
    assert all(len(grid) <= 3 for grid in grids(mapped, *arguments))
