"""The chunkwise form: quadratic inside chunks, whose states an associative scan hands on. O(T), in plain JAX."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from loglinear_jax.ops.decays import decay_matrix, decay_since_start, decay_to_end
from loglinear_jax.ops.levels import dot, merge_heads, split_heads
from loglinear_jax.ops.positions import beginnings_in_chunks
from loglinear_jax.ops.tree import fitting_chunk_size, into_parts


def attend(q, k, v, log_decay, start, *, return_state, chunk_size=None, precision=None):
    length, groups = q.shape[1:3]
    chunk_size = fitting_chunk_size(length, chunk_size)
    num_chunks = -(-length // chunk_size)

    def into_chunks(x):
        return split_heads(into_parts(x, 1, chunk_size).reshape(-1, chunk_size, *x.shape[2:]), groups)

    def per_sequence(x):
        return x.reshape(-1, num_chunks, *x.shape[1:])

    q, k = (into_chunks(x)[:, :, 0] for x in (q, k))  # [B·N, G, C, K]
    values, log_decay = into_chunks(v), into_chunks(log_decay)  # [B·N, G, R, C, ...]
    begin = beginnings_in_chunks(start.starts, chunk_size)
    if begin is not None:
        begin = begin.reshape(-1, 1, 1, chunk_size)
    scores = dot("bgtk,bgsk->bgts", q, k, precision)[:, :, None] * decay_matrix(log_decay, begin)
    out = dot("bgrts,bgrsv->bgrtv", scores.astype(v.dtype), values, precision)

    decayed = (decay_to_end(log_decay, begin)[..., None] * values).astype(v.dtype)
    state = per_sequence(dot("bgsk,bgrsv->bgrkv", k, decayed, precision))
    since = decay_since_start(log_decay, begin)[..., None]
    chunk_decay = per_sequence(since[..., -1:, :])

    def combine(earlier, later):
        return earlier[0] * later[0], earlier[1] * later[0] + later[1]

    through, state = jax.lax.associative_scan(combine, (chunk_decay, state), axis=1)  # after each chunk
    first = jnp.zeros_like(state[:, 0])
    if start.state is not None:
        first = start.state.reshape(first.shape)
        state += through * first[:, None]
    before = jnp.concatenate([first[:, None], state[:, :-1]], axis=1).reshape(-1, *state.shape[2:])
    out += since * dot("bgtk,bgrkv->bgrtv", q, before, precision)
    out = merge_heads(out)
    out = out.reshape(-1, num_chunks * chunk_size, *out.shape[2:])[:, :length]
    return out, state[:, -1].reshape(v.shape[0], -1, *state.shape[-2:]) if return_state else None
