"""Log-linear attention by the kernels: preparation, custom gradient and batching rule around them."""

from __future__ import annotations

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
from jax.custom_batching import custom_vmap

from pallas_kernels import kernels
from pallas_kernels.kernels import Sizes
from pallas_kernels.support import UnsupportedError, dot_mode, interpreting, why_unsupported
from pallas_kernels.tiles import Tiles, choose_tiles

MIN_CHUNK, MAX_CHUNK = 16, 128
LOG2_E = math.log2(math.e)
# exp2 of this is 0 in float32, and sums of it over a chunk stay small.
MIN_LOG2_DECAY = -150.0
# Range sums over chunks go through masks of at most this many chunks at a time.
MASK_CHUNKS = 64


def fenwick_attention(q, k, v, log_decay, lam, *, chunk_size: int | None = None, precision=None, tiles: Tiles | None = None):
    """Log-linear attention of tokens 0 .. T-1 by the Pallas kernels: O(T log T), with a hand-written gradient.

    Args:
      q, k: [B, T, G, K], float32 or bfloat16, both and v alike; K and V from 16 to 256, T up to 2**20.
      v: [B, T, H, V], H a multiple of G.
      log_decay: [B, T, H] float32, ≤ 0.
      lam: [B, T, H, L] float32, L ≥ ceil(log2 T) + 1.
      chunk_size: tokens a tile, a power of two from 16 to 128; chosen from the shapes if None.
      precision: of float32 products, as in jax.lax.dot: full float32, or TF32, the GPU's default.
      tiles: how to cut the work into programs; chosen from the shapes if None.

    Returns o [B, T, H, V] in v's dtype. Differentiable in reverse mode, and batched by vmap, to any depth.

    Raises UnsupportedError where `why_unsupported` gives a reason, or for an impossible chunk_size.
    """
    batch, length, groups, key_dim = q.shape
    heads, value_dim = v.shape[2:]
    reason = why_unsupported(length, key_dim, value_dim, q.dtype, precision)
    if reason is not None:
        raise UnsupportedError(reason)
    tiles = tiles or choose_tiles(length, groups, heads, key_dim, value_dim, str(q.dtype))
    if chunk_size is not None:
        if not MIN_CHUNK <= chunk_size <= MAX_CHUNK:
            raise UnsupportedError(f"chunk_size is {chunk_size}: the Pallas kernels take {MIN_CHUNK} to {MAX_CHUNK}")
        tiles = dataclasses.replace(tiles, chunk=chunk_size, tiles=2 if chunk_size > 64 else 1)
    sizes = sizes_for(batch, length, groups, heads, key_dim, value_dim, q.dtype, precision, tiles)
    q, k = (_pad(x, (1, sizes.length), (3, sizes.key_dim)) for x in (q, k))
    v = _pad(v, (1, sizes.length), (3, sizes.value_blocks * sizes.value_dim))
    v = v.reshape(*v.shape[:2], sizes.all_heads, sizes.value_dim)
    log_decay, lam = (_pad(x, (1, sizes.length)) for x in (log_decay, lam))
    out = _differentiable(sizes, tiles)(q, k, v, log_decay, lam)
    return out.reshape(batch, sizes.length, heads, -1)[:, :length, :, :value_dim]


