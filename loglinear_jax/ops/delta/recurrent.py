"""The recurrent forms: a step for each token, as in decoding."""

from __future__ import annotations

import jax.numpy as jnp

from loglinear_jax.fenwick import FenwickState, merge_for_token, occupied_levels
from loglinear_jax.ops.continuation import scan_tokens, state_at
from loglinear_jax.ops.decays import accumulation_dtype, decayed
from loglinear_jax.ops.positions import advanced


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


def attend(q, k, v, log_decay, beta, lam, start, *, return_state, precision=None):
    dtype = accumulation_dtype(q, k, v)
    state = state_at(start, len(v), v.shape[2], q.shape[-1], v.shape[-1], lam.shape[-1], dtype)
    tokens = [x.astype(dtype) for x in (q, k, v, log_decay, beta, lam)]
    out, state = scan_tokens(step, state, tokens, precision, start.starts)
    return out, state if return_state else None


def one_state(q, k, v, log_decay, beta, start, *, return_state, precision=None):
    """S ← exp(g_t) (I - β_t k_t k_tᵀ) S + β_t k_t v_tᵀ, o_t = q_tᵀ S."""
    state, dtype = start.state, accumulation_dtype(q, k, v)
    if state is None:
        state = jnp.zeros((len(v), v.shape[2], q.shape[-1], v.shape[-1]), dtype)

    def step(state, q, k, v, log_decay, beta, precision):
        q, k = (jnp.repeat(x, v.shape[1] // x.shape[1], axis=1) for x in (q, k))
        written = beta[..., None, None] * k[..., :, None] * v[..., None, :]
        state = _overwritten(state, k, log_decay, beta, precision) + written
        return jnp.einsum("bhk,bhkv->bhv", q, state, precision=precision), state

    tokens = [x.astype(dtype) for x in (q, k, v, log_decay, beta)]
    out, state = scan_tokens(step, state, tokens, precision, start.starts)
    return out, state if return_state else None


def _overwritten(states, k, log_decay, beta, precision):
    """exp(g) (I - β k kᵀ) S."""
    found = jnp.einsum("...k,...kv->...v", k, states, precision=precision)
    erased = beta[..., None, None] * k[..., :, None] * found[..., None, :]
    return decayed(states - erased, log_decay)
