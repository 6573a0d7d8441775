"""The chunkwise form in plain JAX: inside chunks of C tokens the WY form of `transitions`, between them the binary tree of
`loglinear_jax.ops.tree`, whose nodes hand on states by matrices in place of decays. O(T log T); O(T) for one state.

A query reads a state of some chunks before by way of the matrices between. They are not multiplied to the states, each of which
many chunks read, but to what the queries read with: once a height, for all states that begin before the chunk's node there.

Runs on any backend; differentiated by JAX.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from loglinear_jax.fenwick import fenwick_level, left_sibling, num_levels, tree_heights
from loglinear_jax.ops.continuation import InitialState, run_from
from loglinear_jax.ops.delta.transitions import Transitions, transitions
from loglinear_jax.ops.heads import dot, merge_heads, split_heads
from loglinear_jax.ops.levels import level_of_pairs, pad_to, select_level
from loglinear_jax.ops.tree import fitting_chunk_size, into_parts, read_left_siblings

BLOCK_HEIGHT = 4  # of one state's trees: 16 chunks


def chunkwise(q, k, v, log_decay, beta, lam, *, initial_state, return_state, chunk_size=None, precision=None):
    """Shapes and errors as in `log_linear_delta_attention`, whose arguments these are after its checks."""
    sizes = dict(chunk_size=fitting_chunk_size(q.shape[1], chunk_size), precision=precision)
    aligned = functools.partial(_aligned, return_state=return_state, **sizes)
    read = functools.partial(_read_initial_state, **sizes)
    return run_from(initial_state, (q, k, v, log_decay, beta, lam), aligned, return_state, precision, read)


def one_state(q, k, v, log_decay, beta, *, initial_state, return_state, chunk_size=None, precision=None):
    """The outputs, and the state [B, H, K, V] at the end; as in `gated_delta_attention`.

    A tree over every block of up to 2^BLOCK_HEIGHT chunks, and one state that is carried from block to block.
    """
    length, groups = q.shape[1:3]
    chunk_size = fitting_chunk_size(length, chunk_size)
    height = min(tree_heights(-(-length // chunk_size)), BLOCK_HEIGHT)
    whole = -(-length // (chunk_size << height)) * (chunk_size << height)
    q, k, v, log_decay, beta = (pad_to(x, whole, axis=1) for x in (q, k, v, log_decay, beta))
    q, k, v, log_decay, beta = _into_chunks(groups, chunk_size, q, k, v, log_decay, beta)
    run = transitions(q, k, log_decay, beta, precision)
    out = dot("bgrnts,bgrnsv->bgrntv", run.weights.astype(v.dtype), v, precision)
    climbing = _climb(run, run.own(v[..., None, :, :], precision)[..., 0, :, :], precision)
    for below in range(height):
        nodes = next(climbing)
        out += _read(below, nodes.reads, nodes.states, precision)
    block = next(climbing)
    shape = (*v.shape[:3], q.shape[-1], v.shape[-1])
    first = jnp.zeros(shape, run.decay.dtype) if initial_state is None else initial_state.reshape(shape)

    def carry(state, node):
        matrix, own = node
        return jnp.einsum("bgrjk,bgrkv->bgrjv", matrix, state, precision=precision) + own, state

    state, before = jax.lax.scan(carry, first, tuple(jnp.moveaxis(x, 3, 0) for x in (block.matrices, block.states)))
    reads = block.reads.reshape(*block.reads.shape[:3], len(before), -1, q.shape[-1])
    out += jnp.einsum("bgrntk,nbgrkv->bgrntv", reads, before, precision=precision).reshape(out.shape)
    state = state.reshape(state.shape[0], -1, *shape[-2:])
    return _into_sequence(out, length), state if return_state else None


def _into_chunks(groups, chunk_size, q, k, *by_head):
    """q, k [B, G, N, C, K]; the others [B, G, R, N, C, ...]."""
    q, k = (into_parts(jnp.moveaxis(x, 1, 2), 2, chunk_size) for x in (q, k))
    return q, k, *(into_parts(split_heads(x, groups), 3, chunk_size) for x in by_head)


def _into_sequence(out: Float[jax.Array, "B G R N C V"], length: int) -> Float[jax.Array, "B T H V"]:
    return merge_heads(out.reshape(*out.shape[:3], -1, out.shape[-1])[:, :, :, :length])


@flax.struct.dataclass
class _Nodes:
    """Those of one height.

    reads [B, G, R, N, C, K]: what each query makes of a state before its chunk's node. matrices [B, G, R, nodes, K, K]: what a
    node makes of a state before it. states [B, G, R, nodes, K, V]: of its own tokens, after it.
    """

    reads: Float[Array, "B G R N C K"]
    matrices: Float[Array, "B G R nodes K K"]
    states: Float[Array, "B G R nodes K V"]


def _read(height: int, reads, states, precision):
    """What the queries of right siblings read of the states [B, G, R, nodes, K, M] of left ones; 0 for others'."""

    def read(reads, states):
        return jnp.einsum("bgrnctk,bgrnkv->bgrnctv", reads, states, precision=precision)

    return read_left_siblings(read, height, [(reads, 3)], states)


