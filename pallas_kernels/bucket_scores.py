"""Bucket scores of the tokens of every chunk by one kernel, with its gradient: products of queries with keys inside a chunk,
summed by level, and with the sums of keys that the chunk reads.

What is built of sums of keys from the keys is left to plain JAX: there are T / C of them, not T.

Names and shapes inside, beside those of `kernels`:

  sums        [B, H, M, K]      of keys: the left node of every pair of nodes, height after height from the chunks up; a
                                height i has P / 2^(i+1) of them, for P chunks, N up to a power of two
  since       [B, H, N, heights]  log2 decay from the end of the node that a chunk reads at a height to the chunk
  scores      [B, H, L, T]      float32: of the levels inside a chunk, then of the heights
"""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels.chunks import (
    LOG2_E,
    Sizes,
    Specs,
    chunk_decay_of,
    decay_in_chunk,
    decay_parts,
    decay_tile,
    level_tile,
    multiply,
    since_block_start,
)
from pallas_kernels.common import call, fold_mapped_axes, pad
from pallas_kernels.support import UnsupportedError, dot_mode, interpreting, triton, why_unsupported
from pallas_kernels.tiles import Launch, ScoreTiles, tile_for


def chunk_scores(q, k, log_decay, sums, *, chunk_size: int, precision=None, tiles: ScoreTiles | None = None):
    """Bucket scores of tokens 0 .. T-1, in whole chunks of chunk_size.

    Args:
      q, k: [B, T, G, K], float32 or bfloat16, both alike; K from 16 to 256.
      log_decay: [B, T, H] float32, ≤ 0, H a multiple of G.
      sums: for each height i of the tree over the N chunks, the sums of keys of the nodes that are read there,
        [B, H, nodes, K]: of chunks [2j · 2^i, (2j + 1) · 2^i) for j = 0, 1, ...
      precision: of float32 products, as in jax.lax.dot. tiles: how to cut the work into programs; chosen if None.

    Returns scores [B, T, H, levels] in float32, 0 where a bucket is empty. Differentiable in reverse mode, and batched by vmap,
    to any depth.

    Raises UnsupportedError where `why_unsupported` gives a reason.
    """
    batch, length, groups, key_dim = q.shape
    reason = why_unsupported(key_dim, None, q.dtype, chunk_size, precision)
    if reason is not None:
        raise UnsupportedError(reason)
    sizes = Sizes(
        batch=batch,
        chunk=chunk_size,
        num_chunks=length // chunk_size,
        groups=groups,
        heads=log_decay.shape[2],
        key_dim=tile_for(key_dim),
        dtype=str(jnp.dtype(q.dtype)),
        precision=dot_mode(q.dtype, precision),
        interpret=interpreting(),
    )
    tiles = (tiles or ScoreTiles()).fitted(sizes.group_heads)
    decay = decay_in_chunk(log_decay, sizes)
    operands = [*(pad(x, (3, sizes.key_dim)) for x in (q, k)), jnp.moveaxis(decay, 0, 1)]
    if sizes.heights:
        whole = 1 << sizes.heights
        sums = [pad(x, (2, whole >> (height + 1)), (3, sizes.key_dim)) for height, x in enumerate(sums)]
        since = since_block_start(chunk_decay_of(decay, sizes))
        operands += [jnp.concatenate(sums, axis=2).astype(q.dtype), since]
    return jnp.moveaxis(_differentiable(sizes, tiles)(*operands), 3, 1)


@functools.cache
def _differentiable(sizes: Sizes, tiles: ScoreTiles):
    """The function (q, k, decay [B, P, H, T], sums, since) -> scores."""
    forward = fold_mapped_axes(functools.partial(_forward, sizes=sizes, launch=tiles.scores))
    backward = fold_mapped_axes(functools.partial(_backward, sizes=sizes, launch=tiles.gradients))
    apply = jax.custom_vjp(forward)
    apply.defvjp(lambda *operands: (forward(*operands), operands), lambda operands, d: backward(*operands, d))
    return apply


def _tree_specs(sizes: Sizes, specs: Specs):
    """[heads, M, K] of all sums, and [heads, heights] of one chunk's since."""
    if not sizes.heights:
        return []
    nodes = (1 << sizes.heights) - 1
    heads = specs.launch.heads
    return [
        pl.BlockSpec((None, heads, nodes, sizes.key_dim), lambda x, y, z: (*specs.batch_and_heads(y, z), 0, 0)),
        pl.BlockSpec((None, heads, None, sizes.heights), lambda x, y, z: (*specs.batch_and_heads(y, z), x, 0)),
    ]


