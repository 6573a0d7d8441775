"""Log-linear attention by the kernels: preparation, custom gradient and batching rule around them."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax.lax import PrecisionLike
from jaxtyping import Array, Float, Int

from loglinear_jax.fenwick import has_left_sibling, tree_heights
from pallas_kernels.attention import triton
from pallas_kernels.attention.backends import choose_backend
from pallas_kernels.attention.hopper.tiles import HopperTiles, choose_hopper_tiles
from pallas_kernels.attention.tiles import Tiles, choose_tiles
from pallas_kernels.attention.triton import AttentionSizes
from pallas_kernels.common.by_token import decay_gradient, decay_of_tokens, lam_gradient
from pallas_kernels.common.chunks import chunk_decay_of, since_start, upper_reads
from pallas_kernels.common.launch import HeadAxes, changed_in_place, fold_mapped_axes, pad, vary_as, varying
from pallas_kernels.common.support import dot_mode, interpreting
from pallas_kernels.common.tiles import tile_for


def fenwick_attention(
    q: Float[Array, "B T G K"],
    k: Float[Array, "B T G K"],
    v: Float[Array, "B T H V"],
    log_decay: Float[Array, "B T H"],
    lam: Float[Array, "B T H L"] | None,
    *,
    chunk_size: int | None = None,
    precision: PrecisionLike = None,
    tiles: Tiles | HopperTiles | None = None,
    initial: Float[Array, "B H U K V"] | None = None,
    occupied: Int[Array, " B"] | None = None,
    return_end: bool = False,
    segmented: bool = False,
    exchange: Callable | None = None,
    own: Float[Array, "B H K V"] | None = None,
    over: Float[Array, "B H"] | None = None,
) -> Float[Array, "B T H V"] | tuple[Float[Array, "B T H V"], Float[Array, "B H M K V"]]:
    """Log-linear attention with the Pallas kernels: O(T log T), with a hand-written gradient.

    The tokens form a window: their first position, such as 0, is a multiple of a power of two that is not below T. So
    all of them read what came before the window at the same levels.

    Shapes are not checked here: `loglinear_jax.log_linear_attention`, which calls it, checks them.

    Args:
      q, k: [B, T, G, K], float32 or bfloat16, the same as v; K and V from 16 to 256.
      v: [B, T, H, V], H a multiple of G.
      log_decay: [B, T, H] float32, ≤ 0.
      lam: [B, T, H, L] float32, L ≥ ceil(log2 T) + 1. None: λ ≡ 1, for which the kernels for Hopper keep one state instead of a
        tree, in O(T); then omit the arguments from `initial` on, except `segmented`.
      chunk_size: tokens per tile, a power of two from 16 to 128 (64 for float32); chosen if None.
      precision: of float32 products, as in jax.lax.dot: full float32, or TF32, the GPU's default.
      tiles: how the work is cut into programs, and so which kernels run: those for Hopper GPUs, or those for any GPU
        since Ampere; chosen from the shapes, the GPU and JAX's version if None.
      initial: states of what came before the window, [B, H, U, K, V], at the levels from num_levels(T) on; U is at most L less
        that. Read in q's dtype. occupied: [B] int32, whose bits say which of these levels are occupied. Both None if
        nothing came before.
      segmented: whether log_decay is -inf, or below -105, where segments start: then decays within a segment keep their
        precision.
      return_end: also return the states, after the last token, of what came before its chunk.
      exchange: for a window that is a piece of a sequence, cut over devices: a hashable function of the state that the piece
        leaves, [B, H, K, V] float32, and of `over`, that returns (initial, occupied) instead of these arguments, with
        `exchange.upper` = U. It may contain collectives. T is then a power of two.
      own, over: the state that the last chunk leaves, of its own tokens, and the log decay over the piece, both float32.

    Returns o [B, T, H, V] in v's dtype; with return_end (o, states [B, H, M, K, V] float32 at the M levels from log2 of
    `chunk_of_attention` plus 1 on). Differentiable in reverse mode, and batched by vmap, to any depth.

    Raises UnsupportedError where KERNELS["log_linear_attention"] says why it cannot run.
    """
    batch, length, groups, key_dim = q.shape
    heads, value_dim = v.shape[2:]
    tiles = _tiles_for(q, v, chunk_size, precision, tiles, one_state=lam is None)
    sizes = sizes_for(batch, length, groups, heads, key_dim, value_dim, q.dtype, precision, tiles)
    tiles = tiles.fitted(sizes.group_heads, sizes.value_blocks, groups)
    q, k = (pad(x, (1, sizes.length), (3, sizes.key_dim)) for x in (q, k))
    v = pad(v, (1, sizes.length), (3, sizes.value_blocks * sizes.value_dim))
    v = v.reshape(*v.shape[:2], sizes.all_heads, sizes.value_dim)
    log_decay = pad(log_decay, (1, sizes.length))
    sizes = dataclasses.replace(
        sizes,
        segmented=segmented and tiles.backend == "triton",
        one_state=lam is None and tiles.backend == "hopper",
    )
    if lam is None:  # one state's kernels read none: a level is there for its heads
        levels = 1 if sizes.one_state else sizes.levels
        lam = vary_as(jnp.ones((*log_decay.shape, levels), jnp.float32), log_decay)
    lam = pad(lam, (1, sizes.length))
    if exchange is not None:
        sizes = dataclasses.replace(sizes, upper=exchange.upper)
        out = _differentiable_piece(sizes, tiles, exchange)(q, k, v, log_decay, lam, own, over)
        return out.reshape(batch, sizes.length, heads, -1)[:, :length, :, :value_dim]
    past = ()
    if initial is not None:
        sizes = dataclasses.replace(sizes, upper=initial.shape[2])
        past = _states_inside(initial, sizes, tiles), occupied & (1 << sizes.upper) - 1
    last_chunk = (length - 1) // sizes.chunk if return_end and sizes.read_heights else None
    out, *end = _differentiable(sizes, tiles, last_chunk)(q, k, v, log_decay, lam, *past)
    out = out.reshape(batch, sizes.length, heads, -1)[:, :length, :, :value_dim]
    if not return_end:
        return out
    if not end:
        return out, jnp.zeros((batch, heads, 0, key_dim, value_dim), jnp.float32)
    return out, _states_outside(end[0], sizes, tiles)[..., :key_dim, :value_dim]


def chunk_of_attention(
    q: Float[Array, "B T G K"],
    v: Float[Array, "B T H V"],
    chunk_size: int | None = None,
    precision: PrecisionLike = None,
) -> int:
    """How many tokens a chunk of `fenwick_attention` has for such arguments."""
    return _tiles_for(q, v, chunk_size, precision, None).chunk


def _tiles_for(
    q, v, chunk_size, precision, chosen: Tiles | HopperTiles | None, one_state: bool = False
) -> Tiles | HopperTiles:
    """Those that are chosen, or chosen here, with chunks of this size if one is given."""
    batch, length, groups, key_dim = q.shape
    heads, value_dim = v.shape[2:]
    backend = choose_backend(chosen and chosen.backend, key_dim, value_dim, q.dtype, chunk_size, precision)
    if chosen is not None:
        return chosen if chunk_size is None else chosen.with_chunk(chunk_size)
    if backend == "hopper":
        tiles = choose_hopper_tiles(length, value_dim)
        tiles = tiles if chunk_size is None else tiles.with_chunk(chunk_size)
        return tiles.filling(heads // groups, groups, length, batch, one_state)
    tiles = choose_tiles(length, tile_for(key_dim), value_dim, q.dtype, precision)
    tiles = tiles if chunk_size is None else tiles.with_chunk(chunk_size)
    return tiles.in_shared_memory(tile_for(key_dim), q.dtype)


def _states_inside(states, sizes: AttentionSizes, tiles: Tiles | HopperTiles):
    """States [B, H, n, K, V] as the kernels have them: padded, with value blocks as heads of their own, in their layout."""
    states = pad(states, (3, sizes.key_dim), (4, sizes.value_blocks * sizes.value_dim)).astype(sizes.dtype)
    states = states.reshape(*states.shape[:4], sizes.value_blocks, sizes.value_dim)
    states = jnp.moveaxis(states, 4, 2).reshape(states.shape[0], sizes.all_heads, *states.shape[2:4], sizes.value_dim)
    return _scan_of(tiles).laid_out(states)


def _states_outside(states, sizes: AttentionSizes, tiles: Tiles | HopperTiles):
    """The inverse of `_states_inside`, but for padding."""
    states = _scan_of(tiles).laid_out(states)
    states = states.reshape(states.shape[0], sizes.heads, sizes.value_blocks, *states.shape[2:])
    return jnp.moveaxis(states, 2, 4).reshape(*states.shape[:2], *states.shape[3:5], -1)


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


@functools.cache
def _differentiable(sizes: AttentionSizes, tiles: Tiles | HopperTiles, last_chunk: int | None):
    """The differentiable function (q, k, v, log_decay, lam, and initial and above where sizes.upper) -> [o, and where there is
    a last_chunk the states at its end], in the kernels' shapes but for log_decay [B, T, H] and lam [B, T, H, L]."""
    forward, forward_and_keep, backward = _passes(sizes, tiles, last_chunk)
    results = 1 if last_chunk is None else 2

    @jax.custom_vjp
    def apply(*operands):
        return forward(*operands)

    def apply_forward(*operands):
        found = forward_and_keep(*operands)
        return found[:results], (operands, found[results:])

    def apply_backward(residuals, cotangents):
        operands, kept = residuals
        gradients = backward(*cotangents, *operands, *kept)
        return *gradients, *([None] if sizes.upper else [])  # of what is above

    apply.defvjp(apply_forward, apply_backward)
    return apply


