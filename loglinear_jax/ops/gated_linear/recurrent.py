"""The recurrent form: a step for each token over one state."""

from __future__ import annotations

import jax.numpy as jnp

from loglinear_jax.ops.continuation import scan_tokens
from loglinear_jax.ops.decays import accumulation_dtype, decayed


def attend(q, k, v, log_decay, start, *, return_state, precision=None):
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
