"""The quadratic form: the definition written as one masked matrix, for which a triangular system is solved."""

from __future__ import annotations

import jax.numpy as jnp

from loglinear_jax.fenwick import FenwickState, fenwick_level
from loglinear_jax.ops.continuation import InitialState
from loglinear_jax.ops.delta.transitions import transitions
from loglinear_jax.ops.heads import dot, merge_heads, split_heads
from loglinear_jax.ops.levels import level_of_pairs, select_level
from loglinear_jax.ops.positions import advanced


def parallel(q, k, v, log_decay, beta, lam, *, initial_state, return_state, precision=None):
    """o_t = Σ_{s≤t} λ_t[level(t, s)] · q_tᵀ [Π_{s<r≤t} exp(g_r) (I - β_r k_r k_rᵀ)] β_s k_s v_sᵀ, in O(T²) memory and O(T³)
    time. lam None stands for λ ≡ 1, with one state a head in place of levels.

    Shapes and errors as in `log_linear_delta_attention` and `gated_delta_attention`.
    """
    length, groups = q.shape[1:3]
    q, k = (jnp.moveaxis(x, 1, 2) for x in (q, k))
    v, log_decay, beta = (split_heads(x, groups) for x in (v, log_decay, beta))
    run = transitions(q, k, log_decay, beta, precision)
    weights, start = run.weights, 0
    if lam is not None:
        lam = split_heads(lam, groups)
        start = 0 if initial_state is None else initial_state.position
        position = start + jnp.arange(length, dtype=jnp.int32)
        weights *= select_level(lam, level_of_pairs(position))
    out = dot("bgrts,bgrsv->bgrtv", weights.astype(v.dtype), v, precision)
    state = None
    if lam is None:
        if return_state:
            state = run.own(v.astype(run.inner.dtype), precision)
        if initial_state is not None:
            first = initial_state.reshape(*v.shape[:3], *initial_state.shape[2:])
            out += jnp.einsum("bgrtk,bgrkv->bgrtv", run.reads, first, precision=precision)
            if return_state:
                state += run.after(first[:, :, :, None], precision)[:, :, :, 0]
        return merge_heads(out), None if state is None else state.reshape(v.shape[0], -1, *state.shape[3:])
    if return_state:
        level = fenwick_level(start + length - 1, position)
        state = run.own_by_level(v, level, lam.shape[-1], precision)
    if initial_state is not None:
        old = InitialState(initial_state, log_decay, lam.shape[-1])
        found = jnp.take_along_axis(lam, jnp.broadcast_to(old.found_at, lam.shape), axis=-1)
        out += jnp.einsum("bgrtl,bgrtk,bgrlkv->bgrtv", found, run.reads, old.states, precision=precision)
        if return_state:
            state += old.moved(run.after(old.states, precision))
    if state is not None:
        state = FenwickState(state.reshape(v.shape[0], -1, *state.shape[3:]), advanced(start, length))
    return merge_heads(out), state