def _forward(q, k, decay, *tree, sizes: Sizes, launch: Launch):
    sizes = dataclasses.replace(sizes, batch=q.shape[0])
    specs = Specs(sizes, launch)
    return call(
        functools.partial(_scores_kernel, sizes=sizes, launch=launch),
        "bucket_scores",
        specs.grid(sizes.num_chunks),
        [specs.keys(), specs.keys(), specs.decay(), *_tree_specs(sizes, specs)],
        specs.by_level(sizes.levels),
        jax.ShapeDtypeStruct((sizes.batch, sizes.heads, sizes.levels, sizes.length), jnp.float32),
        launch,
        sizes.interpret,
    )(q, k, jnp.moveaxis(decay, 1, 0), *tree)


def _backward(q, k, decay, *tree_and_d_scores, sizes: Sizes, launch: Launch):
    sizes = dataclasses.replace(sizes, batch=q.shape[0])
    specs = Specs(sizes, launch)
    per_head = (sizes.batch, sizes.heads)
    partial = jax.ShapeDtypeStruct((specs.head_blocks, *q.shape), jnp.float32)
    out_specs = [specs.partial_keys(), specs.partial_keys(), specs.by_token()]
    out_shape = [partial, partial, jax.ShapeDtypeStruct((*per_head, sizes.length), jnp.float32)]
    if sizes.heights:
        _, since_spec = _tree_specs(sizes, specs)
        out_specs += [
            pl.BlockSpec(
                (None, launch.heads, None, sizes.heights, sizes.key_dim),
                lambda x, y, z: (*specs.batch_and_heads(y, z), x, 0, 0),
            ),
            since_spec,
        ]
        read = (*per_head, sizes.num_chunks, sizes.heights)
        out_shape += [
            jax.ShapeDtypeStruct((*read, sizes.key_dim), jnp.float32),
            jax.ShapeDtypeStruct(read, jnp.float32),
        ]
    dq, dk, d_decay, *d_tree = call(
        functools.partial(_gradients_kernel, sizes=sizes, launch=launch),
        "bucket_score_gradients",
        specs.grid(sizes.num_chunks),
        [specs.keys(), specs.keys(), specs.decay(), *_tree_specs(sizes, specs), specs.by_level(sizes.levels)],
        out_specs,
        out_shape,
        launch,
        sizes.interpret,
    )(q, k, jnp.moveaxis(decay, 1, 0), *tree_and_d_scores)
    dq, dk = (jnp.sum(x, axis=0).astype(q.dtype) for x in (dq, dk))
    # Of each part, as decay is their sum; and by log2 decay.
    d_decay = jnp.broadcast_to(d_decay[:, None] / LOG2_E, decay.shape)
    if sizes.heights:
        d_read, d_since = d_tree
        return dq, dk, d_decay, _sum_over_readers(d_read, sizes).astype(q.dtype), d_since / LOG2_E
    return dq, dk, d_decay


def _sum_over_readers(d_read, sizes: Sizes):
    """Gradients of `sums` from those of what each chunk reads, [B, H, N, heights, K]: of each node, its sibling's chunks'."""
    whole = 1 << sizes.heights
    d_sums = []
    for height in range(sizes.heights):
        d = pad(d_read[:, :, :, height], (2, whole))
        d = d.reshape(*d.shape[:2], whole >> (height + 1), 2, 1 << height, d.shape[3])
        d_sums.append(jnp.sum(d[:, :, :, 1], axis=3))
    return jnp.concatenate(d_sums, axis=2)


# --- Kernels --------------------------------------------------------------------------------------------------------


def _what_is_read(sums_ref, since_ref, head, chunk, decay, sizes: Sizes):
    """(sums [heights, K] that a chunk reads, their decay to each token [heights, C]), with 0 where it reads none; heights up to
    the size of a tile."""
    rows = tile_for(sizes.heights)

    def row(columns):
        return lax.broadcasted_iota(jnp.int32, (rows, columns), 0)

    height = row(sizes.key_dim)
    # Left nodes of the heights below this one, then those of it up to the one that the chunk reads.
    whole = 1 << sizes.heights
    node = whole - (whole >> height) + (chunk >> (height + 1))
    column = lax.broadcasted_iota(jnp.int32, (rows, sizes.key_dim), 1)
    read = triton.load(sums_ref.at[head, node, column], mask=(chunk >> height) & 1 == 1, other=0.0)
    index = lax.iota(jnp.int32, rows)
    since = triton.load(since_ref.at[head, index], mask=index < sizes.heights, other=0.0)
    kept = jnp.exp2(since[:, None] + sum(decay)[None, :])
    return read, jnp.where((chunk >> row(sizes.chunk)) & 1 == 1, kept, 0.0)


