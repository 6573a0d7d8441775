"""Log-linear attention by the kernels: preparation, custom gradient and batching rule around them."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax.lax import PrecisionLike
from jaxtyping import Array, Float

from loglinear_jax.fenwick import has_left_sibling, tree_heights
from pallas_kernels.attention import triton
from pallas_kernels.attention.backends import choose_backend
from pallas_kernels.attention.hopper.tiles import HopperTiles, choose_hopper_tiles
from pallas_kernels.attention.tiles import Tiles, choose_tiles
from pallas_kernels.attention.triton import AttentionSizes
from pallas_kernels.common.by_token import decay_gradient, decay_of_tokens, lam_gradient
from pallas_kernels.common.chunks import chunk_decay_of, since_block_start
from pallas_kernels.common.launch import fold_mapped_axes, pad
from pallas_kernels.common.support import dot_mode, interpreting
from pallas_kernels.common.tiles import tile_for


def fenwick_attention(
    q: Float[Array, "B T G K"],
    k: Float[Array, "B T G K"],
    v: Float[Array, "B T H V"],
    log_decay: Float[Array, "B T H"],
    lam: Float[Array, "B T H L"],
    *,
    chunk_size: int | None = None,
    precision: PrecisionLike = None,
    tiles: Tiles | HopperTiles | None = None,
) -> Float[Array, "B T H V"]:
    """Log-linear attention of tokens 0 .. T-1 by the Pallas kernels: O(T log T), with a hand-written gradient.

    Shapes are not checked here: `loglinear_jax.log_linear_attention`, which calls it, checks them.

    Args:
      q, k: [B, T, G, K], float32 or bfloat16, both and v alike; K and V from 16 to 256.
      v: [B, T, H, V], H a multiple of G.
      log_decay: [B, T, H] float32, ≤ 0.
      lam: [B, T, H, L] float32, L ≥ ceil(log2 T) + 1.
      chunk_size: tokens a tile, a power of two from 16 to 128 (64 for float32); chosen if None.
      precision: of float32 products, as in jax.lax.dot: full float32, or TF32, the GPU's default.
      tiles: how to cut the work into programs, and with it whose kernels to take: those for Hopper GPUs, or those for any
        since Ampere; chosen from the shapes, the GPU and JAX's version if None.

    Returns o [B, T, H, V] in v's dtype. Differentiable in reverse mode, and batched by vmap, to any depth.

    Raises UnsupportedError where KERNELS["log_linear_attention"] says why it cannot run.
    """
    batch, length, groups, key_dim = q.shape
    heads, value_dim = v.shape[2:]
    backend = choose_backend(tiles and tiles.backend, key_dim, value_dim, q.dtype, chunk_size, precision)
    chosen, for_hopper = tiles, backend == "hopper"
    if chosen is None:
        tiles = (
            choose_hopper_tiles(length, value_dim)
            if for_hopper
            else choose_tiles(length, tile_for(key_dim), value_dim, q.dtype, precision)
        )
    if chunk_size is not None:
        tiles = tiles.with_chunk(chunk_size)
    if chosen is None:
        tiles = (
            tiles.filling(heads // groups, groups, length, batch)
            if for_hopper
            else tiles.in_shared_memory(tile_for(key_dim), q.dtype)
        )
    sizes = sizes_for(batch, length, groups, heads, key_dim, value_dim, q.dtype, precision, tiles)
    tiles = tiles.fitted(sizes.group_heads, sizes.value_blocks, groups)
    q, k = (pad(x, (1, sizes.length), (3, sizes.key_dim)) for x in (q, k))
    v = pad(v, (1, sizes.length), (3, sizes.value_blocks * sizes.value_dim))
    v = v.reshape(*v.shape[:2], sizes.all_heads, sizes.value_dim)
    log_decay, lam = (pad(x, (1, sizes.length)) for x in (log_decay, lam))
    out = _differentiable(sizes, tiles)(q, k, v, log_decay, lam)
    return out.reshape(batch, sizes.length, heads, -1)[:, :length, :, :value_dim]


def sizes_for(
    batch: int,
    length: int,
    groups: int,
    heads: int,
    key_dim: int,
    value_dim: int,
    dtype,
    precision,
    tiles: Tiles | HopperTiles,
) -> AttentionSizes:
    """What the kernels see of a problem of this shape: everything padded to whole tiles."""
    num_chunks = -(-length // tiles.chunk)
    read_chunks = min(tiles.read_chunks, num_chunks)
    num_chunks = -(-num_chunks // read_chunks) * read_chunks
    return AttentionSizes(
        batch=batch,
        chunk=tiles.chunk,
        num_chunks=num_chunks,
        read_chunks=read_chunks,
        groups=groups,
        heads=heads,
        value_blocks=-(-value_dim // tiles.value_block),
        key_dim=max(tile_for(key_dim), tiles.min_dim),
        value_dim=tiles.value_block,
        dtype=str(jnp.dtype(dtype)),
        precision=dot_mode(dtype, precision),
        interpret=interpreting(),
    )


def _differentiable(sizes: AttentionSizes, tiles: Tiles | HopperTiles):
    """The differentiable function (q, k, v, log_decay, lam) -> o for these sizes, in the kernels' shapes but for
    log_decay [B, T, H] and lam [B, T, H, L]."""
    forward, forward_and_keep, backward = _passes(sizes, tiles)

    @jax.custom_vjp
    def apply(q, k, v, log_decay, lam):
        return forward(q, k, v, log_decay, lam)[0]

    def apply_forward(q, k, v, log_decay, lam):
        out, *kept = forward_and_keep(q, k, v, log_decay, lam)
        return out, (q, k, v, log_decay, lam, *kept)

    def apply_backward(residuals, do):
        return backward(do, *residuals)

    apply.defvjp(apply_forward, apply_backward)
    return apply


@functools.cache
def _passes(sizes: AttentionSizes, tiles: Tiles | HopperTiles):
    """The forward pass alone, that before a backward one, and the backward one, with a batching rule each: a mapped axis
    becomes part of the batch, so grids keep their axes."""
    forward = functools.partial(_forward, sizes=sizes, tiles=tiles)
    ways = (
        functools.partial(forward, keep=False),
        functools.partial(forward, keep=True),
        functools.partial(_backward, sizes=sizes, tiles=tiles),
    )
    # Mosaic's interpreter has ordered effects, which JAX's partitioning rules do not take.
    partitioned = tiles.backend == "triton" or not sizes.interpret
    return tuple(fold_mapped_axes(way, partitioned) for way in ways)


def _scan_of(tiles: Tiles | HopperTiles):
    """The module of the kernels that these tiles are for."""
    if tiles.backend == "triton":
        return triton
    from pallas_kernels.attention.hopper import scan  # which only JAX from 0.11.2 on can import

    return scan


def _forward(q, k, v, log_decay, lam, *, sizes: AttentionSizes, tiles: Tiles | HopperTiles, keep: bool):
    """[o], and for a backward pass decays since a chunk's start and, where states are read, `since`, the states and weights."""
    sizes = dataclasses.replace(sizes, batch=q.shape[0])
    decay = decay_of_tokens(log_decay, sizes)
    since = states = None
    if sizes.heights:
        chunk_decay = chunk_decay_of(decay, sizes)
        since = since_block_start(chunk_decay)
        states = _states(k, v, decay, chunk_decay, sizes, tiles)
    out, weight = _scan_of(tiles).outputs(q, k, v, decay, lam, since, states, sizes, tiles, keep)
    if not keep:
        return [out]
    kept = [since, states, weight] if sizes.heights else []
    return [out, jnp.swapaxes(decay, 0, 1), *kept]


