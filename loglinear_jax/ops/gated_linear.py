"""The forms of gated linear attention with one state (SSD; Dao & Gu 2024).

Each takes what `gated_linear_attention` has checked, and returns its outputs and the state [B, H, K, V] at the end. `xla` is
quadratic inside chunks, whose states an associative scan hands on, O(T); `pallas` are the kernels of log-linear attention.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

import pallas_kernels
from loglinear_jax.fenwick import num_levels
from loglinear_jax.ops.continuation import Start, scan_tokens
from loglinear_jax.ops.decays import accumulation_dtype, decay_matrix, decay_since_start, decay_to_end, decayed
from loglinear_jax.ops.levels import dot, merge_heads, split_heads
from loglinear_jax.ops.positions import beginnings, beginnings_in_chunks, forgetting
from loglinear_jax.ops.sequence_parallel import decay_over, left_of_pieces, own_state
from loglinear_jax.ops.sharding import varying_as
from loglinear_jax.ops.tree import fitting_chunk_size, into_parts
from pallas_kernels import KERNELS


def parallel(q, k, v, log_decay, start, *, return_state, precision=None):
    """o_t = Σ_{s≤t} exp(Σ_{s<r≤t} g_r) (q_t · k_s) v_s as a masked matrix, in O(T²) time and memory."""
    groups = q.shape[2]
    decay = decay_matrix(split_heads(log_decay, groups), beginnings(start.starts))
    weights = dot("btgk,bsgk->bgts", q, k, precision)[:, :, None] * decay
    out = dot("bgrts,bgrsv->bgrtv", weights.astype(v.dtype), split_heads(v, groups), precision)
    return _with_states(merge_heads(out), q, k, v, log_decay, start, return_state, precision)


def _with_states(out, q, k, v, log_decay, start, return_state, precision):
    """(out [B, T, H, V], which reads no initial state, with what the tokens read of it; the state at the end)."""
    groups = q.shape[2]
    v, log_decay, begin = split_heads(v, groups), split_heads(log_decay, groups), beginnings(start.starts)
    kept = decay_to_end(log_decay, begin)[..., None]
    state = dot("bsgk,bgrsv->bgrkv", k.astype(log_decay.dtype), kept * v, precision)
    if start.state is not None:
        first = start.state.reshape(state.shape)
        since = decay_since_start(log_decay, begin)[..., None]
        out += merge_heads(since * dot("btgk,bgrkv->bgrtv", q, first, precision))
        state += since[..., -1:, :] * first
    return out, state.reshape(state.shape[0], -1, *state.shape[3:]) if return_state else None


def recurrent(q, k, v, log_decay, start, *, return_state, precision=None):
    """S ← exp(g_t) S + k_t v_tᵀ, o_t = q_tᵀ S."""
    heads, dtype = v.shape[2], accumulation_dtype(q, k, v)
    q, k = (jnp.repeat(x, heads // x.shape[2], axis=2) for x in (q, k))
    state = start.state
    if state is None:
        state = jnp.zeros((v.shape[0], heads, q.shape[-1], v.shape[-1]), dtype)

    def step(state, q, k, v, log_decay, precision):
        state = decayed(state, log_decay) + k[..., :, None] * v[..., None, :]
        return jnp.einsum("bhk,bhkv->bhv", q, state, precision=precision), state

    out, state = scan_tokens(step, state, [x.astype(dtype) for x in (q, k, v, log_decay)], precision, start.starts)
    return out, state if return_state else None


def xla(q, k, v, log_decay, start, *, return_state, chunk_size=None, precision=None):
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


def kernels_are_best(q, k, v, chunk_size=None, precision=None) -> bool:
    """As of log-linear attention."""
    dtype = jnp.result_type(q, k, v)
    return KERNELS["gated_linear_attention"].is_best(q.shape[-1], v.shape[-1], dtype, chunk_size, precision)


def pallas(q, k, v, log_decay, start, *, return_state, chunk_size=None, precision=None):
    """Log-linear attention with λ ≡ 1; states in and out by plain JAX."""
    lam = varying_as(log_decay, jnp.ones((*log_decay.shape, num_levels(log_decay.shape[1])), jnp.float32))
    options = dict(chunk_size=chunk_size, precision=precision, segmented=start.starts is not None)
    out = pallas_kernels.fenwick_attention(q, k, v, forgetting(log_decay, start.starts), lam, **options)
    return _with_states(out, q, k, v, log_decay, start, return_state, precision)


def piece(run, inputs, starts, axis_name, *, precision, **_):
    """As of log-linear attention."""
    _, k, v, log_decay = inputs
    left = left_of_pieces(own_state(k, v, log_decay, starts, precision), decay_over(log_decay, starts), axis_name)
    return run(*inputs, start=Start(jnp.sum(left, axis=0), starts=starts))[0]