def _rows_of_heights(ref, head, sizes: Sizes):
    """(the part of ref [heads, levels, C] of the heights as [heights, C], which of that there is)."""
    rows = tile_for(sizes.heights)
    row = lax.broadcasted_iota(jnp.int32, (rows, sizes.chunk), 0)
    token = lax.broadcasted_iota(jnp.int32, (rows, sizes.chunk), 1)
    return ref.at[head, sizes.levels_inside + row, token], row < sizes.heights


def _scores_kernel(q_ref, k_ref, decay_ref, *refs, sizes: Sizes, launch: Launch):
    *tree_refs, scores_ref = refs
    chunk = pl.program_id(0)
    q = q_ref[:, :]
    products = multiply(q, k_ref[:, :], sizes, transpose_y=True)
    level = level_tile(sizes.chunk)

    def one_head(head, _):
        decay = decay_parts(decay_ref, head, slice(None), sizes)
        weights = products * decay_tile(decay)
        for index in range(sizes.levels_inside):
            scores_ref[head, index, :] = jnp.sum(jnp.where(level == index, weights, 0.0), axis=1)
        if sizes.heights:
            read, kept = _what_is_read(*tree_refs, head, chunk, decay, sizes)
            window, exists = _rows_of_heights(scores_ref, head, sizes)
            triton.store(window, kept * multiply(read, q, sizes, transpose_y=True), mask=exists)

    lax.fori_loop(0, launch.heads, one_head, None)


def _gradients_kernel(q_ref, k_ref, decay_ref, *refs, sizes: Sizes, launch: Launch):
    if sizes.heights:
        sums_ref, since_ref, d_scores_ref, dq_ref, dk_ref, d_decay_ref, d_read_ref, d_since_ref = refs
    else:
        d_scores_ref, dq_ref, dk_ref, d_decay_ref = refs
    chunk = pl.program_id(0)
    q, k = q_ref[:, :], k_ref[:, :]
    products = multiply(q, k, sizes, transpose_y=True)
    level = level_tile(sizes.chunk)

    def one_head(head, carry):
        d_products, dq = carry
        decay = decay_parts(decay_ref, head, slice(None), sizes)
        d_weights = jnp.zeros((sizes.chunk, sizes.chunk), jnp.float32)
        for index in range(sizes.levels_inside):
            d_weights = jnp.where(level == index, d_scores_ref[head, index, :][:, None], d_weights)
        d_weights *= decay_tile(decay)
        # Without the diagonal, through which no decay passes.
        of_decay = jnp.where(level > 0, d_weights * products, 0.0)
        d_decay = jnp.sum(of_decay, axis=1) - jnp.sum(of_decay, axis=0)
        if sizes.heights:
            read, kept = _what_is_read(sums_ref, since_ref, head, chunk, decay, sizes)
            window, exists = _rows_of_heights(d_scores_ref, head, sizes)
            d_read = kept * triton.load(window, mask=exists, other=0.0)  # [heights, C]
            of_decay = d_read * multiply(read, q, sizes, transpose_y=True)
            d_decay += jnp.sum(of_decay, axis=0)
            d_read = d_read.astype(sizes.dtype)
            dq += multiply(d_read, read, sizes, transpose_x=True)
            index = lax.iota(jnp.int32, read.shape[0])
            triton.store(d_since_ref.at[head, index], jnp.sum(of_decay, axis=1), mask=index < sizes.heights)
            row, column = (lax.broadcasted_iota(jnp.int32, read.shape, axis) for axis in (0, 1))
            d_sums = multiply(d_read, q, sizes)
            triton.store(d_read_ref.at[head, row, column], d_sums, mask=row < sizes.heights)
        d_decay_ref[head, :] = d_decay
        return d_products + d_weights, dq

    zeros = jnp.zeros((sizes.chunk, sizes.chunk), jnp.float32), jnp.zeros((sizes.chunk, sizes.key_dim), jnp.float32)
    d_products, dq = lax.fori_loop(0, launch.heads, one_head, zeros)
    d_products = d_products.astype(sizes.dtype)
    dq_ref[:, :] = dq + multiply(d_products, k, sizes)
    dk_ref[:, :] = multiply(d_products, q, sizes, transpose_x=True)