def _climb(run: Transitions, states: Float[Array, "B G R N K V"], precision) -> Iterator[_Nodes]:
    """The nodes of each height, from the chunks up to where one node holds them all. Only whole nodes have matrices and states.

    states: of the chunks, each from its own tokens.
    """
    reads, matrices = run.reads, run.matrices(precision)
    chunks = np.arange(reads.shape[3])
    for height in range(tree_heights(len(chunks))):
        yield _Nodes(reads, matrices, states)
        is_right, _ = left_sibling(chunks, height)
        reads = jnp.where(is_right[:, None, None] == 1, _read(height, reads, matrices, precision), reads)
        pairs = matrices.shape[3] // 2
        left, right = (slice(side, 2 * pairs, 2) for side in (0, 1))
        after = matrices[:, :, :, right]
        states = (
            jnp.einsum("bgrnjk,bgrnkv->bgrnjv", after, states[:, :, :, left], precision=precision)
            + states[:, :, :, right]
        )
        matrices = jnp.einsum("bgrnjk,bgrnkm->bgrnjm", after, matrices[:, :, :, left], precision=precision)
    yield _Nodes(reads, matrices, states)


def _before(chunk, by_height: Sequence[_Nodes], precision):
    """What stands before a chunk (an int, or traced): (what all chunks before make of a state, [B, G, R, K, K]; the states that
    its queries read, by height, [B, G, R, heights, K, V], 0 where there is none)."""
    size = by_height[0].matrices.shape[-1]
    since = jnp.broadcast_to(
        jnp.eye(size, dtype=by_height[0].matrices.dtype), (*by_height[0].matrices.shape[:3], size, size)
    )
    states = []
    for height, nodes in enumerate(by_height):
        is_right, sibling = left_sibling(chunk, height)
        if not nodes.matrices.shape[3]:
            break
        matrix, state = (
            jax.lax.dynamic_index_in_dim(x, sibling, axis=3, keepdims=False) for x in (nodes.matrices, nodes.states)
        )
        state = jnp.einsum("bgrjk,bgrkv->bgrjv", since, state, precision=precision)
        states.append(jnp.where(is_right == 1, state, 0))
        since = jnp.where(is_right == 1, jnp.einsum("bgrjk,bgrkm->bgrjm", since, matrix, precision=precision), since)
    return since, jnp.stack(states, axis=3)


def _aligned(q, k, v, log_decay, beta, lam, last, *, chunk_size, return_state, precision):
    """Outputs [B, T, H, V] of tokens at positions 0 .. T-1 and, if asked, the levels after token `last` (an int, or traced)."""
    length, groups = q.shape[1:3]
    q, k, v, log_decay, beta, lam = _into_chunks(groups, chunk_size, q, k, v, log_decay, beta, lam)
    inside, heights = min(num_levels(chunk_size), lam.shape[-1]), tree_heights(q.shape[2])
    run = transitions(q, k, log_decay, beta, precision)
    weights = run.weights * select_level(lam[..., :inside], level_of_pairs(np.arange(chunk_size)))
    out = dot("bgrnts,bgrnsv->bgrntv", weights.astype(v.dtype), v, precision)
    by_height = []
    if heights:
        by_height = list(_climb(run, run.own(v[..., None, :, :], precision)[..., 0, :, :], precision))[:heights]
    for height, nodes in enumerate(by_height):
        out += lam[..., inside + height, None] * _read(height, nodes.reads, nodes.states, precision)
    out = _into_sequence(out, length)
    if not return_state:
        return out, None
    last_chunk, place = last // chunk_size, last % chunk_size

    def at_last(x, axis):
        return jax.lax.dynamic_index_in_dim(x, last_chunk, axis=axis, keepdims=False)

    seen = jnp.arange(chunk_size) <= place
    rest = transitions(
        at_last(q, 2), at_last(k, 2), *(jnp.where(seen, at_last(x, 3), 0) for x in (log_decay, beta)), precision
    )
    level = fenwick_level(jnp.asarray(place, jnp.int32), jnp.arange(chunk_size, dtype=jnp.int32))
    levels = rest.own_by_level(at_last(v, 3), jnp.where(seen, level, -1), lam.shape[-1], precision)
    if heights:
        _, states = _before(last_chunk, by_height, precision)
        levels = levels.at[:, :, :, inside : inside + heights].add(rest.after(states, precision))
    return out, levels.reshape(levels.shape[0], -1, *levels.shape[3:])


def _read_initial_state(q, k, v, log_decay, beta, lam, initial, *, chunk_size, precision):
    """`run_from`'s `read`."""
    del v
    length, groups = q.shape[1:3]
    old = InitialState(initial, split_heads(log_decay, groups), lam.shape[-1])
    found = jnp.take_along_axis(lam, jnp.broadcast_to(old.found_at[:, None], lam.shape), axis=-1)
    q, k, log_decay, beta, found = _into_chunks(groups, chunk_size, q, k, log_decay, beta, found)
    run = transitions(q, k, log_decay, beta, precision)
    *by_height, whole = _climb(run, run.matrices(precision), precision)
    read = jnp.einsum("bgrntl,bgrntk,bgrlkv->bgrntv", found, whole.reads, old.states, precision=precision)

    def at_end():
        matrix, _ = _before(run.decay.shape[3], [*by_height, whole], precision)
        moved = old.moved(jnp.einsum("bgrjk,bgrlkv->bgrljv", matrix, old.states, precision=precision))
        return moved.reshape(moved.shape[0], -1, *moved.shape[3:])

    return _into_sequence(read, length), at_end
