"""The quadratic form: the definition written as one masked matrix."""

from __future__ import annotations

import jax.numpy as jnp

from loglinear_jax.ops.bucket_scores.continuation import ending, scores_of_initial_state
from loglinear_jax.ops.decays import decay_matrix
from loglinear_jax.ops.heads import dot, merge_heads, split_heads
from loglinear_jax.ops.levels import level_of_pairs, sum_by_level
from loglinear_jax.ops.segments import beginnings


def score(q, k, log_decay, start, *, levels, return_state, precision=None):
    """In O(T²) time and memory. Shapes and errors as in `bucket_scores`, whose arguments these are after its checks."""
    groups = q.shape[2]
    tokens = k, log_decay
    q, k = (jnp.moveaxis(x, 1, 2) for x in (q, k))
    log_decay = split_heads(log_decay, groups)
    first = 0 if start.position is None else start.position
    position = first + jnp.arange(q.shape[2], dtype=jnp.int32)
    weights = dot("bgtk,bgsk->bgts", q, k, precision)[:, :, None] * decay_matrix(log_decay, beginnings(start.starts))
    scores = sum_by_level(weights, level_of_pairs(position), levels)
    old = None
    if start.state is not None:
        from_initial, old = scores_of_initial_state(q, log_decay, start, levels, precision)
        scores += from_initial
    state = ending(*tokens, levels, start, old, precision) if return_state else None
    return merge_heads(scores), state
