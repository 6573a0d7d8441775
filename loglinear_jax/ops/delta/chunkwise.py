"""The chunkwise forms: inside chunks of C tokens the WY form of `transitions`, between them the binary tree of `ops/tree.py`,
whose nodes hand on states by maps, not decays. O(T log T), in plain JAX; O(T) for one state.

A query reads a state of some chunks before by way of the maps between. They are not applied to the states, each of which many
chunks read, but to what the queries read with: once a height, for all states that begin before the chunk's node there.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from loglinear_jax.fenwick import fenwick_level, left_sibling, num_levels, occupied_levels, tree_heights
from loglinear_jax.ops.continuation import InitialState, run_from
from loglinear_jax.ops.delta.transitions import Maps, Transitions, transitions
from loglinear_jax.ops.levels import dot, level_of_pairs, merge_heads, pad_to, select_level, split_heads
from loglinear_jax.ops.positions import beginnings_in_chunks
from loglinear_jax.ops.sequence_parallel import buckets_of_pieces, gathered
from loglinear_jax.ops.sharding import varying_as
from loglinear_jax.ops.tree import DEFAULT_CHUNK, fitting_chunk_size, into_parts, read_left_siblings

# Tokens a chunk for keys and values of SMALL_DIM at most: the C × C matrices of a chunk cost more than such states.
SMALL_DIM, SMALL_CHUNK = 32, 16
BLOCK = 1024  # tokens of each tree, for one state


def attend(q, k, v, log_decay, beta, lam, start, *, return_state, chunk_size=None, precision=None):
    chunk_size = chunk_size_for(q, v, chunk_size)
    return by_chunks(_attend, (q, k, v, log_decay, beta, lam), start, return_state, chunk_size, precision)


def one_state(q, k, v, log_decay, beta, start, *, return_state, chunk_size=None, precision=None):
    """A tree over every BLOCK tokens, and one state that is carried from block to block."""
    length, key_dim = q.shape[1], q.shape[-1]
    chunk_size = chunk_size_for(q, v, chunk_size)
    height = tree_heights(min(-(-length // chunk_size), max(BLOCK // chunk_size, 1)))
    whole = -(-length // (chunk_size << height)) * (chunk_size << height)
    shape = (len(v), q.shape[2], v.shape[2] // q.shape[2], key_dim, v.shape[-1])
    q, k, v, log_decay, beta = (pad_to(x, whole, axis=1) for x in (q, k, v, log_decay, beta))
    starts = None if start.starts is None else pad_to(start.starts, whole, axis=1)
    v, run, own = _run_chunks(q, k, v, log_decay, beta, starts, chunk_size, precision)
    out = dot("bgrnts,bgrnsv->bgrntv", run.weights.astype(v.dtype), v, precision)
    climbing = _climb_chunks(run, own, precision)
    for below in range(height):
        nodes = next(climbing)
        out += _read_siblings(below, nodes.reads, nodes.states, precision)
    block = next(climbing)
    first = jnp.zeros(shape, run.decay.dtype) if start.state is None else start.state.reshape(shape)

    def carry(state, node):
        maps, own = node
        return maps.apply(state, precision) + own, state

    by_block = jax.tree.map(lambda x: jnp.moveaxis(x, 3, 0), (block.maps, block.states))
    state, before = jax.lax.scan(carry, varying_as(q, first), by_block)
    reads = block.reads.reshape(*shape[:3], len(before), -1, key_dim)
    out += dot("bgrntk,nbgrkv->bgrntv", reads, before, precision).reshape(out.shape)
    state = state.reshape(len(state), -1, *shape[-2:])
    return _into_sequence(out, length), state if return_state else None


def states_before(tokens, starts, axis_name, by_bucket: bool, chunk_size, precision):
    """(the one node of all tokens of this piece of a sequence; what the piece finds of earlier ones: a state for each bucket of
    them, or one in all, [B, G, R, U, K, V]).

    Later tokens change a state not only by decays but by maps, so the maps of whole pieces are gathered with their states, by
    one collective.
    """
    q, k, v, log_decay, beta = tokens
    size = chunk_size_for(q, v, chunk_size)
    _, run, own = _run_chunks(q, k, v, log_decay, beta, starts, size, precision)
    *_, node = _climb_chunks(run, own, precision)
    decay, lost, own = gathered([x[:, :, :, 0] for x in (node.maps.decay, node.maps.lost, node.states)], axis_name)
    buckets = buckets_of_pieces(axis_name) if by_bucket else jnp.ones((len(own), 1), bool)
    is_before = jnp.arange(len(own), dtype=jnp.int32) < jax.lax.axis_index(axis_name)
    # 0 · NaN of a later piece is NaN.
    decay, lost, own = (jnp.where(is_before.reshape(-1, *[1] * (x.ndim - 1)), x, 0) for x in (decay, lost, own))

    def add_piece(states, one):
        decay, lost, own, bucket, is_before = one
        after = Maps(decay[..., None], lost[..., None, :, :]).apply(states, precision)
        after += jnp.where(bucket[:, None, None], own[..., None, :, :], 0)
        return jnp.where(is_before, after, states), None

    none = jnp.zeros((*own.shape[1:4], buckets.shape[1], *own.shape[4:]), own.dtype)
    return node, jax.lax.scan(add_piece, varying_as(own, none), (decay, lost, own, buckets, is_before))[0]


@flax.struct.dataclass
class Nodes:
    """Those of one height.

    reads: what each query makes of a state before its chunk's node. maps [B, G, R, nodes]: what a node makes of a state before
    it. states: of its own tokens, after it. All in the dtype of the keys.
    """

    reads: Float[Array, "B G R N C K"]
    maps: Maps
    states: Float[Array, "B G R nodes K V"]


def chunk_size_for(q, v, chunk_size: int | None) -> int:
    """Tokens a chunk, for q [B, T, G, K] and v [B, T, H, V]; chunk_size, or if None what suits the shapes."""
    small = max(q.shape[-1], v.shape[-1]) <= SMALL_DIM
    return fitting_chunk_size(q.shape[1], chunk_size or (SMALL_CHUNK if small else DEFAULT_CHUNK))


def _into_chunks(groups, chunk_size, q, k, *by_head):
    """q, k [B, G, N, C, K]; the others [B, G, R, N, C, ...]."""
    q, k = (into_parts(jnp.moveaxis(x, 1, 2), 2, chunk_size) for x in (q, k))
    return q, k, *(into_parts(split_heads(x, groups), 3, chunk_size) for x in by_head)


def _into_sequence(out: Float[jax.Array, "B G R N C V"], length: int) -> Float[jax.Array, "B T H V"]:
    return merge_heads(out.reshape(*out.shape[:3], -1, out.shape[-1])[:, :, :, :length])


def _run_chunks(q, k, v, log_decay, beta, starts, chunk_size, precision):
    """(v in chunks; the transitions inside them; the states that each chunk's own tokens leave)."""
    q, k, v, log_decay, beta = _into_chunks(q.shape[2], chunk_size, q, k, v, log_decay, beta)
    run = transitions(q, k, log_decay, beta, precision, beginnings_in_chunks(starts, chunk_size))
    return v, run, run.own(v[..., None, :, :], precision)[..., 0, :, :]


def _read_siblings(height: int, reads, states, precision):
    """What the queries of right siblings read of the states [B, G, R, nodes, K, M] of left ones; 0 for others'."""

    def read(reads, states):
        return dot("bgrnctk,bgrnkv->bgrnctv", reads, states, precision)

    return read_left_siblings(read, height, [(reads, 3)], states)


def _climb_chunks(run: Transitions, states: Float[Array, "B G R N K V"], precision) -> Iterator[Nodes]:
    """The nodes of each height, from the chunks, of whose own tokens `states` are, up to where one node holds them all. Only
    whole nodes have maps and states."""
    reads, maps, stored = run.reads, run.maps(precision), run.reads.dtype
    states = states.astype(stored)
    chunks = np.arange(reads.shape[3])

    def children(side: int, nodes):
        """The left or the right ones of whole pairs."""
        return jax.tree.map(lambda x: x[:, :, :, side : x.shape[3] // 2 * 2 : 2], nodes)

    for height in range(tree_heights(len(chunks))):
        yield Nodes(reads, maps, states)
        is_right, sibling = left_sibling(chunks, height)
        decay = jnp.where(is_right == 1, maps.decay[..., sibling], 1)[..., None, None]
        reads = (decay * reads - _read_siblings(height, reads, maps.lost, precision)).astype(stored)
        (before, left), (after, right) = (children(side, (maps, states)) for side in (0, 1))
        states = (after.apply(left, precision) + right).astype(stored)
        maps = after.after(before, precision)
    yield Nodes(reads, maps, states)


def _before(chunk, heights: int, left_node: Callable, precision):
    """What stands before a chunk (an int, or traced): (the map [B, G, R] of all chunks before, the states that its queries
    read, by height, [B, G, R, heights, K, V], 0 where there is none).

    left_node: height to (maps, state) of the node which the chunk reads there, if it reads one.
    """
    since, states = None, []
    for height in range(heights):
        reads = left_sibling(chunk, height)[0] == 1
        maps, state = left_node(height)
        if since is None:
            since = Maps(jnp.ones_like(maps.decay), jnp.zeros_like(maps.lost))
        states.append(jnp.where(reads, since.apply(state, precision), 0))
        after = since.after(maps, precision)
        since = jax.tree.map(lambda new, old, reads=reads: jnp.where(reads, new, old), after, since)
    return since, jnp.stack(states, axis=3)


def node_at(nodes, place):
    return jax.tree.map(lambda x: jax.lax.dynamic_index_in_dim(x, place, axis=3, keepdims=False), nodes)


def _left_sibling_of(by_height, chunk) -> Callable:
    """`_before`'s `left_node`."""
    return lambda height: node_at((by_height[height].maps, by_height[height].states), left_sibling(chunk, height)[1])


def by_chunks(attend: Callable, inputs, start, return_state, chunk_size: int, precision):
    """(outputs, the state at the end), from what whole chunks from position 0 on give by `attend`, with the arguments and the
    results of `_attend`."""
    sizes = dict(chunk_size=chunk_size, precision=precision)
    aligned = functools.partial(_aligned, attend=attend, return_state=return_state, **sizes)
    read = functools.partial(_read_initial_state, **sizes)
    return run_from(start, inputs, aligned, return_state, precision, read)


def _aligned(q, k, v, log_decay, beta, lam, starts, last, *, attend, chunk_size, return_state, precision):
    """Outputs [B, T, H, V] of tokens at positions 0 .. T-1 and, if asked, the levels after token `last` (an int, or traced)."""
    length, groups = q.shape[1:3]
    whole = -(-length // chunk_size) * chunk_size
    q, k, v, log_decay, beta, lam = (pad_to(x, whole, axis=1) for x in (q, k, v, log_decay, beta, lam))
    inside, heights = min(num_levels(chunk_size), lam.shape[-1]), tree_heights(whole // chunk_size)
    begin = beginnings_in_chunks(starts, chunk_size)
    out, left_node_of = attend(q, k, v, log_decay, beta, lam, begin, inside, heights, chunk_size, precision)
    out = out[:, :length]
    if not return_state:
        return out, None
    last_chunk, place = last // chunk_size, last % chunk_size

    def of_last(x):
        return jax.lax.dynamic_slice_in_dim(x, last_chunk * chunk_size, chunk_size, axis=1)

    q, k, *rest = _into_chunks(groups, chunk_size, *map(of_last, (q, k, v, log_decay, beta)))
    v, log_decay, beta = (x[:, :, :, 0] for x in rest)
    seen = jnp.arange(chunk_size) <= place
    begin = None if begin is None else node_at(begin, last_chunk)
    masked = (jnp.where(seen, x, 0) for x in (log_decay, beta))
    run = transitions(q[:, :, 0], k[:, :, 0], *masked, precision, begin)
    level = fenwick_level(jnp.asarray(place, jnp.int32), jnp.arange(chunk_size, dtype=jnp.int32))
    levels = run.own_by_level(v, jnp.where(seen, level, -1), lam.shape[-1], precision)
    if heights:
        _, states = _before(last_chunk, heights, left_node_of(last_chunk), precision)
        levels = levels.at[:, :, :, inside : inside + heights].add(run.after(states, precision))
    return out, levels.reshape(levels.shape[0], -1, *levels.shape[3:])


def _attend(q, k, v, log_decay, beta, lam, begin, inside: int, heights: int, chunk_size: int, precision):
    """(outputs [B, T, H, V] of whole chunks, a function of a chunk to `_before`'s `left_node`)."""
    length, groups = q.shape[1:3]
    lam = jnp.where(occupied_levels(jnp.arange(length), lam.shape[3])[:, None], lam, 0)  # 0 · inf is NaN
    q, k, v, log_decay, beta, lam = _into_chunks(groups, chunk_size, q, k, v, log_decay, beta, lam)
    run = transitions(q, k, log_decay, beta, precision, begin)
    weights = run.weights * select_level(lam[..., :inside], level_of_pairs(np.arange(chunk_size)))
    out = dot("bgrnts,bgrnsv->bgrntv", weights.astype(v.dtype), v, precision)
    by_height = []
    if heights:
        states = run.own(v[..., None, :, :], precision)[..., 0, :, :]
        by_height = list(_climb_chunks(run, states, precision))[:heights]
    for height, nodes in enumerate(by_height):
        out += lam[..., inside + height, None] * _read_siblings(height, nodes.reads, nodes.states, precision)
    return _into_sequence(out, length), functools.partial(_left_sibling_of, by_height)


def _read_initial_state(q, k, v, log_decay, beta, lam, starts, initial, *, chunk_size, precision):
    """`run_from`'s `read`."""
    del v
    length, groups = q.shape[1:3]
    old = InitialState(initial, split_heads(log_decay, groups), lam.shape[-1])
    found = into_parts(old.found(split_heads(lam, groups)), 3, chunk_size)
    q, k, log_decay, beta = _into_chunks(groups, chunk_size, q, k, log_decay, beta)
    run = transitions(q, k, log_decay, beta, precision, beginnings_in_chunks(starts, chunk_size))
    no_values = jnp.zeros((*run.reads.shape[:4], run.reads.shape[-1], 0), run.reads.dtype)
    nodes = list(_climb_chunks(run, no_values, precision))
    read = jnp.einsum("bgrntl,bgrntk,bgrlkv->bgrntv", found, nodes[-1].reads, old.states, precision=precision)

    def at_end():
        num_chunks = run.decay.shape[3]
        since, _ = _before(num_chunks, num_chunks.bit_length(), _left_sibling_of(nodes, num_chunks), precision)
        moved = old.moved(jax.vmap(since.apply, in_axes=(3, None), out_axes=3)(old.states, precision))
        return moved.reshape(moved.shape[0], -1, *moved.shape[3:])

    return _into_sequence(read, length), at_end
