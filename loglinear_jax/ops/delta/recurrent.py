"""The recurrent forms: one step per token. What decoding does, and a second oracle."""

from __future__ import annotations

import jax.numpy as jnp

from loglinear_jax.fenwick import FenwickState, merge_for_token, occupied_levels
from loglinear_jax.ops.continuation import state_at
from loglinear_jax.ops.decays import decayed
from loglinear_jax.ops.dtypes import accumulation_dtype
from loglinear_jax.ops.positions import advanced
from loglinear_jax.ops.scan import scan_tokens


def step(state: FenwickState, q, k, v, log_decay, beta, lam, precision=None):
    """One token. q, k [B, G, K]; v [B, H, V]; log_decay, beta [B, H]; lam [B, H, L]. Returns (o [B, H, V], new state)."""
    q, k = (jnp.repeat(x, v.shape[1] // x.shape[1], axis=1) for x in (q, k))
    before = merge_for_token(state.levels, state.position)
    levels = _overwritten(before, k[:, :, None], log_decay[..., None], beta[..., None], precision)
    written = beta[..., None, None] * k[..., :, None] * v[..., None, :]
    levels = levels.at[:, :, 0].set(written.astype(levels.dtype))
    lam = jnp.where(occupied_levels(state.position[..., None], levels.shape[2]), lam, 0)  # 0 · inf is NaN
    out = jnp.einsum("bhk,bhl,bhlkv->bhv", q, lam, levels, precision=precision)
    return out, FenwickState(levels=levels, position=advanced(state.position, 1))


def one_state_step(state, q, k, v, log_decay, beta, precision=None):
    """The same over one state a head [B, H, K, V]."""
    q, k = (jnp.repeat(x, v.shape[1] // x.shape[1], axis=1) for x in (q, k))
    state = (
        _overwritten(state, k, log_decay, beta, precision) + beta[..., None, None] * k[..., :, None] * v[..., None, :]
    )
    return jnp.einsum("bhk,bhkv->bhv", q, state, precision=precision), state


def _overwritten(states, k, log_decay, beta, precision):
    """exp(g) (I - β k kᵀ) S."""
    found = jnp.einsum("...k,...kv->...v", k, states, precision=precision)
    erased = beta[..., None, None] * k[..., :, None] * found[..., None, :]
    return decayed(states - erased, log_decay)


def attend(q, k, v, log_decay, beta, lam, start, *, return_state, precision=None):
    """`step` over every token by `lax.scan`. Shapes and errors as in `log_linear_delta_attention`."""
    state = state_at(start, len(v), v.shape[2], q.shape[-1], v.shape[-1], lam.shape[-1], accumulation_dtype(q, k, v))
    out, state = scan_tokens(step, state, _in_one_dtype(q, k, v, log_decay, beta, lam), precision, start.starts)
    return out, state if return_state else None


def one_state(q, k, v, log_decay, beta, start, *, return_state, precision=None):
    """`one_state_step` over every token by `lax.scan`. Shapes and errors as in `gated_delta_attention`."""
    state = start.state
    if state is None:
        state = jnp.zeros((len(v), v.shape[2], q.shape[-1], v.shape[-1]), accumulation_dtype(q, k, v))
    out, state = scan_tokens(one_state_step, state, _in_one_dtype(q, k, v, log_decay, beta), precision, start.starts)
    return out, state if return_state else None


def _in_one_dtype(*tokens):
    return [x.astype(accumulation_dtype(*tokens[:3])) for x in tokens]
