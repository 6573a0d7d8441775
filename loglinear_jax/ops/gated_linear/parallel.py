"""The quadratic form: the definition as a masked matrix."""

from __future__ import annotations

from loglinear_jax.ops.decays import decay_matrix, decay_since_start, decay_to_end
from loglinear_jax.ops.levels import dot, merge_heads, split_heads
from loglinear_jax.ops.positions import beginnings


def attend(q, k, v, log_decay, start, *, return_state, precision=None):
    """o_t = Σ_{s≤t} exp(Σ_{s<r≤t} g_r) (q_t · k_s) v_s as a masked matrix, in O(T²) time and memory."""
    groups = q.shape[2]
    decay = decay_matrix(split_heads(log_decay, groups), beginnings(start.starts))
    weights = dot("btgk,bsgk->bgts", q, k, precision)[:, :, None] * decay
    out = dot("bgrts,bgrsv->bgrtv", weights.astype(v.dtype), split_heads(v, groups), precision)
    return with_states(merge_heads(out), q, k, v, log_decay, start, return_state, precision)


def with_states(out, q, k, v, log_decay, start, return_state, precision):
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
