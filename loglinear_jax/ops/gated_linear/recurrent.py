"""The recurrent form: one step per token over one state a head."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from loglinear_jax.ops.decays import decayed
from loglinear_jax.ops.dtypes import accumulation_dtype


def attend(q, k, v, log_decay, *, initial_state, precision=None):
    """S ← exp(g_t) S + k_t v_tᵀ, o_t = q_tᵀ S, by `lax.scan`; and the state [B, H, K, V] at the end.

    Shapes and errors as in `gated_linear_attention`, whose arguments these are after its checks.
    """
    heads, dtype = v.shape[2], accumulation_dtype(q, k, v)
    q, k = (jnp.repeat(x, heads // x.shape[2], axis=2) for x in (q, k))
    if initial_state is None:
        initial_state = jnp.zeros((v.shape[0], heads, q.shape[-1], v.shape[-1]), dtype)

    def step(state, token):
        q, k, v, log_decay = token
        state = decayed(state, log_decay) + k[..., :, None] * v[..., None, :]
        return state, jnp.einsum("bhk,bhkv->bhv", q, state, precision=precision)

    tokens = (jnp.moveaxis(x.astype(dtype), 1, 0) for x in (q, k, v, log_decay))
    state, out = jax.lax.scan(step, initial_state, tuple(tokens))
    return jnp.moveaxis(out, 0, 1), state
