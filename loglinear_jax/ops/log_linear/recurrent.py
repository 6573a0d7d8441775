"""The recurrent form: a step for each token over O(log T) states, as in decoding."""

from __future__ import annotations

import jax.numpy as jnp

from loglinear_jax.fenwick import FenwickState, merge_for_token, occupied_levels
from loglinear_jax.ops.continuation import scan_tokens, state_at
from loglinear_jax.ops.decays import accumulation_dtype, decayed
from loglinear_jax.ops.positions import advanced


def step(state: FenwickState, q, k, v, log_decay, lam, precision=None):
    """One token. q, k [B, G, K]; v [B, H, V]; log_decay [B, H]; lam [B, H, L]. Returns (o [B, H, V], new state)."""
    heads, dtype = v.shape[1], state.levels.dtype
    q, k = (jnp.repeat(x, heads // x.shape[1], axis=1).astype(dtype) for x in (q, k))
    written = k[..., :, None] * v.astype(dtype)[..., None, :]
    levels = decayed(merge_for_token(state.levels, state.position), log_decay[..., None])
    levels += jnp.where(jnp.arange(levels.shape[2])[:, None, None] == 0, written[:, :, None], 0)  # empty until now
    # q first: XLA reads every level where it writes it.
    read = jnp.einsum("bhk,bhlkv->bhlv", q, levels, precision=precision)
    lam = jnp.where(occupied_levels(state.position[..., None], levels.shape[2]), lam, 0)  # 0 · inf is NaN
    out = jnp.sum(lam[..., None] * read, axis=2)
    return out, FenwickState(levels=levels, position=advanced(state.position, 1))


def attend(q, k, v, log_decay, lam, start, *, return_state, precision=None):
    sizes = len(v), v.shape[2], q.shape[-1], v.shape[-1], lam.shape[-1]
    state = state_at(start, *sizes, accumulation_dtype(q, k, v))
    out, state = scan_tokens(step, state, (q, k, v, log_decay, lam), precision, start.starts)
    return out, state if return_state else None
