"""The quadratic form: the definition written as one masked matrix. The oracle of the tests."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from loglinear_jax.fenwick import FenwickState, fenwick_level
from loglinear_jax.ops import common
from loglinear_jax.ops.decays import decay_matrix


def parallel(q, k, v, log_decay, lam, *, initial_state, return_state, precision=None):
    """o_t = Σ_{s≤t} λ_t[level(t, s)] · exp(Σ_{s<r≤t} g_r) · (q_t · k_s) · v_s, in O(T²) time and memory.

    Shapes and errors as in `log_linear_attention`, whose arguments these are after its checks.
    """
    groups = q.shape[2]
    q, k = (jnp.moveaxis(x, 1, 2) for x in (q, k))
    v, log_decay, lam = (common.split_heads(x, groups) for x in (v, log_decay, lam))
    start = 0 if initial_state is None else initial_state.position
    position = start + jnp.arange(q.shape[2], dtype=jnp.int32)
    level = fenwick_level(position[:, None], position)  # symmetric, so meaningless but harmless above the diagonal

    decay = decay_matrix(log_decay)
    scores = common.dot("bgtk,bgsk->bgts", q, k, precision)[:, :, None]
    weights = scores * decay * common.select_level(lam, level)
    out = common.dot("bgrts,bgrsv->bgrtv", weights.astype(v.dtype), v, precision)
    if initial_state is not None:
        from_initial, initial_at_end = common.read_initial_state(q, log_decay, lam, initial_state, precision)
        out += from_initial
    if not return_state:
        return common.merge_heads(out), None

    in_level = jax.nn.one_hot(level[-1], lam.shape[-1], dtype=decay.dtype)
    values = decay[..., -1, :, None] * v
    levels = jnp.einsum("sl,bgsk,bgrsv->bgrlkv", in_level, k.astype(values.dtype), values, precision=precision)
    if initial_state is not None:
        levels += initial_at_end()
    levels = levels.reshape(levels.shape[0], -1, *levels.shape[3:])
    return common.merge_heads(out), FenwickState(levels=levels, position=position[-1] + 1)