@functools.cache
def _passes(sizes: AttentionSizes, tiles: Tiles | HopperTiles, last_chunk: int | None):
    """The forward pass alone, that before a backward one, and the backward one, with a batching rule each: a mapped axis
    becomes part of the batch, so grids keep their axes."""
    options = dict(sizes=sizes, tiles=tiles, last_chunk=last_chunk)
    ways = (
        functools.partial(_forward, keep=False, **options),
        functools.partial(_forward, keep=True, **options),
        functools.partial(_backward, **options),
    )
    # Mosaic's interpreter has ordered effects, which JAX's partitioning rules do not take.
    partitioned = tiles.backend == "triton" or not sizes.interpret
    # Of q, k, v, log_decay and lam, initial and above; of o and the states at the end; and of what is kept.
    inputs = (2, 2, 2, 2, 2, *([1, None] if sizes.upper else []))
    outputs = (2, *([] if last_chunk is None else [1]))
    kept = (2,)  # then arrays [B, H, ...]
    axes = (inputs, outputs), (inputs, outputs + kept), (outputs + inputs + kept, inputs[:5])
    return tuple(
        fold_mapped_axes(varying(way), partitioned, HeadAxes(sizes.shared_out, *axes_of_way))
        for way, axes_of_way in zip(ways, axes, strict=True)
    )


