"""The kernels of what is computed by token against sums in float64, and against what XLA makes of it."""

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


def by_xla(monkeypatch, function, *arguments):
    with monkeypatch.context() as patch:
        patch.setattr(by_token, "why_cannot_run", lambda: "not wanted here")
        return function(*arguments)


def chunks_of(x, sizes: Sizes):
    """[B, T, H] in float64 as [B, N, C, H]."""
    return np.asarray(x, np.float64).reshape(BATCH, sizes.num_chunks, sizes.chunk, sizes.heads)


@pytest.mark.parametrize("precision", ["tf32", "f32"])
@pytest.mark.parametrize("shape", SHAPES)
def test_decay_is_the_sum_of_log_decays_since_the_chunks_start(shape, precision, monkeypatch):
    sizes = sizes_of(shape, precision)
    log_decay = -np.random.default_rng(0).exponential(size=(BATCH, sizes.length, sizes.heads)).astype(np.float32)
    log_decay[0, 3, 0] = -np.inf
    found = jax.jit(functools.partial(by_token.decay_of_tokens, sizes=sizes))(jnp.asarray(log_decay))
    assert found.shape == (sizes.decay_parts, BATCH, sizes.heads, sizes.length)
    expected = np.cumsum(np.maximum(chunks_of(log_decay, sizes) * LOG2_E, MIN_LOG2_DECAY), axis=2)
    expected = np.moveaxis(expected.reshape(BATCH, sizes.length, sizes.heads), 1, 2)
    np.testing.assert_allclose(np.sum(np.asarray(found, np.float64), axis=0), expected, rtol=2e-6)
    same = by_xla(monkeypatch, by_token.decay_of_tokens, jnp.asarray(log_decay), sizes)
    np.testing.assert_allclose(np.asarray(found), np.asarray(same), rtol=2e-6, atol=1e-5)


def test_a_decay_that_is_not_a_number_stays_one():
    sizes = sizes_of("heads that fill no block")
    log_decay = np.full((BATCH, sizes.length, sizes.heads), -0.1, np.float32)
    log_decay[1, 20, 2] = np.nan
    found = np.asarray(by_token.decay_of_tokens(jnp.asarray(log_decay), sizes))
    assert np.isnan(found[0, 1, 2, 20:32]).all()
    assert np.isnan(found).sum() == 12


@pytest.mark.parametrize("parts", [1, 3])
@pytest.mark.parametrize("shape", SHAPES)
def test_decay_gradient_counts_queries_from_the_token_on_and_keys_before_it(shape, parts, monkeypatch):
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
    found = jax.jit(functools.partial(by_token.decay_gradient, sizes=sizes))(*arrays)

    token = np.arange(sizes.length)
    same_chunk = token[:, None] // sizes.chunk == token // sizes.chunk
    expected = sum(of_queries) @ (same_chunk & (token[:, None] >= token))
    if sizes.heights:
        expected += of_keys @ (same_chunk & (token[:, None] < token)) + np.repeat(of_chunks, sizes.chunk, axis=2)
    expected = np.where(log_decay * LOG2_E >= MIN_LOG2_DECAY, np.moveaxis(expected, 1, 2), 0.0)
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=2e-5)
    same = by_xla(monkeypatch, by_token.decay_gradient, *arrays, sizes)
    np.testing.assert_allclose(np.asarray(found), np.asarray(same), rtol=1e-5, atol=2e-5)


def test_a_gradient_that_is_not_a_number_stays_in_its_chunk_and_head():
    sizes = sizes_of("heads that fill no block")
    by_head = (BATCH, sizes.heads, sizes.length)
    arrays = [jnp.ones(by_head), jnp.ones(by_head), jnp.ones((*by_head[:2], sizes.num_chunks))]
    arrays[0] = arrays[0].at[1, 2, 20].set(jnp.nan)
    found = by_token.decay_gradient(arrays[:1], *arrays[1:], jnp.full((BATCH, sizes.length, sizes.heads), -0.1), sizes)
    assert np.isnan(found[1, 16:21, 2]).all()
    assert (
        np.isnan(np.delete(found[1, :, 2], slice(16, 32))).sum() == np.isnan(np.delete(found[1], 2, axis=1)).sum() == 0
    )
    assert not np.isnan(found[0]).any()


@pytest.mark.parametrize("more_levels", [-1, 0, 2])
@pytest.mark.parametrize("shape", SHAPES)
def test_lam_gradient_reads_only_where_a_state_is_read(shape, more_levels, monkeypatch):
    sizes = sizes_of(shape)
    rng, num_levels = np.random.default_rng(2), sizes.levels + more_levels
    inside = rng.normal(size=(BATCH, sizes.heads, sizes.levels_inside, sizes.length))
    arrays, chunk = [inside], np.arange(sizes.num_chunks)
    if sizes.heights:
        reads = np.repeat(chunk >> np.arange(sizes.heights)[:, None] & 1 == 1, sizes.chunk, axis=1)
        read, weight = (np.where(reads, rng.normal(size=(BATCH, sizes.heads, *reads.shape)), np.nan) for _ in range(2))
        decay = -rng.uniform(0, 3, (1, BATCH, sizes.heads, sizes.length))
        since = -rng.uniform(0, 3, (BATCH, sizes.heads, sizes.num_chunks, sizes.heights))
        arrays += [read, weight, decay, since]
    arrays = [jnp.asarray(x, jnp.float32) for x in arrays] + [None] * (5 - len(arrays))
    run = functools.partial(by_token.lam_gradient, num_levels=num_levels, sizes=sizes)
    found = jax.jit(run)(*arrays)

    of_levels = [inside]
    if sizes.heights:
        read, weight = (np.where(reads, x, 0.0) for x in (read, weight))
        until_read = np.exp2(np.repeat(np.swapaxes(since, 2, 3), sizes.chunk, axis=3) + decay[0][:, :, None])
        of_levels.append(until_read * read)
        d_since = (weight * read).reshape(*read.shape[:3], sizes.num_chunks, sizes.chunk).sum(axis=4)
        np.testing.assert_allclose(found[1], np.swapaxes(d_since, 2, 3), rtol=1e-4, atol=1e-5)
    else:
        assert found[1] is None
    expected = np.moveaxis(np.concatenate(of_levels, axis=2), 3, 1)[..., :num_levels]
    expected = np.pad(expected, [(0, 0)] * 3 + [(0, num_levels - expected.shape[3])])
    np.testing.assert_allclose(found[0], expected, rtol=1e-5, atol=1e-6)
    for mine, same in zip(jax.tree.leaves(found), jax.tree.leaves(by_xla(monkeypatch, run, *arrays)), strict=True):
        np.testing.assert_allclose(np.asarray(mine), np.asarray(same), rtol=1e-5, atol=1e-5)
