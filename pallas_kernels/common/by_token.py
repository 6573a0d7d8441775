"""What is computed of each token around the kernels of the attention and of bucket scores: before them its decay since the
chunk's start, after them the gradients of its decay and of λ. A kernel each, as XLA would take several; where JAX has no
Triton lowering, XLA's."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jaxtyping import Array, Float, Int

from loglinear_jax.fenwick import has_left_sibling
from pallas_kernels.common.chunks import (
    LOG2_E,
    MIN_LOG2_DECAY,
    Sizes,
    by_chunk,
    decay_in_chunk,
    log2_decay_parts,
    read_decay,
    sum_tokens,
    where_read,
)
from pallas_kernels.common.launch import HeadAxes, call, of_sequence, pad, with_gradient
from pallas_kernels.common.support import triton, why_cannot_run
from pallas_kernels.common.tiles import Launch

DECAY_LAUNCH = Launch(heads=16, warps=8, stages=1)
LAM_LAUNCH = Launch(heads=1, warps=4, stages=1)
LAM_ELEMENTS = 4096  # of λ's gradient that a program has


def decay_of_tokens(log_decay: Float[Array, "B T H"], sizes: Sizes) -> Float[Array, "P B H T"]:
    """The kernels' `decay` [P, B, H, T], from [B, T, H] natural logs."""
    if why_cannot_run() is not None:
        return decay_in_chunk(log_decay, sizes)
    batch, sizes = log_decay.shape[0], dataclasses.replace(sizes, heads=log_decay.shape[2])
    heads = _heads_a_program(sizes)
    shape = (sizes.decay_parts, batch, sizes.heads, sizes.length)
    return call(
        functools.partial(_decay_kernel, sizes=sizes, heads=heads),
        "decay_of_tokens",
        (sizes.num_chunks, pl.cdiv(sizes.heads, heads), batch),
        [of_sequence(log_decay)],
        of_sequence(jax.ShapeDtypeStruct(shape, jnp.float32), axis=1),
        jax.ShapeDtypeStruct(shape, jnp.float32),
        DECAY_LAUNCH,
        sizes.interpret,
    )(log_decay)


@functools.cache
def differentiable_decay(sizes: Sizes):
    """The function log_decay -> decay of `decay_of_tokens`, but [B, P, H, T]; differentiable, and batched by vmap."""

    def forward(log_decay):
        return jnp.moveaxis(decay_of_tokens(log_decay, sizes), 0, 1)

    def backward(log_decay, d_decay):
        # Of the last part alone: the first, where there are two, is rounded to multiples, and its derivative is 0.
        here = dataclasses.replace(sizes, heads=log_decay.shape[2])
        return (decay_gradient([LOG2_E * d_decay[:, -1]], None, None, log_decay, here),)

    return with_gradient(forward, backward, HeadAxes(sizes.shared_out, (2,), (2,)))


def decay_gradient(
    of_queries: Sequence[Float[Array, "B H T"]],
    of_keys: Float[Array, "B H T"] | None,
    of_chunks: Float[Array, "B H N"] | None,
    log_decay: Float[Array, "B T H"],
    sizes: Sizes,
) -> Float[Array, "B T H"]:
    """The gradient of log_decay [B, T, H].

    Args:
      of_queries: arrays [B, H, T], by their sum the gradient of each token's decay since its chunk's start.
      of_keys: [B, H, T], that of its decay until the chunk's end; of_chunks: [B, H, N], that of a chunk's decay as a whole.
        None where nothing depends on them.
    """
    if why_cannot_run() is not None:
        return _decay_gradient_by_xla(of_queries, of_keys, of_chunks, log_decay, sizes)
    heads = _heads_a_program(sizes)
    others = dict(keys=of_keys, chunks=of_chunks)
    named = tuple(name for name, x in others.items() if x is not None)
    operands = [log_decay, *of_queries, *(others[name] for name in named)]
    return call(
        functools.partial(_decay_gradient_kernel, sizes=sizes, queries=len(of_queries), named=named, heads=heads),
        "decay_gradient",
        (sizes.num_chunks, pl.cdiv(sizes.heads, heads), log_decay.shape[0]),
        [of_sequence(x) for x in operands],
        of_sequence(log_decay),
        jax.ShapeDtypeStruct(log_decay.shape, jnp.float32),
        DECAY_LAUNCH,
        sizes.interpret,
    )(*operands)


def lam_gradient(
    inside: Float[Array, "B H inside T"],
    read: Float[Array, "B H heights T"] | None,
    weight: Float[Array, "B H heights T"] | None,
    decay: Float[Array, "P B H T"] | None,
    since: Float[Array, "B H N heights"] | None,
    num_levels: int,
    sizes: Sizes,
    above: Int[Array, " B"] | None = None,
) -> tuple[Float[Array, "B T H L"], Float[Array, "B H N heights"] | None]:
    """(dλ [B, T, H, num_levels]; the gradient of `since` [B, H, N, heights], None as `since` is).

    Args:
      inside: [B, H, levels inside a chunk, T], dλ of those levels.
      read, weight: [B, H, heights, T], what the query read of the state at each height, without its weight, and that. Where no
        state is read, anything. None, as since and the second result, where there is one chunk alone.
      decay: of `decay_of_tokens`. since: `since_start`. above: of `upper_reads`, if there are heights above the tree's.
    """
    if why_cannot_run() is not None:
        return _lam_gradient_by_xla(inside, read, weight, decay, since, num_levels, sizes, above)
    batch, levels = inside.shape[0], max(num_levels, sizes.levels)
    columns = LAM_ELEMENTS // sizes.chunk
    operands, in_specs, results = [inside], [of_sequence(inside)], []
    if since is not None:
        operands += [read, weight, decay, since]
        in_specs += [of_sequence(read), of_sequence(weight), of_sequence(decay, axis=1), of_sequence(since)]
        if sizes.upper:
            operands.append(above)
            in_specs.append(of_sequence(above))
        results.append(jax.ShapeDtypeStruct((batch, sizes.num_chunks, sizes.heads * levels), jnp.float32))
    results.append(jax.ShapeDtypeStruct((batch, sizes.length, sizes.heads * levels), jnp.float32))
    *d_since, dlam = call(
        functools.partial(_lam_gradient_kernel, sizes=sizes, levels=levels, columns=columns),
        "lam_gradient",
        (sizes.num_chunks, pl.cdiv(sizes.heads * levels, columns), batch),
        in_specs,
        [of_sequence(result) for result in results],
        results,
        LAM_LAUNCH,
        sizes.interpret,
    )(*operands)
    dlam = dlam.reshape(batch, sizes.length, sizes.heads, levels)[..., :num_levels]
    if since is None:
        return dlam, None
    d_since = d_since[0].reshape(batch, sizes.num_chunks, sizes.heads, levels)
    return dlam, jnp.swapaxes(d_since[..., sizes.levels_inside : sizes.levels], 1, 2)