@functools.cache
def _differentiable_piece(sizes: AttentionSizes, tiles: Tiles | HopperTiles, exchange: Callable):
    """As `_differentiable` of q, k, v, log_decay, lam, own and over, to o. Between the states and those that read them there is
    the exchange, and so there is between the gradients of what is read and those of the states. A piece is a whole tree, whose
    root is what it leaves."""
    last_chunk = sizes.num_chunks - 1 if sizes.heights else None

    def folded(way, **more):
        return fold_mapped_axes(varying(functools.partial(way, sizes=sizes, tiles=tiles, **more)), False)

    nodes, of_reads = folded(_nodes, last_chunk=last_chunk), folded(_state_gradients)
    of_nodes = folded(_backward, last_chunk=None, piece=True)
    reads, reads_and_keep = (folded(_outputs, keep=keep) for keep in (False, True))

    def past(root, over):
        initial, occupied = exchange(root, over)
        return _states_inside(initial, sizes, tiles), jnp.broadcast_to(occupied, root.shape[:1])

    def forward(reads, q, k, v, log_decay, lam, own, over):
        decay, since, *states = nodes(k, v, log_decay)
        root = own
        if sizes.heights:
            end = jnp.sum(_states_outside(states.pop(), sizes, tiles), axis=2)
            root += end[..., : own.shape[-2], : own.shape[-1]]
        initial, pull, above = jax.vjp(past, root, over, has_aux=True)
        out, *weight = reads(q, k, v, lam, decay, since, initial, above, *states)
        return out, ((q, k, v, log_decay, lam), pull, (initial, above), (decay, since, *weight, *states))

    @jax.custom_vjp
    def apply(*operands):
        return forward(reads, *operands)[0]

    def apply_backward(residuals, do):
        inputs, pull, (initial, above), kept = residuals
        q, lam, weight = inputs[0], inputs[4], kept[2]
        *gradients, of_initial = of_reads(q, do.astype(q.dtype), lam, weight, above)
        d_root, d_over = pull(of_initial.astype(initial.dtype))
        if not sizes.heights:
            return *of_nodes(do, *inputs, initial, above, *kept), d_root, d_over
        # It goes down the tree to each chunk, the last one too.
        d_root = _states_inside(d_root[:, :, None], sizes, tiles)
        return *of_nodes(do, *inputs, initial, above, *kept, *gradients, d_root), None, d_over

    apply.defvjp(functools.partial(forward, reads_and_keep), apply_backward)
    return apply


