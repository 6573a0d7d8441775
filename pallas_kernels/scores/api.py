"""Bucket scores of the tokens of every chunk by one kernel, with its gradient: products of queries with keys inside a chunk,
summed by level, and with the sums of keys that the chunk reads, of several heads in one product.

Sums of a chunk's keys are left to plain JAX, and those of nodes to `key_tree`: there are T / C of them, not T.

Names and shapes inside, beside those of `attention.triton`:

  sums        [B, H, M, K]      of keys: the left node of every pair of nodes, height after height from the chunks up; a
                                height i has P / 2^(i+1) of them, for P chunks, N up to a power of two
  since       [B, H, N, heights]  log2 decay from the end of the node that a chunk reads at a height to the chunk
  scores      [B, H, L, T]      float32: of the levels inside a chunk, then of the heights
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.lax import PrecisionLike
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from loglinear_jax.fenwick import has_left_sibling
from pallas_kernels.attention.backends import triton_limits
from pallas_kernels.common.by_token import differentiable_decay
from pallas_kernels.common.chunks import (
    LOG2_E,
    Sizes,
    Specs,
    by_chunk,
    chunk_decay_of,
    decay_parts,
    decay_tile,
    level_tile,
    multiply,
    since_block_start,
)
from pallas_kernels.common.launch import HeadAxes, call, pad, with_gradient
from pallas_kernels.common.support import FAST_MODES, dot_mode, gpu, interpreting, triton
from pallas_kernels.common.tiles import MIN_TILE, Launch, tile_for
from pallas_kernels.registry import Kernel, register
from pallas_kernels.scores.key_tree import join_keys
from pallas_kernels.scores.tiles import ScoreTiles, choose_score_tiles

READ_BYTES = 16 * 1024  # of sums that a program reads at once, or of scores that come of them


def _limits(
    key_dim: int, dtype: DTypeLike, chunk_size: int | None = None, precision: PrecisionLike = None
) -> str | None:
    return triton_limits(key_dim, None, dtype, chunk_size, precision)


def _no_gain(
    key_dim: int, dtype: DTypeLike, chunk_size: int | None = None, precision: PrecisionLike = None
) -> str | None:
    """ptxas would leave 32 registers to each thread: see `pallas_kernels.compile_table`."""
    del chunk_size
    if key_dim > 128 and dot_mode(dtype, precision) == "f32" and gpu().capability == (8, 0):
        return f"K, the key dim, is {key_dim}: with more than 128 on an A100 the kernels pay in {FAST_MODES}"
    return None


SCORES = register("bucket_scores", Kernel("bucket_scores", _limits, no_gain=_no_gain))


def chunk_scores(
    q: Float[Array, "B T G K"],
    k: Float[Array, "B T G K"],
    log_decay: Float[Array, "B T H"],
    *,
    chunk_size: int,
    precision: PrecisionLike = None,
    tiles: ScoreTiles | None = None,
    segmented: bool = False,
) -> Float[Array, "B T H levels"]:
    """Bucket scores of tokens 0 .. T-1, in whole chunks of chunk_size.

    Args:
      q, k: [B, T, G, K], float32 or bfloat16, both alike; K from 16 to 256.
      log_decay: [B, T, H] float32, ≤ 0, H a multiple of G.
      segmented: as in `fenwick_attention`.
      precision: of float32 products, as in jax.lax.dot. tiles: how to cut the work into programs; chosen if None.

    Returns scores [B, T, H, levels] in float32, 0 where a bucket is empty. Differentiable in reverse mode, and batched by vmap,
    to any depth.

    Raises UnsupportedError where KERNELS["bucket_scores"] says why it cannot run.
    """
    batch, length, groups, key_dim = q.shape
    SCORES.require(key_dim, q.dtype, chunk_size, precision)
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
        segmented=segmented,
    )
    decay = differentiable_decay(sizes)(log_decay)
    q, k = (pad(x, (3, sizes.key_dim)) for x in (q, k))
    tree = []
    if sizes.heights:
        chunk_decay = chunk_decay_of(jnp.moveaxis(decay, 1, 0), sizes)
        sums = join_keys(_sums_of_chunks(k, decay, sizes, precision), chunk_decay, q.dtype)
        tree = [sums, since_block_start(chunk_decay)]
    return jnp.moveaxis(_differentiable(sizes, tiles)(q, k, decay, *tree), 3, 1)


def _sums_of_chunks(k, decay, sizes: Sizes, precision):
    """Sums of each chunk's keys, decayed until its end, [B, H, N, K] in float32; decay [B, P, H, T]."""
    decay = by_chunk(decay, sizes)
    kept = jnp.exp2(jnp.sum(decay[..., -1:] - decay, axis=1)).astype(k.dtype)  # of two parts, each is exact
    kept = kept.reshape(sizes.batch, sizes.groups, sizes.group_heads, sizes.num_chunks, sizes.chunk)
    k = k.reshape(sizes.batch, sizes.num_chunks, sizes.chunk, *k.shape[2:])
    of_chunks = jnp.einsum("bnsgk,bgrns->bgrnk", k, kept, precision=precision, preferred_element_type=jnp.float32)
    return of_chunks.reshape(sizes.batch, sizes.heads, *of_chunks.shape[3:])