def _backward(
    do, q, k, v, log_decay, lam, decay, since=None, states=None, weight=None,
    *, sizes: AttentionSizes, tiles: Tiles | HopperTiles,
):  # fmt: skip
    sizes, scan = dataclasses.replace(sizes, batch=q.shape[0]), _scan_of(tiles)
    do, decay = do.astype(v.dtype), jnp.swapaxes(decay, 0, 1)

    def by_head(x):
        """Value blocks of a head summed: [B, R, ...] to [B, H, ...]."""
        if sizes.value_blocks == 1:
            return x
        return jnp.sum(x.reshape(x.shape[0], sizes.heads, sizes.value_blocks, *x.shape[2:]), axis=2)

    gradients = read = of_chunks = None
    if sizes.heights:
        chunk_decay = chunk_decay_of(decay, sizes)
        _, since_vjp = jax.vjp(since_block_start, chunk_decay)
        gradients = scan.state_gradients(q, do, weight, sizes, tiles)
        gradients, d_merge = _chunk_gradients(gradients, states, chunk_decay, sizes, tiles)
    dq, dk, dv, dlam, of_queries, of_keys = scan.chunk_gradients(q, k, v, do, decay, lam, gradients, sizes, tiles)
    if sizes.heights:
        dq, read, of_reads = scan.query_gradients(q, do, weight, states, dq, sizes, tiles)
        of_queries, of_keys, read = [*of_queries, of_reads], by_head(of_keys), by_head(read)
    else:
        dq = jnp.sum(dq, axis=0).astype(q.dtype)
    dlam, d_since = lam_gradient(by_head(dlam), read, weight, decay, since, lam.shape[-1], sizes)
    if sizes.heights:
        # What lies between the chunks of a query and of a key decays as a whole.
        (d_chunk,) = since_vjp(d_since)
        of_chunks = d_chunk + _sum_over_reads(by_head(d_merge))
    d_log_decay = decay_gradient([by_head(x) for x in of_queries], of_keys, of_chunks, log_decay, sizes)
    return dq, dk, dv, d_log_decay, dlam


