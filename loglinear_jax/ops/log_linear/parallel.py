"""The quadratic form: the definition as a masked matrix."""

from __future__ import annotations

import jax.numpy as jnp

from loglinear_jax.fenwick import FenwickState
from loglinear_jax.ops.continuation import InitialState
from loglinear_jax.ops.decays import decay_matrix
from loglinear_jax.ops.levels import dot, level_of_pairs, levels_after, merge_heads, select_level, split_heads
from loglinear_jax.ops.positions import advanced, beginnings


def attend(q, k, v, log_decay, lam, start, *, return_state, precision=None):
    """o_t = Σ_{s≤t} λ_t[level(t, s)] · exp(Σ_{s<r≤t} g_r) · (q_t · k_s) · v_s as a masked matrix, in O(T²) time and memory."""
    groups = q.shape[2]
    first, begin = 0 if start.position is None else start.position, beginnings(start.starts)
    tokens = k, v, log_decay
    q, k = (jnp.moveaxis(x, 1, 2) for x in (q, k))
    v, log_decay, lam = (split_heads(x, groups) for x in (v, log_decay, lam))
    position = first + jnp.arange(q.shape[2], dtype=jnp.int32)

    scores = dot("bgtk,bgsk->bgts", q, k, precision)[:, :, None]
    weights = scores * decay_matrix(log_decay, begin) * select_level(lam, level_of_pairs(position))
    out = dot("bgrts,bgrsv->bgrtv", weights.astype(v.dtype), v, precision)
    if start.state is not None:
        old = InitialState(start.state, log_decay, lam.shape[-1], start.starts)
        out += old.read(q, lam, precision)
    out = merge_heads(out)
    if not return_state:
        return out, None
    end = first + q.shape[2]
    levels = levels_after(end - 1, *tokens, lam.shape[-1], first=first, begin=begin, precision=precision)
    if start.state is not None:
        levels += old.at_end()
    return out, FenwickState(levels=levels, position=advanced(first, q.shape[2]))
