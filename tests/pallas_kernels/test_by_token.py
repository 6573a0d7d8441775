"""The kernels of what is computed by token against what XLA makes of it."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.common import by_token
from pallas_kernels.common.chunks import LOG2_E, MIN_LOG2_DECAY, Sizes
from tests.pallas_kernels.conftest import HAS_GPU

pytestmark = pytest.mark.usefixtures("run_kernels")

BATCH = 2
SHAPES = {  # chunk, chunks, heads
    "one chunk": (16, 1, 2),
    "heads that fill no block": (16, 5, 3),
    "several blocks of heads and of columns": (32, 6, 21),
    "chunks of Hopper": (128, 3, 2),
}


def sizes_of(shape, precision="tf32") -> Sizes:
    chunk, num_chunks, heads = SHAPES[shape]
    return Sizes(
        batch=BATCH,
        chunk=chunk,
        num_chunks=num_chunks,
        groups=1,
        heads=heads,
        key_dim=16,
        dtype="float32",
        precision=precision,
        interpret=not HAS_GPU,
    )


def check(function, arguments, monkeypatch, **kwargs):
    """The kernel gives what XLA gives, which tests of attention hold to sums in float64."""
    run = functools.partial(function, **kwargs)
    found = jax.jit(run)(*arguments)
    monkeypatch.setattr(by_token, "why_cannot_run", lambda: "not wanted here")
    for x, same in zip(jax.tree.leaves(found), jax.tree.leaves(run(*arguments)), strict=True):
        np.testing.assert_allclose(np.asarray(x), np.asarray(same), rtol=1e-5, atol=2e-5)
    return found


@pytest.mark.parametrize(("shape", "precision"), list(zip(SHAPES, ("tf32", "f32", "f32", "tf32"), strict=True)))
def test_decay_is_the_sum_of_log_decays_since_the_chunks_start(shape, precision, monkeypatch):
    sizes = sizes_of(shape, precision)
    log_decay = -np.random.default_rng(0).exponential(size=(BATCH, sizes.length, sizes.heads)).astype(np.float32)
    log_decay[0, 3, 0] = -np.inf
    found = check(by_token.decay_of_tokens, [jnp.asarray(log_decay)], monkeypatch, sizes=sizes)
    chunks = log_decay.astype(np.float64).reshape(BATCH, sizes.num_chunks, sizes.chunk, sizes.heads)
    expected = np.cumsum(np.maximum(chunks * LOG2_E, MIN_LOG2_DECAY), axis=2)
    expected = np.moveaxis(expected.reshape(log_decay.shape), 1, 2)
    np.testing.assert_allclose(np.sum(np.asarray(found, np.float64), axis=0), expected, rtol=2e-6)


@pytest.mark.parametrize(("shape", "parts"), list(zip(SHAPES, (1, 3, 3, 1), strict=True)))
def test_decay_gradient(shape, parts, monkeypatch):
    sizes, rng = sizes_of(shape), np.random.default_rng(1)
    by_head = (BATCH, sizes.heads, sizes.length)
    log_decay = -rng.exponential(size=(BATCH, sizes.length, sizes.heads))
    log_decay[0, 2, 0], log_decay[1, 5, 1], log_decay[1, 7, 0] = -np.inf, -1000.0, np.nan
    of_queries, of_keys, of_chunks = [rng.normal(size=by_head) for _ in range(parts)], None, None
    if sizes.heights:
        of_keys, of_chunks = rng.normal(size=by_head), rng.normal(size=(*by_head[:2], sizes.num_chunks))
    arrays = jax.tree.map(
        functools.partial(jnp.asarray, dtype=jnp.float32), (of_queries, of_keys, of_chunks, log_decay)
    )
    check(by_token.decay_gradient, arrays, monkeypatch, sizes=sizes)


@pytest.mark.parametrize(("shape", "more_levels"), list(zip(SHAPES, (0, -1, 2, 0), strict=True)))
def test_lam_gradient_reads_only_where_a_state_is_read(shape, more_levels, monkeypatch):
    sizes, rng = sizes_of(shape), np.random.default_rng(2)
    arrays = [rng.normal(size=(BATCH, sizes.heads, sizes.levels_inside, sizes.length))]
    if sizes.heights:
        heights = np.arange(sizes.heights)[:, None]
        reads = np.repeat(np.arange(sizes.num_chunks) >> heights & 1 == 1, sizes.chunk, axis=1)
        arrays += [np.where(reads, rng.normal(size=(BATCH, sizes.heads, *reads.shape)), np.nan) for _ in range(2)]
        arrays.append(-rng.uniform(0, 3, (1, BATCH, sizes.heads, sizes.length)))
        arrays.append(-rng.uniform(0, 3, (BATCH, sizes.heads, sizes.num_chunks, sizes.heights)))
    arrays = [jnp.asarray(x, jnp.float32) for x in arrays] + [None] * (5 - len(arrays))
    num_levels = sizes.levels + more_levels
    found = check(by_token.lam_gradient, arrays, monkeypatch, num_levels=num_levels, sizes=sizes)
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(found))


def test_what_is_not_a_number_stays_in_its_chunk_and_head():
    sizes = sizes_of("heads that fill no block")
    log_decay = jnp.full((BATCH, sizes.length, sizes.heads), -0.1).at[1, 20, 2].set(np.nan)
    found = np.asarray(by_token.decay_of_tokens(log_decay, sizes))
    assert np.isnan(found[0, 1, 2, 20:32]).all() and np.isnan(found).sum() == 12
    by_head = (BATCH, sizes.heads, sizes.length)
    arrays = [
        jnp.ones(by_head).at[1, 2, 20].set(jnp.nan),
        jnp.ones(by_head),
        jnp.ones((*by_head[:2], sizes.num_chunks)),
    ]
    found = np.array(
        by_token.decay_gradient(arrays[:1], *arrays[1:], jnp.full((BATCH, sizes.length, sizes.heads), -0.1), sizes)
    )
    assert np.isnan(found[1, 16:21, 2]).all()
    found[1, 16:32, 2] = 0
    assert not np.isnan(found).any()
