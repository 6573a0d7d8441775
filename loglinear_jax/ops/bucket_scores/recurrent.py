"""The recurrent form: a step for each token over O(log T) sums of keys."""

from __future__ import annotations

import jax.numpy as jnp

from loglinear_jax.fenwick import FenwickState, merge_for_token
from loglinear_jax.ops.continuation import scan_tokens, state_at
from loglinear_jax.ops.decays import accumulation_dtype, decayed
from loglinear_jax.ops.positions import advanced


def step(state: FenwickState, q, k, log_decay, precision=None):
    """One token. q, k [B, G, K]; log_decay [B, H]. Returns (scores [B, H, L], new state)."""
    dtype = state.levels.dtype
    q, k = (jnp.repeat(x, log_decay.shape[1] // x.shape[1], axis=1).astype(dtype) for x in (q, k))
    levels = decayed(merge_for_token(state.levels, state.position), log_decay[..., None])
    levels = levels.at[:, :, 0].set(k[..., None])
    scores = jnp.einsum("bhk,bhlk->bhl", q, levels[..., 0], precision=precision)
    return scores, FenwickState(levels=levels, position=advanced(state.position, 1))


def score(q, k, log_decay, start, *, levels, return_state, precision=None):
    batch, _, heads = log_decay.shape
    state = state_at(start, batch, heads, q.shape[-1], 1, levels, accumulation_dtype(q, k))
    scores, state = scan_tokens(step, state, (q, k, log_decay), precision, start.starts)
    return scores, state if return_state else None
