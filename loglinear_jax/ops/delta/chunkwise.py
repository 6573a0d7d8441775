"""The chunkwise form in plain JAX: inside chunks of C tokens the WY form of `transitions`, between them states that are carried
through one chunk after the other, all levels at once. O(T log T); O(T) for one state.

Runs on any backend; differentiated by JAX.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float

from loglinear_jax.fenwick import fenwick_level, num_levels, tree_heights
from loglinear_jax.ops.continuation import InitialState, run_from
from loglinear_jax.ops.delta.transitions import Transitions, transitions
from loglinear_jax.ops.heads import dot, merge_heads, split_heads
from loglinear_jax.ops.levels import level_of_pairs, select_level
from loglinear_jax.ops.tree import fitting_chunk_size, into_parts


def chunkwise(q, k, v, log_decay, beta, lam, *, initial_state, return_state, chunk_size=None, precision=None):
    """Shapes and errors as in `log_linear_delta_attention`, whose arguments these are after its checks."""
    sizes = dict(chunk_size=fitting_chunk_size(q.shape[1], chunk_size), precision=precision)
    aligned = functools.partial(_aligned, return_state=return_state, **sizes)
    read = functools.partial(_read_initial_state, **sizes)
    return run_from(initial_state, (q, k, v, log_decay, beta, lam), aligned, return_state, precision, read)


def one_state(q, k, v, log_decay, beta, *, initial_state, return_state, chunk_size=None, precision=None):
    """The outputs, and the state [B, H, K, V] at the end; as in `gated_delta_attention`."""
    length, groups = q.shape[1:3]
    q, k, v, log_decay, beta = _into_chunks(groups, fitting_chunk_size(length, chunk_size), q, k, v, log_decay, beta)
    run = transitions(q, k, log_decay, beta, precision)
    out = dot("bgrnts,bgrnsv->bgrntv", run.weights.astype(v.dtype), v, precision)
    shape = (*v.shape[:3], 1, q.shape[-1], v.shape[-1])
    first = jnp.zeros(shape, run.decay.dtype) if initial_state is None else initial_state.reshape(shape)
    own = run.own(v[..., None, :, :], precision)

    def join(index, before, after, own):
        del index, before
        return after + own

    read, state = _carry(run, jnp.ones((*v.shape[:5], 1), first.dtype), first, own, join, precision)
    state = state.reshape(state.shape[0], -1, *shape[-2:])
    return _into_sequence(out + read, length), state if return_state else None


def _into_chunks(groups, chunk_size, q, k, *by_head):
    """q, k [B, G, N, C, K]; the others [B, G, R, N, C, ...]."""
    q, k = (into_parts(jnp.moveaxis(x, 1, 2), 2, chunk_size) for x in (q, k))
    return q, k, *(into_parts(split_heads(x, groups), 3, chunk_size) for x in by_head)


def _into_sequence(out: Float[jax.Array, "B G R N C V"], length: int) -> Float[jax.Array, "B T H V"]:
    return merge_heads(out.reshape(*out.shape[:3], -1, out.shape[-1])[:, :, :, :length])


def _carry(run: Transitions, weights, states, own, join, precision):
    """Carries states [B, G, R, L, K, V] through the chunks of `run`. Returns (what their queries read, with these weights
    [B, G, R, N, C, L]; the states after the last). join: (index of a chunk, states before it, after it, its own) to the states
    that go on."""
    num_chunks = run.decay.shape[3]
    run = run.replace(weights=None, inner=None)
    by_chunk = jax.tree.map(lambda x: jnp.moveaxis(x, 3, 0), (run, weights, own))

    def through(states, chunk):
        index, (run, weights, own) = chunk
        read = jnp.einsum("bgrtl,bgrtk,bgrlkv->bgrtv", weights, run.reads, states, precision=precision)
        return join(index, states, run.after(states, precision), own), read

    states, read = jax.lax.scan(through, states, (jnp.arange(num_chunks, dtype=jnp.int32), by_chunk))
    return jnp.moveaxis(read, 0, 3), states


def _aligned(q, k, v, log_decay, beta, lam, last, *, chunk_size, return_state, precision):
    """Outputs [B, T, H, V] of tokens at positions 0 .. T-1 and, if asked, the levels after token `last` (an int, or traced)."""
    length, groups = q.shape[1:3]
    q, k, v, log_decay, beta, lam = _into_chunks(groups, chunk_size, q, k, v, log_decay, beta, lam)
    inside, heights = min(num_levels(chunk_size), lam.shape[-1]), tree_heights(q.shape[2])
    run = transitions(q, k, log_decay, beta, precision)
    weights = run.weights * select_level(lam[..., :inside], level_of_pairs(np.arange(chunk_size)))
    out = dot("bgrnts,bgrnsv->bgrntv", weights.astype(v.dtype), v, precision)
    last_chunk, place = last // chunk_size, last % chunk_size
    states = jnp.zeros((*v.shape[:3], heights, q.shape[-1], v.shape[-1]), run.decay.dtype)
    if heights:
        height = np.arange(heights)[:, None, None]

        def join(index, before, after, own):
            """The carry chain: the chunk and the states of the heights below go into that of its successor's lowest bit."""
            lowest = 31 - jax.lax.clz((index + 1) & -(index + 1))
            joined = own + jnp.sum(jnp.where(height < lowest, after, 0), axis=3, keepdims=True)
            after = jnp.where(height == lowest, joined, jnp.where(height < lowest, 0, after))
            return jnp.where(index < last_chunk, after, before)  # in the end those before the last token's chunk

        own = run.own(v[..., None, :, :], precision)
        read, states = _carry(run, lam[..., inside : inside + heights], states, own, join, precision)
        out += read
    out = _into_sequence(out, length)
    if not return_state:
        return out, None

    def at_last(x, axis):
        return jax.lax.dynamic_index_in_dim(x, last_chunk, axis=axis, keepdims=False)

    seen = jnp.arange(chunk_size) <= place
    rest = transitions(
        at_last(q, 2), at_last(k, 2), *(jnp.where(seen, at_last(x, 3), 0) for x in (log_decay, beta)), precision
    )
    level = fenwick_level(jnp.asarray(place, jnp.int32), jnp.arange(chunk_size, dtype=jnp.int32))
    levels = rest.own_by_level(at_last(v, 3), jnp.where(seen, level, -1), lam.shape[-1], precision)
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
    read, states = _carry(run, found, old.states, run.decay, lambda index, before, after, own: after, precision)

    def at_end():
        moved = old.moved(states)
        return moved.reshape(moved.shape[0], -1, *moved.shape[3:])

    return _into_sequence(read, length), at_end