def _scan_of(tiles: Tiles | HopperTiles):
    """The module of the kernels that these tiles are for."""
    if tiles.backend == "triton":
        return triton
    from pallas_kernels.attention.hopper import scan  # which only JAX from 0.11.2 on can import

    return scan


def _forward(
    q, k, v, log_decay, lam, initial=None, above=None,
    *, sizes: AttentionSizes, tiles: Tiles | HopperTiles, last_chunk: int | None, keep: bool,
):  # fmt: skip
    """[o, the states after the last token where last_chunk says so], and for a backward pass decays since a chunk's start and,
    where states are read, `since`, weights and the tree's states."""
    sizes, tiles = _of_shard(q, lam, sizes, tiles)
    decay, chunk_decay, since, states = _decays_and_states(k, v, log_decay, sizes, tiles)
    out, weight = _scan_of(tiles).outputs(q, k, v, decay, lam, since, states, initial, above, sizes, tiles, keep)
    results = [out]
    if last_chunk is not None:
        results.append(_states_at_end(states, initial, above, since, chunk_decay, sizes, last_chunk))
    if not keep:
        return results
    return [*results, jnp.swapaxes(decay, 0, 1), *(x for x in (since, weight, states) if x is not None)]


def _decays_and_states(k, v, log_decay, sizes: AttentionSizes, tiles: Tiles | HopperTiles):
    """(Decays of tokens and of chunks, `since`, states of the tree); None for what no chunk reads."""
    decay = decay_of_tokens(log_decay, sizes)
    chunk_decay = since = states = None
    if sizes.read_heights:
        chunk_decay = chunk_decay_of(decay, sizes)
        since = since_start(chunk_decay, sizes)
    if sizes.heights:
        states = _states(k, v, decay, chunk_decay, sizes, tiles)
    return decay, chunk_decay, since, states


def _nodes(k, v, log_decay, *, sizes: AttentionSizes, tiles: Tiles | HopperTiles, last_chunk: int | None):
    """Of a piece: [decays since a chunk's start, `since`, and where there is a tree its states and those at the end]."""
    sizes, tiles = _of_shard(k, log_decay, sizes, tiles)
    decay, chunk_decay, since, states = _decays_and_states(k, v, log_decay, sizes, tiles)
    found = [jnp.swapaxes(decay, 0, 1), since]
    if states is None:
        return found
    return [*found, states, _states_at_end(states, None, None, since, chunk_decay, sizes, last_chunk)]


def _outputs(q, k, v, lam, decay, since, initial, above, states=None, *, sizes, tiles, keep: bool):
    """Of a piece: o, and to keep it weights, from what `_nodes` found."""
    sizes, tiles = _of_shard(q, lam, sizes, tiles)
    decay = jnp.swapaxes(decay, 0, 1)
    found = _scan_of(tiles).outputs(q, k, v, decay, lam, since, states, initial, above, sizes, tiles, keep)
    return [x for x in found if x is not None]


