"""The quadratic forms: the definition as a masked matrix, for which a triangular system is solved."""

from __future__ import annotations

import jax.numpy as jnp

from loglinear_jax.fenwick import FenwickState, fenwick_level
from loglinear_jax.ops.continuation import InitialState
from loglinear_jax.ops.delta.transitions import transitions
from loglinear_jax.ops.levels import dot, level_of_pairs, merge_heads, select_level, split_heads
from loglinear_jax.ops.positions import advanced, beginnings


def attend(q, k, v, log_decay, beta, lam, start, *, return_state, precision=None):
    """o_t = Σ_{s≤t} λ_t[level(t, s)] · q_tᵀ [Π_{s<r≤t} exp(g_r) (I - β_r k_r k_rᵀ)] β_s k_s v_sᵀ as a masked matrix, by a
    triangular system, in O(T²) memory and O(T³) time."""
    length = q.shape[1]
    run, v, log_decay = _whole(q, k, v, log_decay, beta, start, precision)
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


def one_state(q, k, v, log_decay, beta, start, *, return_state, precision=None):
    """The same with λ ≡ 1 and one state a head."""
    run, v, _ = _whole(q, k, v, log_decay, beta, start, precision)
    out = dot("bgrts,bgrsv->bgrtv", run.weights.astype(v.dtype), v, precision)
    state = run.own(v[:, :, :, None], precision)
    if start.state is not None:
        first = start.state.reshape(state.shape)
        out += jnp.einsum("bgrtk,bgrlkv->bgrtv", run.reads, first, precision=precision)
        state += run.after(first, precision)
    return merge_heads(out), state.reshape(state.shape[0], -1, *state.shape[4:]) if return_state else None


def _whole(q, k, v, log_decay, beta, start, precision):
    """(the transitions of the whole sequence, v [B, G, R, T, V], log_decay [B, G, R, T])."""
    groups = q.shape[2]
    q, k = (jnp.moveaxis(x, 1, 2).astype(log_decay.dtype) for x in (q, k))  # rounded, M's error would grow with T
    v, log_decay, beta = (split_heads(x, groups) for x in (v, log_decay, beta))
    return transitions(q, k, log_decay, beta, precision, beginnings(start.starts)), v, log_decay