def _states(k, v, decay, chunk_decay, sizes: AttentionSizes, tiles: Tiles | HopperTiles):
    """Bottom-up: the state of every node that is read."""
    scan, size = _scan_of(tiles), min(tiles.span, 1 << sizes.heights)
    states = scan.chunk_states(k, v, decay, sizes, tiles)
    while 2 * size < sizes.num_chunks:
        states = scan.merge_states(states, _node_decay(chunk_decay, size), sizes, tiles, size)
        size *= tiles.radix
    return states


def _chunk_gradients(state_gradients, states, chunk_decay, sizes: AttentionSizes, tiles: Tiles | HopperTiles):
    """Top-down: (the gradient of every chunk's own state; d_merge [B, R, N], at e that of the log decay of any chunk
    which state[e] passes on its way up)."""
    stages = [1]
    while stages[-1] * tiles.radix < sizes.num_chunks:
        stages.append(stages[-1] * tiles.radix)
    above = d_merge = None
    for size in reversed(stages):
        radix = min(tiles.radix, 1 << tree_heights(-(-sizes.num_chunks // size)))
        node_decay = _node_decay(chunk_decay, size)
        above, parts = _scan_of(tiles).spread_gradients(
            state_gradients, states, above, node_decay, sizes, tiles, size, radix
        )
        here = jnp.sum(parts, axis=3)
        index = np.arange(here.shape[2])
        from_above = 0.0 if d_merge is None else jnp.repeat(d_merge, radix, axis=2)[:, :, : len(index)]
        d_merge = jnp.where(index % radix == 0, from_above, here)
    return above, d_merge


def _node_decay(chunk_decay, size: int):
    """Log decays of nodes of `size` chunks, from those of chunks."""
    nodes = -(-chunk_decay.shape[2] // size)
    padded = pad(chunk_decay, (2, nodes * size))
    return jnp.sum(padded.reshape(*padded.shape[:2], nodes, size), axis=3)


def _sum_over_reads(x):
    """For each chunk, the sum of x [..., N] over the ends of the states that the chunk reads."""
    chunk, total = np.arange(x.shape[-1]), 0.0
    for height in range(max(tree_heights(len(chunk)), 1)):
        starts = x[..., :: 1 << height]  # of nodes of 2**height chunks
        own = jnp.repeat(starts, 1 << height, axis=-1)[..., : len(chunk)]
        total += jnp.where(has_left_sibling(chunk, height), own, 0.0)
    return total
