"""The recurrent form: one step per token over one state a head."""

from __future__ import annotations

import jax.numpy as jnp

from loglinear_jax.ops.decays import decayed
from loglinear_jax.ops.dtypes import accumulation_dtype
from loglinear_jax.ops.scan import scan_tokens


def attend(q, k, v, log_decay, start, *, precision=None):
    """S ← exp(g_t) S + k_t v_tᵀ, o_t = q_tᵀ S, by `lax.scan`; and the state [B, H, K, V] at the end.

    Shapes and errors as in `gated_linear_attention`, whose arguments these are after its checks.
    """
    heads, dtype = v.shape[2], accumulation_dtype(q, k, v)
    q, k = (jnp.repeat(x, heads // x.shape[2], axis=2) for x in (q, k))
    state = start.state
    if state is None:
        state = jnp.zeros((v.shape[0], heads, q.shape[-1], v.shape[-1]), dtype)

    return scan_tokens(_step, state, [x.astype(dtype) for x in (q, k, v, log_decay)], precision, start.starts)


def _step(state, q, k, v, log_decay, precision):
    state = decayed(state, log_decay) + k[..., :, None] * v[..., None, :]
    return jnp.einsum("bhk,bhkv->bhv", q, state, precision=precision), state