def _state_gradients(q, do, lam, weight, above, *, sizes: AttentionSizes, tiles: Tiles | HopperTiles):
    """Of a piece: what `state_gradients` of the kernels finds."""
    sizes, tiles = _of_shard(q, lam, sizes, tiles)
    found = _scan_of(tiles).state_gradients(q, do, weight, above, sizes, tiles)
    return [x for x in found if x is not None]


def _of_shard(q, lam, sizes: AttentionSizes, tiles: Tiles | HopperTiles):
    """The sizes, and tiles that fit them: see `Sizes.of_arrays`."""
    sizes = sizes.of_arrays(q, lam.shape[2])
    return sizes, tiles.fitted(sizes.group_heads, sizes.value_blocks, sizes.groups)


def _states_at_end(states, initial, above, since, chunk_decay, sizes: AttentionSizes, last_chunk: int):
    """What the last chunk reads, after its last token: [B, R, read_heights, K, V] float32, in the states' layout; without
    `initial`, the heights of the tree alone."""
    nothing = None if states is None else jnp.zeros_like(states[:, :, 0])
    found = [nothing if end is None else states[:, :, end] for end in _ends_read(last_chunk, sizes)]
    found = [jnp.stack(found, axis=2).astype(jnp.float32)] if found else []
    if initial is not None:
        found.append(_where_above(initial.astype(jnp.float32), above, sizes))
    found = jnp.concatenate(found, axis=2)
    return found * _decay_to_end(since, chunk_decay, sizes, last_chunk)[:, :, : found.shape[2]]


def _ends_read(chunk: int, sizes: AttentionSizes) -> list[int | None]:
    """The end of the state that a chunk reads at each height of the tree, None if it reads none."""
    return [chunk >> height << height if chunk >> height & 1 else None for height in range(sizes.heights)]


def _where_above(x, above, sizes: AttentionSizes):
    """x [B, R, upper, K, V] where there is a state, else 0."""
    return jnp.where(upper_reads(above, sizes)[:, None, :, None, None], x, 0.0)


def _decay_to_end(since, chunk_decay, sizes: AttentionSizes, last_chunk: int):
    """Decay from the ends of the states that the last chunk reads to its own, [B, R, read_heights, 1, 1]."""
    decay = jnp.exp2(since[:, :, last_chunk] + chunk_decay[:, :, last_chunk, None])
    return jnp.repeat(decay, sizes.value_blocks, axis=1)[..., None, None]