@functools.cache
def _differentiable(sizes: Sizes, tiles: ScoreTiles | None):
    """The function (q, k, decay [B, P, H, T], sums, since) -> scores."""
    axes = HeadAxes(sizes.shared_out, (2, 2, 2, *([1, 1] if sizes.heights else [])), (1,))
    return with_gradient(*(functools.partial(way, sizes=sizes, tiles=tiles) for way in (_forward, _backward)), axes)


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


def _fitted(sizes: Sizes, tiles: ScoreTiles | None) -> ScoreTiles:
    """These tiles, or the best ones, for the batch with all mapped axes."""
    chunks = sizes.batch * sizes.groups * sizes.num_chunks
    chosen = tiles or choose_score_tiles(sizes.group_heads, chunks, sizes.key_dim, sizes.precision)
    return chosen.fitted(sizes.group_heads)


def _forward(q, k, decay, *tree, sizes: Sizes, tiles: ScoreTiles | None):
    sizes = sizes.of_arrays(q, decay.shape[2])
    launch = _fitted(sizes, tiles).scores
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


def _backward(q, k, decay, *tree_and_d_scores, sizes: Sizes, tiles: ScoreTiles | None):
    sizes = sizes.of_arrays(q, decay.shape[2])
    launch = _fitted(sizes, tiles).gradients
    specs = Specs(sizes, launch)
    per_head = (sizes.batch, sizes.heads)
    partial = jax.ShapeDtypeStruct((specs.head_blocks, *q.shape), jnp.float32)
    by_token = jax.ShapeDtypeStruct((*per_head, sizes.length), jnp.float32)
    out_specs = [specs.partial_keys(), specs.partial_keys(), specs.by_token()]
    out_shape = [partial, partial, by_token]
    if sizes.heights:
        _, since_spec = _tree_specs(sizes, specs)
        out_specs += [
            specs.by_token(),
            pl.BlockSpec(
                (None, launch.heads, None, sizes.heights, sizes.key_dim),
                lambda x, y, z: (*specs.batch_and_heads(y, z), x, 0, 0),
            ),
            since_spec,
        ]
        read = (*per_head, sizes.num_chunks, sizes.heights)
        out_shape += [
            by_token,
            jax.ShapeDtypeStruct((*read, sizes.key_dim), sizes.dtype),
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
    if sizes.heights:
        of_read, d_read, d_since = d_tree
        d_decay += of_read
        d_tree = _sum_over_readers(d_read, sizes).astype(q.dtype), d_since / LOG2_E
    # Of each part, as decay is their sum; and by log2 decay.
    return dq, dk, jnp.broadcast_to(d_decay[:, None] / LOG2_E, decay.shape), *d_tree


def _sum_over_readers(d_read, sizes: Sizes):
    """Gradients of `sums` from those of what each chunk reads, [B, H, N, heights, K]: of each node, its sibling's chunks'.

    d_read is not set at the heights where a chunk reads no node, and not used there.
    """
    whole = 1 << sizes.heights
    d_sums = []
    for height in range(sizes.heights):
        d = pad(d_read[:, :, :, height], (2, whole))
        d = d.reshape(*d.shape[:2], whole >> (height + 1), 2, 1 << height, d.shape[3])
        d_sums.append(jnp.sum(d[:, :, :, 1].astype(jnp.float32), axis=3))
    return jnp.concatenate(d_sums, axis=2)


# --- Kernels --------------------------------------------------------------------------------------------------------


class _Reads:
    """What a chunk reads of the tree for several heads, from `first` on: a row for every height of every head.

    A head's rows are rounded up to a power of two, and the rows of all to a tile. `exists`: which rows are heights of heads;
    `reads`: for which of them the chunk reads a node. sums [rows, K] and decay [rows, C] of the others are 0.
    """

    def __init__(self, sums_ref, since_ref, decay_ref, chunk, first, sizes: Sizes, launch: Launch):
        rows_of_head = _rows_of_head(sizes)
        row = lax.iota(jnp.int32, _heads_at_once(sizes, launch) * rows_of_head)
        self.head, self.height = first + (row >> rows_of_head.bit_length() - 1), row & rows_of_head - 1
        self.exists = (self.head < launch.heads) & (self.height < sizes.heights)
        self.reads = self.exists & has_left_sibling(chunk, self.height)
        self.token = lax.iota(jnp.int32, sizes.chunk)[None, :]
        self.column = lax.iota(jnp.int32, sizes.key_dim)[None, :]
        # Left nodes of the heights below this one, then those of it up to the one that the chunk reads.
        whole = 1 << sizes.heights
        node = whole - (whole >> self.height) + (chunk >> (self.height + 1))
        self.sums = self.load(sums_ref.at[self.head[:, None], node[:, None], self.column])
        since = triton.load(since_ref.at[self.head, self.height], mask=self.reads, other=0.0)
        parts = [self.load(decay_ref.at[part, self.head[:, None], self.token]) for part in range(sizes.decay_parts)]
        # The selection keeps Triton from computing this anew in the layout of every product that it is for.
        self.decay = jnp.where(self.reads[:, None], jnp.exp2(since[:, None] + sum(parts)), 0.0)
        self.level = sizes.levels_inside + self.height

    def load(self, rows):
        return triton.load(rows, mask=self.reads[:, None], other=0.0)

    def scores(self, ref):
        """The rows of ref [heads, levels, C] that are of these heads and heights."""
        return ref.at[self.head[:, None], self.level[:, None], self.token]


def _rows_of_head(sizes: Sizes) -> int:
    return 1 << (sizes.heights - 1).bit_length()


def _heads_at_once(sizes: Sizes, launch: Launch) -> int:
    """A power of two, of heads whose rows make tiles of READ_BYTES; of more than the launch has, to fill the smallest tile."""
    rows = _rows_of_head(sizes)
    row_bytes = max(sizes.key_dim * jnp.dtype(sizes.dtype).itemsize, sizes.chunk * 4)
    if sizes.precision == "f32":
        row_bytes *= 4  # operands are split into two parts each, and registers hold them all
    most = READ_BYTES // (row_bytes * rows)
    return max(min(most, 1 << (launch.heads - 1).bit_length()), MIN_TILE // rows, 1)


def _for_heads_at_once(body, carry, sizes: Sizes, launch: Launch):
    """body(the first of some heads, carry) for all."""
    heads = _heads_at_once(sizes, launch)
    return lax.fori_loop(0, pl.cdiv(launch.heads, heads), lambda i, carry: body(i * heads, carry), carry)


def _scores_kernel(q_ref, k_ref, decay_ref, *refs, sizes: Sizes, launch: Launch):
    *tree_refs, scores_ref = refs
    chunk = pl.program_id(0)
    q = q_ref[:, :]
    products = multiply(q, k_ref[:, :], sizes, transpose_y=True)
    level = level_tile(sizes.chunk)

    def inside(head, _):
        weights = products * decay_tile(decay_parts(decay_ref, head, slice(None), sizes))
        for index in range(sizes.levels_inside):
            scores_ref[head, index, :] = jnp.sum(jnp.where(level == index, weights, 0.0), axis=1)

    def between(first, _):
        read = _Reads(*tree_refs, decay_ref, chunk, first, sizes, launch)
        scores = read.decay * multiply(read.sums, q, sizes, transpose_y=True)
        triton.store(read.scores(scores_ref), scores, mask=read.exists[:, None])

    lax.fori_loop(0, launch.heads, inside, None)
    if sizes.heights:
        _for_heads_at_once(between, None, sizes, launch)


def _gradients_kernel(q_ref, k_ref, decay_ref, *refs, sizes: Sizes, launch: Launch):
    if sizes.heights:
        *tree_refs, d_scores_ref, dq_ref, dk_ref, d_decay_ref, of_read_ref, d_read_ref, d_since_ref = refs
    else:
        d_scores_ref, dq_ref, dk_ref, d_decay_ref = refs
    chunk = pl.program_id(0)
    q, k = q_ref[:, :], k_ref[:, :]
    products = multiply(q, k, sizes, transpose_y=True)
    level = level_tile(sizes.chunk)

    def inside(head, d_products):
        d_weights = jnp.zeros((sizes.chunk, sizes.chunk), jnp.float32)
        for index in range(sizes.levels_inside):
            d_weights = jnp.where(level == index, d_scores_ref[head, index, :][:, None], d_weights)
        d_weights *= decay_tile(decay_parts(decay_ref, head, slice(None), sizes))
        # Without the diagonal, through which no decay passes.
        of_decay = jnp.where(level > 0, d_weights * products, 0.0)
        d_decay_ref[head, :] = jnp.sum(of_decay, axis=1) - jnp.sum(of_decay, axis=0)
        return d_products + d_weights

    def between(first, dq):
        read = _Reads(*tree_refs, decay_ref, chunk, first, sizes, launch)
        d_read = read.decay * read.load(read.scores(d_scores_ref))  # [rows, C]
        of_decay = d_read * multiply(read.sums, q, sizes, transpose_y=True)
        d_since = jnp.sum(of_decay, axis=1)
        triton.store(d_since_ref.at[read.head, read.height], d_since, mask=read.exists)
        # Of decay inside the chunk, which comes after that since the node.
        by_head = jnp.sum(of_decay.reshape(-1, _rows_of_head(sizes), sizes.chunk), axis=1)
        head = first + lax.broadcasted_iota(jnp.int32, by_head.shape, 0)
        triton.store(of_read_ref.at[head, read.token], by_head, mask=head < launch.heads)
        d_read = d_read.astype(sizes.dtype)
        d_sums = multiply(d_read, q, sizes)
        window = d_read_ref.at[read.head[:, None], read.height[:, None], read.column]
        triton.store(window, d_sums.astype(sizes.dtype), mask=read.reads[:, None])
        return dq + multiply(d_read, read.sums, sizes, transpose_x=True)

    # No level is so high: zeros, but in the layout of products. Of others, Triton would compute all that is added to them anew.
    zeros = jnp.where(level >= sizes.levels_inside, products, 0.0)
    d_products = lax.fori_loop(0, launch.heads, inside, zeros).astype(sizes.dtype)
    dk_ref[:, :] = multiply(d_products, q, sizes, transpose_x=True)
    dq = multiply(d_products, k, sizes)
    if sizes.heights:
        dq = _for_heads_at_once(between, dq, sizes, launch)
    dq_ref[:, :] = dq
