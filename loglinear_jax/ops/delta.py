"""The forms of log-linear Gated DeltaNet, whose states overwrite what they hold under a key, and chunks for one state, too.

Each takes what `log_linear_delta_attention` has checked, and returns its outputs and its last state. Inside chunks of C tokens
there is the WY form of `transitions`, between them the binary tree of `ops/tree.py`, whose nodes hand on states by maps, not
decays: O(T log T). A query reads a state of some chunks before by way of the maps between. They are not applied to
the states, each of which many chunks read, but to what the queries read with: once a height, for all states that begin before
the chunk's node there.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

import pallas_kernels
from loglinear_jax.fenwick import (
    FenwickState,
    fenwick_level,
    left_sibling,
    merge_for_token,
    num_levels,
    occupied_levels,
    tree_heights,
)
from loglinear_jax.ops.continuation import InitialState, Start, run_from, scan_tokens, state_at
from loglinear_jax.ops.decays import accumulation_dtype, decayed
from loglinear_jax.ops.levels import dot, level_of_pairs, merge_heads, pad_to, select_level, split_heads
from loglinear_jax.ops.positions import advanced, beginnings, beginnings_in_chunks, forgetting
from loglinear_jax.ops.sequence_parallel import buckets_of_pieces, gathered
from loglinear_jax.ops.sharding import varying_as
from loglinear_jax.ops.transitions import Maps, Transitions, transitions
from loglinear_jax.ops.tree import DEFAULT_CHUNK, fitting_chunk_size, into_parts, read_left_siblings
from pallas_kernels import KERNELS

# Tokens a chunk for keys and values of SMALL_DIM at most: the C × C matrices of a chunk cost more than such states.
SMALL_DIM, SMALL_CHUNK = 32, 16


def parallel(q, k, v, log_decay, beta, lam, start, *, return_state, precision=None):
    """o_t = Σ_{s≤t} λ_t[level(t, s)] · q_tᵀ [Π_{s<r≤t} exp(g_r) (I - β_r k_r k_rᵀ)] β_s k_s v_sᵀ as a masked matrix, by a
    triangular system, in O(T²) memory and O(T³) time."""
    length = q.shape[1]
    run, v, log_decay = whole(q, k, v, log_decay, beta, start, precision)
    lam = split_heads(lam, q.shape[2])
    first = 0 if start.position is None else start.position
    position = first + jnp.arange(length, dtype=jnp.int32)
    weights = run.weights * select_level(lam, level_of_pairs(position))
    out = dot("bgrts,bgrsv->bgrtv", weights.astype(v.dtype), v, precision)
    if start.state is not None:
        old = InitialState(start.state, log_decay, lam.shape[-1])
        found = old.found(lam)
        out += jnp.einsum("bgrtl,bgrtk,bgrlkv->bgrtv", found, run.reads, old.states, precision=precision)
    out = merge_heads(out)
    if not return_state:
        return out, None
    levels = run.own_by_level(v, fenwick_level(first + length - 1, position), lam.shape[-1], precision)
    if start.state is not None:
        levels += old.moved(run.after(old.states, precision))
    return out, FenwickState(levels.reshape(levels.shape[0], -1, *levels.shape[3:]), advanced(first, length))


def whole(q, k, v, log_decay, beta, start, precision):
    """(the transitions of the whole sequence, v [B, G, R, T, V], log_decay [B, G, R, T])."""
    groups = q.shape[2]
    q, k = (jnp.moveaxis(x, 1, 2).astype(log_decay.dtype) for x in (q, k))  # rounded, M's error would grow with T
    v, log_decay, beta = (split_heads(x, groups) for x in (v, log_decay, beta))
    return transitions(q, k, log_decay, beta, precision, beginnings(start.starts)), v, log_decay


def recurrent(q, k, v, log_decay, beta, lam, start, *, return_state, precision=None):
    dtype = accumulation_dtype(q, k, v)
    state = state_at(start, len(v), v.shape[2], q.shape[-1], v.shape[-1], lam.shape[-1], dtype)
    tokens = [x.astype(dtype) for x in (q, k, v, log_decay, beta, lam)]
    out, state = scan_tokens(step, state, tokens, precision, start.starts)
    return out, state if return_state else None


def step(state: FenwickState, q, k, v, log_decay, beta, lam, precision=None):
    """One token. q, k [B, G, K]; v [B, H, V]; log_decay, beta [B, H]; lam [B, H, L]. Returns (o [B, H, V], new state)."""
    q, k = (jnp.repeat(x, v.shape[1] // x.shape[1], axis=1) for x in (q, k))
    before = merge_for_token(state.levels, state.position)
    levels = overwritten(before, k[:, :, None], log_decay[..., None], beta[..., None], precision)
    written = beta[..., None, None] * k[..., :, None] * v[..., None, :]
    levels = levels.at[:, :, 0].set(written.astype(levels.dtype))
    lam = jnp.where(occupied_levels(state.position[..., None], levels.shape[2]), lam, 0)  # 0 · inf is NaN
    out = jnp.einsum("bhk,bhl,bhlkv->bhv", q, lam, levels, precision=precision)
    return out, FenwickState(levels=levels, position=advanced(state.position, 1))


def overwritten(states, k, log_decay, beta, precision):
    """exp(g) (I - β k kᵀ) S."""
    found = jnp.einsum("...k,...kv->...v", k, states, precision=precision)
    erased = beta[..., None, None] * k[..., :, None] * found[..., None, :]
    return decayed(states - erased, log_decay)


def xla(q, k, v, log_decay, beta, lam, start, *, return_state, chunk_size=None, precision=None):
    chunk_size = chunk_size_for(q, v, chunk_size)
    return _by_chunks(_attend, (q, k, v, log_decay, beta, lam), start, return_state, chunk_size, precision)


def pallas(q, k, v, log_decay, beta, lam, start, *, return_state, chunk_size=None, precision=None):
    chunk_size = required_kernel_chunk(q, v, chunk_size, precision)
    return _by_chunks(_attend_by_kernels, (q, k, v, log_decay, beta, lam), start, return_state, chunk_size, precision)


def kernels_are_best(q, k, v, chunk_size=None, precision=None) -> bool:
    """As of log-linear attention; and for more than one chunk, where it was faster than plain JAX."""
    dtype, dims = jnp.result_type(q, k, v), (q.shape[-1], v.shape[-1])
    size = _kernel_chunk(q, v, dtype, chunk_size)
    return q.shape[1] > size and KERNELS["delta"].is_best(size, *dims, dtype, precision)


def piece(run, inputs, starts, axis_name, *, chunk_size, precision, **_):
    """As of log-linear attention."""
    *tokens, lam = inputs
    node, states = states_before(tokens, starts, axis_name, True, chunk_size, precision)
    inside, lam = num_levels(lam.shape[1]), lam.astype(states.dtype)
    out, _ = run(*tokens, lam[..., :inside], start=Start(starts=starts))
    lam = lam[..., inside : inside + states.shape[3]]
    occupied = jnp.right_shift(jax.lax.axis_index(axis_name), np.arange(lam.shape[3], dtype=np.int32)) & 1 == 1
    lam = split_heads(jnp.where(occupied, lam, 0), states.shape[1])  # 0 · inf is NaN
    reads = node.reads.reshape(*lam.shape[:4], -1)
    return out + merge_heads(jnp.einsum("bgrtu,bgrtk,bgrukv->bgrtv", lam, reads, states, precision=precision))


def states_before(tokens, starts, axis_name, by_bucket: bool, chunk_size, precision):
    """(the one node of all tokens of this piece of a sequence; what the piece finds of earlier ones: a state for each bucket of
    them, or one in all, [B, G, R, U, K, V]).

    Later tokens change a state not only by decays but by maps, so the maps of whole pieces are gathered with their states, by
    one collective.
    """
    q, k, v, log_decay, beta = tokens
    size = chunk_size_for(q, v, chunk_size)
    _, run, own = run_chunks(q, k, v, log_decay, beta, starts, size, precision)
    *_, node = climb_chunks(run, own, precision)
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


# --- Chunks and their tree ------------------------------------------------------------------------------------------


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


def into_chunks(groups, chunk_size, q, k, *by_head):
    """q, k [B, G, N, C, K]; the others [B, G, R, N, C, ...]."""
    q, k = (into_parts(jnp.moveaxis(x, 1, 2), 2, chunk_size) for x in (q, k))
    return q, k, *(into_parts(split_heads(x, groups), 3, chunk_size) for x in by_head)


def into_sequence(out: Float[jax.Array, "B G R N C V"], length: int) -> Float[jax.Array, "B T H V"]:
    return merge_heads(out.reshape(*out.shape[:3], -1, out.shape[-1])[:, :, :, :length])


def run_chunks(q, k, v, log_decay, beta, starts, chunk_size, precision):
    """(v in chunks; the transitions inside them; the states that each chunk's own tokens leave)."""
    q, k, v, log_decay, beta = into_chunks(q.shape[2], chunk_size, q, k, v, log_decay, beta)
    run = transitions(q, k, log_decay, beta, precision, beginnings_in_chunks(starts, chunk_size))
    return v, run, run.own(v[..., None, :, :], precision)[..., 0, :, :]


def read_siblings(height: int, reads, states, precision):
    """What the queries of right siblings read of the states [B, G, R, nodes, K, M] of left ones; 0 for others'."""

    def read(reads, states):
        return dot("bgrnctk,bgrnkv->bgrnctv", reads, states, precision)

    return read_left_siblings(read, height, [(reads, 3)], states)


def climb_chunks(run: Transitions, states: Float[Array, "B G R N K V"], precision) -> Iterator[Nodes]:
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
        reads = (decay * reads - read_siblings(height, reads, maps.lost, precision)).astype(stored)
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


def _node_at(nodes, place):
    return jax.tree.map(lambda x: jax.lax.dynamic_index_in_dim(x, place, axis=3, keepdims=False), nodes)


def _left_sibling_of(by_height, chunk) -> Callable:
    """`_before`'s `left_node`."""
    return lambda height: _node_at((by_height[height].maps, by_height[height].states), left_sibling(chunk, height)[1])


def _by_chunks(attend: Callable, inputs, start, return_state, chunk_size: int, precision):
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

    q, k, *rest = into_chunks(groups, chunk_size, *map(of_last, (q, k, v, log_decay, beta)))
    v, log_decay, beta = (x[:, :, :, 0] for x in rest)
    seen = jnp.arange(chunk_size) <= place
    begin = None if begin is None else _node_at(begin, last_chunk)
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
    q, k, v, log_decay, beta, lam = into_chunks(groups, chunk_size, q, k, v, log_decay, beta, lam)
    run = transitions(q, k, log_decay, beta, precision, begin)
    weights = run.weights * select_level(lam[..., :inside], level_of_pairs(np.arange(chunk_size)))
    out = dot("bgrnts,bgrnsv->bgrntv", weights.astype(v.dtype), v, precision)
    by_height = []
    if heights:
        states = run.own(v[..., None, :, :], precision)[..., 0, :, :]
        by_height = list(climb_chunks(run, states, precision))[:heights]
    for height, nodes in enumerate(by_height):
        out += lam[..., inside + height, None] * read_siblings(height, nodes.reads, nodes.states, precision)
    return into_sequence(out, length), functools.partial(_left_sibling_of, by_height)


def _read_initial_state(q, k, v, log_decay, beta, lam, starts, initial, *, chunk_size, precision):
    """`run_from`'s `read`."""
    del v
    length, groups = q.shape[1:3]
    old = InitialState(initial, split_heads(log_decay, groups), lam.shape[-1])
    found = into_parts(old.found(split_heads(lam, groups)), 3, chunk_size)
    q, k, log_decay, beta = into_chunks(groups, chunk_size, q, k, log_decay, beta)
    run = transitions(q, k, log_decay, beta, precision, beginnings_in_chunks(starts, chunk_size))
    no_values = jnp.zeros((*run.reads.shape[:4], run.reads.shape[-1], 0), run.reads.dtype)
    nodes = list(climb_chunks(run, no_values, precision))
    read = jnp.einsum("bgrntl,bgrntk,bgrlkv->bgrntv", found, nodes[-1].reads, old.states, precision=precision)

    def at_end():
        num_chunks = run.decay.shape[3]
        since, _ = _before(num_chunks, num_chunks.bit_length(), _left_sibling_of(nodes, num_chunks), precision)
        moved = old.moved(jax.vmap(since.apply, in_axes=(3, None), out_axes=3)(old.states, precision))
        return moved.reshape(moved.shape[0], -1, *moved.shape[3:])

    return into_sequence(read, length), at_end


# --- By GPU kernels -------------------------------------------------------------------------------------------------


def _kernel_chunk(q, v, dtype, chunk_size: int | None) -> int:
    chunk_size = chunk_size or pallas_kernels.delta_chunk(q.shape[-1], v.shape[-1], dtype)
    return max(fitting_chunk_size(q.shape[1], chunk_size), pallas_kernels.MIN_TILE)


def required_kernel_chunk(q, v, chunk_size: int | None, precision) -> int:
    """Tokens a chunk of the kernels. Raises UnsupportedError where they cannot run the inputs."""
    chunk_size = _kernel_chunk(q, v, q.dtype, chunk_size)
    KERNELS["delta"].require(chunk_size, q.shape[-1], v.shape[-1], q.dtype, precision)
    return chunk_size


def log_decay_of_chunks(log_decay: Float[Array, "B T H"], chunk_size: int) -> Float[Array, "B H N"]:
    by_chunk = log_decay.reshape(len(log_decay), -1, chunk_size, log_decay.shape[2])
    return jnp.swapaxes(jnp.sum(by_chunk, axis=2), 1, 2)


def _attend_by_kernels(q, k, v, log_decay, beta, lam, begin, inside: int, heights: int, chunk_size: int, precision):
    """As `_attend`; states in and out are left to plain JAX."""
    if begin is not None:
        starts = begin == np.arange(chunk_size, dtype=np.int32)
        log_decay = forgetting(log_decay, starts.reshape(len(starts), -1))
    lam = pad_to(lam, num_levels(chunk_size) + heights, axis=3)
    options = dict(chunk_size=chunk_size, precision=precision, segmented=begin is not None)
    out, *of_chunks = pallas_kernels.delta_chunks(
        q, k, v, log_decay, beta, lam[..., : num_levels(chunk_size)], **options
    )
    if not heights:
        return out, None
    reads, lost, states = of_chunks
    nodes = pallas_kernels.join_tree(log_decay_of_chunks(log_decay, chunk_size), lost, states, precision=precision)
    out = pallas_kernels.read_tree(out, reads, lam[..., inside : inside + heights], *nodes, precision=precision)
    decay, lost, states = (x.reshape(len(q), q.shape[2], -1, *x.shape[2:]) for x in nodes)

    def left_node_of(chunk):
        return lambda height: _node_at((Maps(decay, lost), states), jnp.maximum((chunk >> height << height) - 1, 0))

    return out, left_node_of