def _backward(
    *operands, sizes: AttentionSizes, tiles: Tiles | HopperTiles, last_chunk: int | None, piece: bool = False
):  # fmt: skip
    """operands: cotangents of o, and of the states at the end; then those of `_forward`, then what it kept.

    piece: where there is a tree, the last operands are what `_state_gradients` found of it, and the gradient of its root.
    """
    operands = iter(operands)
    do, d_end = next(operands), None if last_chunk is None else next(operands)
    q, k, v, log_decay, lam = (next(operands) for _ in range(5))
    initial, above = (next(operands), next(operands)) if sizes.upper else (None, None)
    decay = jnp.swapaxes(next(operands), 0, 1)
    since, weight = (next(operands), next(operands)) if sizes.read_heights else (None, None)
    states = next(operands) if sizes.heights else None
    sizes, tiles = _of_shard(q, lam, sizes, tiles)
    scan = _scan_of(tiles)
    do = do.astype(v.dtype)

    def by_head(x):
        """Value blocks of a head summed: [B, R, ...] to [B, H, ...]."""
        if sizes.value_blocks == 1:
            return x
        return jnp.sum(x.reshape(x.shape[0], sizes.heads, sizes.value_blocks, *x.shape[2:]), axis=2)

    gradients = of_initial = read = of_chunks = end = d_root = None
    if sizes.read_heights:
        chunk_decay = chunk_decay_of(decay, sizes)
        _, since_vjp = jax.vjp(functools.partial(since_start, sizes=sizes), chunk_decay)
        if d_end is not None:
            end = _states_at_end(states, initial, above, since, chunk_decay, sizes, last_chunk)
            ends = end.shape[2]
            d_states = d_end * _decay_to_end(since, chunk_decay, sizes, last_chunk)[:, :, :ends]
        if piece:
            gradients, d_root = next(operands, None), next(operands, None)
        else:
            gradients, of_initial = scan.state_gradients(q, do, weight, above, sizes, tiles)
    if sizes.heights:
        if d_end is not None:
            # In one pass over all nodes: XLA would copy them all for each that it updates.
            nodes = _ends_read(last_chunk, sizes)
            height = np.array([nodes.index(node) if node in nodes else -1 for node in range(sizes.num_chunks)])
            added = jnp.where((height >= 0)[:, None, None], jnp.take(d_states, np.maximum(height, 0), axis=2), 0.0)
            gradients += added.astype(gradients.dtype)
        gradients, d_merge = _chunk_gradients(gradients, d_root, states, chunk_decay, sizes, tiles)
    dq, dk, dv, dlam, of_queries, of_keys = scan.chunk_gradients(q, k, v, do, decay, lam, gradients, sizes, tiles)
    if sizes.read_heights:
        dq, read, of_reads = scan.query_gradients(q, do, weight, states, initial, above, dq, sizes, tiles)
        of_queries, read = [*of_queries, of_reads], by_head(read)
    else:
        dq = jnp.sum(dq, axis=0).astype(q.dtype)
    if sizes.one_state:  # where `since` is 0, and so is its gradient
        dlam, d_since = jnp.zeros_like(lam), since
    else:
        dlam, d_since = lam_gradient(by_head(dlam), read, weight, decay, since, lam.shape[-1], sizes, above)
    if sizes.read_heights:
        # What lies between the chunks of a query and of a key decays as a whole.
        if d_end is not None:
            at_end = by_head(jnp.sum(d_end * end, axis=(3, 4)))
            d_since = d_since.at[:, :, last_chunk, :ends].add(at_end)
        (of_chunks,) = since_vjp(d_since)
        if d_end is not None:
            of_chunks = of_chunks.at[:, :, last_chunk].add(jnp.sum(at_end, axis=2))
    if sizes.heights:
        of_chunks += d_merge if sizes.one_state else _sum_over_reads(by_head(d_merge))
        of_keys = by_head(of_keys)
    d_log_decay = decay_gradient([by_head(x) for x in of_queries], of_keys, of_chunks, log_decay, sizes)
    found = [dq, dk, dv, d_log_decay, dlam]
    if sizes.upper and not piece:
        if d_end is not None:
            of_initial += _where_above(d_states[:, :, sizes.heights :], above, sizes)
        found.append(of_initial.astype(initial.dtype))
    return found


def _states(k, v, decay, chunk_decay, sizes: AttentionSizes, tiles: Tiles | HopperTiles):
    """Bottom-up: the state of every node that is read; or one state before every chunk."""
    scan, size = _scan_of(tiles), min(tiles.span, 1 << sizes.heights)
    states = scan.chunk_states(k, v, decay, sizes, tiles)
    if sizes.one_state:
        return changed_in_place(scan.scan_states(states, chunk_decay, sizes, tiles)[0])
    while 2 * size < sizes.num_chunks:
        states = changed_in_place(scan.merge_states(states, _node_decay(chunk_decay, size), sizes, tiles, size))
        size *= tiles.radix
    return states


def _chunk_gradients(state_gradients, d_root, states, chunk_decay, sizes: AttentionSizes, tiles: Tiles | HopperTiles):
    """Top-down, from the gradient of the root [B, R, 1, ...], 0 if that is None.

    Returns (the gradient of every chunk's own state; d_merge [B, R, N], at e that of the log decay of any chunk which state[e]
    passes on its way up).
    """
    if sizes.one_state:
        above, d_merge = _scan_of(tiles).scan_states(state_gradients, chunk_decay, sizes, tiles, states)
        return changed_in_place(above), d_merge
    stages = [1]
    while stages[-1] * tiles.radix < sizes.num_chunks:
        stages.append(stages[-1] * tiles.radix)
    above, d_merge = d_root, None
    for size in reversed(stages):
        radix = min(tiles.radix, 1 << tree_heights(-(-sizes.num_chunks // size)))
        node_decay = _node_decay(chunk_decay, size)
        above, parts = _scan_of(tiles).spread_gradients(
            state_gradients, states, above, node_decay, sizes, tiles, size, radix
        )
        above = changed_in_place(above) if size == 1 else above
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