def _decay_gradient_by_xla(of_queries, of_keys, of_chunks, log_decay, sizes: Sizes):
    d_token = sum_tokens(sum(of_queries), np.greater_equal, sizes)
    if of_keys is not None:
        d_token += sum_tokens(of_keys, np.less, sizes)
    if of_chunks is not None:
        d_token += of_chunks[..., None]
    d_token = jnp.swapaxes(d_token.reshape(*d_token.shape[:2], sizes.length), 1, 2)
    return jnp.where(_is_used(log_decay), d_token, 0.0)


def _is_used(log_decay):
    """Whether a decay is taken as it is, not as the smallest or largest there is, on which nothing depends."""
    return (log_decay * LOG2_E >= MIN_LOG2_DECAY) & (log_decay <= 0.0)


def _lam_gradient_by_xla(inside, read, weight, decay, since, num_levels: int, sizes: Sizes, above):
    dlam, d_since = inside, None
    if since is not None:
        read = where_read(read, above, sizes)
        d_since = jnp.swapaxes(jnp.sum(by_chunk(where_read(weight, above, sizes) * read, sizes), axis=-1), 2, 3)
        dlam = jnp.concatenate([dlam, read_decay(decay, since, above, sizes) * read], axis=2)
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
        read_ref, weight_ref, decay_ref, since_ref, *above_ref, d_since_ref = tree_refs
        between = exists & (level >= sizes.levels_inside) & (level < sizes.levels)
        height = jnp.where(between, level - sizes.levels_inside, 0)
        if sizes.upper:
            chunk_and_above = jnp.where(height < sizes.heights, chunk, above_ref[0][...] << sizes.heights)
            reads = between & (lax.shift_right_logical(chunk_and_above, height) & 1 != 0)
        else:
            reads = between & has_left_sibling(chunk, height)
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


def _heads_a_program(sizes: Sizes) -> int:
    """Of the kernels of decays, a power of two."""
    return min(DECAY_LAUNCH.heads, 1 << (sizes.heads - 1).bit_length())


def _tokens_and_heads(sizes: Sizes, heads: int):
    """Numbers of the tokens and heads of a program, [C, heads] each, and which of them exist."""
    tile = (sizes.chunk, heads)
    token = pl.program_id(0) * sizes.chunk + lax.broadcasted_iota(jnp.int32, tile, 0)
    head = pl.program_id(1) * heads + lax.broadcasted_iota(jnp.int32, tile, 1)
    return token, head, head < sizes.heads


def _decay_gradient_kernel(log_decay_ref, *refs, sizes: Sizes, queries: int, named: tuple[str, ...], heads: int):
    """named: what else than queries there is, of "keys" and "chunks", in this order.

    A token's decay counts for queries from it on, and for keys before it.

    The sum over the queries from a token on is that over all of the chunk, less those before it. So NaN reaches all of a chunk.
    """
    *operand_refs, gradient_ref = refs
    token, head, exists = _tokens_and_heads(sizes, heads)

    def load(ref):
        return triton.load(ref.at[head, token], mask=exists, other=0.0)

    of_queries = sum(load(ref) for ref in operand_refs[:queries])
    others, of_all = -of_queries, jnp.sum(of_queries, axis=0)
    other_refs = dict(zip(named, operand_refs[queries:], strict=True))
    if "keys" in other_refs:
        others += load(other_refs["keys"])
    if "chunks" in other_refs:
        column = pl.program_id(1) * heads + lax.broadcasted_iota(jnp.int32, (heads,), 0)
        chunk = jnp.broadcast_to(pl.program_id(0), (heads,))
        of_all += triton.load(other_refs["chunks"].at[column, chunk], mask=column < sizes.heads, other=0.0)
    gradient = jnp.cumsum(others, axis=0) - others + of_all[None, :]
    log_decay = triton.load(log_decay_ref.at[token, head], mask=exists, other=0.0)
    triton.store(gradient_ref.at[token, head], jnp.where(_is_used(log_decay), gradient, 0.0), mask=exists)


def _decay_kernel(log_decay_ref, decay_ref, *, sizes: Sizes, heads: int):
    token, head, exists = _tokens_and_heads(sizes, heads)
    log_decay = triton.load(log_decay_ref.at[token, head], mask=exists, other=0.0)
    for part, x in enumerate(log2_decay_parts(log_decay, sizes)):
        triton.store(decay_ref.at[part, head, token], jnp.cumsum(x, axis=0), mask=exists)