def sizes_for(
    batch: int, length: int, groups: int, heads: int, key_dim: int, value_dim: int, dtype, precision, tiles: Tiles
) -> Sizes:
    """What the kernels see of a problem of this shape: everything padded to whole tiles."""
    return Sizes(
        batch=batch,
        chunk=tiles.chunk,
        tiles=tiles.tiles,
        num_chunks=-(-length // tiles.chunk),
        groups=groups,
        heads=heads,
        value_blocks=-(-value_dim // tiles.value_block),
        key_dim=max(1 << (key_dim - 1).bit_length(), 16),
        value_dim=tiles.value_block,
        dtype=str(jnp.dtype(dtype)),
        precision=dot_mode(dtype, precision),
        interpret=interpreting(),
    )


def _pad(x, *axes_and_sizes):
    """x with zeros behind, up to the given size of each given axis."""
    widths = [(0, 0)] * x.ndim
    for axis, size in axes_and_sizes:
        widths[axis] = (0, size - x.shape[axis])
    return x if all(after == 0 for _, after in widths) else jnp.pad(x, widths)


def _differentiable(sizes: Sizes, tiles: Tiles):
    """The differentiable function (q, k, v, log_decay, lam) -> o for these sizes, in the kernels' shapes but for
    log_decay [B, T, H] and lam [B, T, H, L]."""
    forward, backward = _forward_and_backward(sizes, tiles)

    @jax.custom_vjp
    def apply(q, k, v, log_decay, lam):
        return forward(q, k, v, log_decay, lam)

    def apply_forward(q, k, v, log_decay, lam):
        return forward(q, k, v, log_decay, lam), (q, k, v, log_decay, lam)

    def apply_backward(residuals, do):
        return backward(*residuals, do)

    apply.defvjp(apply_forward, apply_backward)
    return apply


@functools.lru_cache(maxsize=None)
def _forward_and_backward(sizes: Sizes, tiles: Tiles):
    """Forward and backward with a batching rule each: a mapped axis becomes part of the batch, so grids keep their axes."""
    return (
        _fold_mapped_axes(functools.partial(_forward, sizes=sizes, tiles=tiles)),
        _fold_mapped_axes(functools.partial(_backward, sizes=sizes, tiles=tiles)),
    )


def _fold_mapped_axes(function):
    @custom_vmap
    def folding(*args):
        return function(*args)

    @folding.def_vmap
    def rule(axis_size, in_batched, *args):
        whole = [x if batched else jnp.broadcast_to(x, (axis_size, *x.shape)) for x, batched in zip(args, in_batched, strict=True)]
        results = folding(*(x.reshape(-1, *x.shape[2:]) for x in whole))
        results = jax.tree.map(lambda x: x.reshape(axis_size, -1, *x.shape[1:]), results)
        return results, jax.tree.map(lambda _: True, results)

    return folding


def _forward(q, k, v, log_decay, lam, *, sizes: Sizes, tiles: Tiles):
    sizes = dataclasses.replace(sizes, batch=q.shape[0])
    log2_decay, lam, chunk_decay = prepare(log_decay, lam, sizes)
    since = states = None
    if sizes.heights:
        since = since_block_start(chunk_decay)
        states = _states(k, v, log2_decay, chunk_decay, sizes, tiles)
    return kernels.outputs(q, k, v, log2_decay, lam, since, states, sizes, tiles.outputs)


def _backward(q, k, v, log_decay, lam, do, *, sizes: Sizes, tiles: Tiles):
    sizes = dataclasses.replace(sizes, batch=q.shape[0])
    lam_levels = lam.shape[-1]
    log2_decay, lam, chunk_decay = prepare(log_decay, lam, sizes)
    do = do.astype(v.dtype)
    since = states = gradients = None
    if sizes.heights:
        since, since_vjp = jax.vjp(since_block_start, chunk_decay)
        states = _states(k, v, log2_decay, chunk_decay, sizes, tiles)
        gradients = kernels.read_gradients(q, do, log2_decay, lam, since, sizes, tiles.read_gradients)
        gradients, d_merge = _chunk_gradients(gradients, states, chunk_decay, sizes, tiles)
    shared = q, k, v, do, log2_decay, lam
    dq, dlam, d_decay, *d_since = kernels.query_gradients(*shared, since, states, sizes, tiles.query_gradients)
    dk, dv, d_decay_by_key = kernels.key_gradients(*shared, gradients, sizes, tiles.key_gradients)

    def by_head(x):
        """Value blocks of a head summed: [B, R, ...] to [B, H, ...]."""
        if sizes.value_blocks == 1:
            return x
        return jnp.sum(x.reshape(x.shape[0], sizes.heads, sizes.value_blocks, *x.shape[2:]), axis=2)

    d_decay = by_head(d_decay + d_decay_by_key)
    if sizes.heights:
        # What lies between the chunks of a query and of a key decays as a whole.
        (d_chunk,) = since_vjp(by_head(d_since[0]))
        d_chunk += _sum_over_reads(by_head(d_merge))
        d_decay += jnp.repeat(d_chunk, sizes.chunk, axis=2)
    d_log_decay = jnp.where(log_decay * LOG2_E >= MIN_LOG2_DECAY, jnp.swapaxes(d_decay, 1, 2), 0.0)
    dlam = jnp.moveaxis(by_head(dlam), 3, 1)
    dlam = jnp.pad(dlam[..., :lam_levels], [(0, 0)] * 3 + [(0, max(lam_levels - sizes.levels, 0))])
    return jnp.sum(dq, axis=0).astype(q.dtype), jnp.sum(dk, axis=0).astype(k.dtype), dv, d_log_decay, dlam


def prepare(log_decay, lam, sizes: Sizes):
    """(log2_decay [B, H, T], lam [B, H, L, T] with exactly the tree's levels, log2 decay of each chunk [B, H, N])."""
    log2_decay = jnp.maximum(jnp.swapaxes(log_decay, 1, 2) * LOG2_E, MIN_LOG2_DECAY)
    lam = lam[..., : sizes.levels]
    lam = jnp.moveaxis(jnp.pad(lam, [(0, 0)] * 3 + [(0, sizes.levels - lam.shape[-1])]), 1, 3)
    chunk_decay = jnp.sum(log2_decay.reshape(*log2_decay.shape[:2], sizes.num_chunks, sizes.chunk), axis=3)
    return log2_decay, lam, chunk_decay


def _states(k, v, log2_decay, chunk_decay, sizes: Sizes, tiles: Tiles):
    """Bottom-up: the state of every node that is read."""
    size = min(tiles.span, 1 << sizes.heights)
    states = kernels.chunk_states(k, v, log2_decay, sizes, tiles.chunk_states, size)
    while 2 * size < sizes.num_chunks:
        decay = _node_decay(chunk_decay, size)
        launch = tiles.merge_states
        states = kernels.merge_states(states, decay, sizes, launch, size, tiles.radix, tiles.elements)
        size *= tiles.radix
    return states


def _chunk_gradients(read_gradients, states, chunk_decay, sizes: Sizes, tiles: Tiles):
    """Top-down: (the gradient of every chunk's own state; d_merge [B, R, N], at e that of the log decay of any chunk
    which state[e] passes on its way up)."""
    stages = [1]
    while stages[-1] * tiles.radix < sizes.num_chunks:
        stages.append(stages[-1] * tiles.radix)
    above = d_merge = None
    for size in reversed(stages):
        radix = min(tiles.radix, 1 << (-(-sizes.num_chunks // size) - 1).bit_length())
        decay, launch = _node_decay(chunk_decay, size), tiles.spread_gradients
        above, parts = kernels.spread_gradients(
            read_gradients, states, above, decay, sizes, launch, size, radix, tiles.elements
        )
        here = jnp.sum(parts, axis=3)
        index = np.arange(here.shape[2])
        from_above = 0.0 if d_merge is None else jnp.repeat(d_merge, radix, axis=2)[:, :, : len(index)]
        d_merge = jnp.where(index % radix == 0, from_above, here)
    return above, d_merge


def _node_decay(chunk_decay, size: int):
    """Log decays of nodes of `size` chunks, from those of chunks."""
    nodes = -(-chunk_decay.shape[2] // size)
    padded = jnp.pad(chunk_decay, [(0, 0), (0, 0), (0, nodes * size - chunk_decay.shape[2])])
    return jnp.sum(padded.reshape(*padded.shape[:2], nodes, size), axis=3)


def _sum_over_reads(x):
    """For each chunk, the sum of x [..., N] over the ends of the states that the chunk reads."""
    chunk = np.arange(x.shape[-1])[:, None]
    height = np.arange(max(x.shape[-1] - 1, 1).bit_length())
    return jnp.sum(jnp.where((chunk >> height) & 1 == 1, x[..., (chunk >> height) << height], 0.0), axis=-1)


def since_block_start(chunk_decay):
    """[..., N, heights]: the sum of chunks' log decays [..., N] from the start of the chunk's block of 2**height chunks
    up to the chunk. Linear, and never a difference."""
    num_chunks = chunk_decay.shape[-1]
    heights = (num_chunks - 1).bit_length()
    size = min(1 << heights, MASK_CHUNKS)
    local = (size - 1).bit_length()
    blocks = -(-num_chunks // size)
    padded = jnp.pad(chunk_decay, [(0, 0)] * (chunk_decay.ndim - 1) + [(0, blocks * size - num_chunks)])
    padded = padded.reshape(*chunk_decay.shape[:-1], blocks, size)

    # One height more than the block has: the sum over all of the block before each chunk.
    height, chunk, other = np.arange(local + 1), np.arange(size)[:, None, None], np.arange(size)[:, None]
    mask = (chunk >> height == other >> height) & (other < chunk)
    sums = jnp.einsum("...bo,coh->...bch", padded, mask.astype(np.float32), precision="highest")
    since = sums[..., :local]
    if blocks > 1:
        whole = since_block_start(jnp.sum(padded, axis=-1))
        since = jnp.concatenate([since, sums[..., local:] + whole[..., None, :]], axis=-1)
    return since.reshape(*chunk_decay.shape[:-1], blocks * size, heights)[..., :num_chunks, :]
