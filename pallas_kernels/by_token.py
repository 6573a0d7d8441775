"""What is computed of each token around the attention's kernels: before them its decay since the chunk's start, after them λ's
gradient. A kernel each, as XLA would take several; where JAX has no Triton lowering, XLA's."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels.chunks import Sizes, by_chunk, decay_in_chunk, log2_decay_parts, read_decay, where_read
from pallas_kernels.common import call, pad
from pallas_kernels.support import triton, why_cannot_run
from pallas_kernels.tiles import Launch

DECAY_LAUNCH = Launch(heads=16, warps=4, stages=1)
LAM_LAUNCH = Launch(heads=1, warps=4, stages=1)
LAM_ELEMENTS = 4096  # of λ's gradient that a program has


def decay_of_tokens(log_decay, sizes: Sizes):
    """The kernels' `decay` [P, B, H, T], from [B, T, H] natural logs."""
    if why_cannot_run() is not None:
        return decay_in_chunk(log_decay, sizes)
    batch, heads = log_decay.shape[0], min(DECAY_LAUNCH.heads, 1 << (sizes.heads - 1).bit_length())
    shape = (sizes.decay_parts, batch, sizes.heads, sizes.length)
    return call(
        functools.partial(_decay_kernel, sizes=sizes, heads=heads),
        "decay_of_tokens",
        (sizes.num_chunks, pl.cdiv(sizes.heads, heads), batch),
        [_of_sequence(log_decay)],
        _of_sequence(jax.ShapeDtypeStruct(shape, jnp.float32), axis=1),
        jax.ShapeDtypeStruct(shape, jnp.float32),
        DECAY_LAUNCH,
        sizes.interpret,
    )(log_decay)


def lam_gradient(inside, read, weight, decay, since, num_levels: int, sizes: Sizes):
    """(dλ [B, T, H, num_levels]; the gradient of `since` [B, H, N, heights], None as `since` is).

    Args:
      inside: [B, H, levels inside a chunk, T], dλ of those levels.
      read, weight: [B, H, heights, T], what the query read of the state at each height, without its weight, and that. Where no
        state is read, anything. None, as since and the second result, where there is one chunk alone.
      decay: of `decay_of_tokens`. since: `since_block_start`.
    """
    if why_cannot_run() is not None:
        return _lam_gradient_by_xla(inside, read, weight, decay, since, num_levels, sizes)
    batch, levels = inside.shape[0], max(num_levels, sizes.levels)
    columns = LAM_ELEMENTS // sizes.chunk
    operands, in_specs, results = [inside], [_of_sequence(inside)], []
    if since is not None:
        operands += [read, weight, decay, since]
        in_specs += [_of_sequence(read), _of_sequence(weight), _of_sequence(decay, axis=1), _of_sequence(since)]
        results.append(jax.ShapeDtypeStruct((batch, sizes.num_chunks, sizes.heads * levels), jnp.float32))
    results.append(jax.ShapeDtypeStruct((batch, sizes.length, sizes.heads * levels), jnp.float32))
    *d_since, dlam = call(
        functools.partial(_lam_gradient_kernel, sizes=sizes, levels=levels, columns=columns),
        "lam_gradient",
        (sizes.num_chunks, pl.cdiv(sizes.heads * levels, columns), batch),
        in_specs,
        [_of_sequence(result) for result in results],
        results,
        LAM_LAUNCH,
        sizes.interpret,
    )(*operands)
    dlam = dlam.reshape(batch, sizes.length, sizes.heads, levels)[..., :num_levels]
    if since is None:
        return dlam, None
    d_since = d_since[0].reshape(batch, sizes.num_chunks, sizes.heads, levels)
    return dlam, jnp.swapaxes(d_since[..., sizes.levels_inside : sizes.levels], 1, 2)


def _of_sequence(x, axis=0):
    """All of x that is of one sequence, by the last index of the grid. axis: that of sequences."""
    shape = (*x.shape[:axis], None, *x.shape[axis + 1 :])
    return pl.BlockSpec(shape, lambda *program: tuple(program[-1] if i == axis else 0 for i in range(len(shape))))


def _lam_gradient_by_xla(inside, read, weight, decay, since, num_levels: int, sizes: Sizes):
    dlam, d_since = inside, None
    if since is not None:
        read = where_read(read, sizes)
        d_since = jnp.swapaxes(jnp.sum(by_chunk(where_read(weight, sizes) * read, sizes), axis=-1), 2, 3)
        dlam = jnp.concatenate([dlam, read_decay(decay, since, sizes) * read], axis=2)
    return pad(jnp.moveaxis(dlam, 3, 1)[..., :num_levels], (3, num_levels)), d_since


def _lam_gradient_kernel(inside_ref, *refs, sizes: Sizes, levels: int, columns: int):
    """A program has a chunk's tokens, and some columns of dλ as they lie in memory: a head's levels, then the next head's."""
    *tree_refs, dlam_ref = refs
    chunk, tile = pl.program_id(0), (sizes.chunk, columns)
    column = pl.program_id(1) * columns + lax.broadcasted_iota(jnp.int32, (columns,), 0)
    head, level = lax.div(column, levels), lax.rem(column, levels)
    exists = head < sizes.heads
    token = chunk * sizes.chunk + lax.broadcasted_iota(jnp.int32, tile, 0)

    def wide(x):
        return jnp.broadcast_to(x[None, :], tile)

    def load(ref, number, where):
        """[tokens, columns] of a ref [heads, numbers, tokens]."""
        return triton.load(ref.at[wide(head), wide(number), token], mask=wide(where), other=0.0)

    inside = exists & (level < sizes.levels_inside)
    dlam = load(inside_ref, jnp.where(inside, level, 0), inside)
    if tree_refs:
        read_ref, weight_ref, decay_ref, since_ref, d_since_ref = tree_refs
        between = exists & (level >= sizes.levels_inside) & (level < sizes.levels)
        height = jnp.where(between, level - sizes.levels_inside, 0)
        reads = between & ((chunk >> height) & 1 == 1)
        read = load(read_ref, height, reads)
        start = sum(
            triton.load(decay_ref.at[part, wide(head), token], mask=wide(reads), other=0.0)
            for part in range(sizes.decay_parts)
        )
        at_chunk = jnp.broadcast_to(chunk, (columns,))
        since = triton.load(since_ref.at[head, at_chunk, height], mask=reads, other=0.0)
        dlam += jnp.exp2(wide(since) + start) * read
        d_since = jnp.sum(load(weight_ref, height, reads) * read, axis=0)
        triton.store(d_since_ref.at[at_chunk, column], d_since, mask=exists)
    triton.store(dlam_ref.at[token, wide(column)], dlam, mask=wide(exists))


def _decay_kernel(log_decay_ref, decay_ref, *, sizes: Sizes, heads: int):
    tile, first = (sizes.chunk, heads), pl.program_id(0) * sizes.chunk
    token = first + lax.broadcasted_iota(jnp.int32, tile, 0)
    head = pl.program_id(1) * heads + lax.broadcasted_iota(jnp.int32, tile, 1)
    exists = head < sizes.heads
    log_decay = triton.load(log_decay_ref.at[token, head], mask=exists, other=0.0)
    for part, x in enumerate(log2_decay_parts(log_decay, sizes)):
        triton.store(decay_ref.at[part, head, token], jnp.cumsum(x, axis=0), mask=exists)
