"""The quadratic form: the definition as a masked matrix."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from loglinear_jax.fenwick import FenwickState
from loglinear_jax.ops.continuation import InitialState, Start
from loglinear_jax.ops.decays import decay_matrix
from loglinear_jax.ops.levels import dot, level_of_pairs, levels_after, merge_heads, split_heads, sum_by_level
from loglinear_jax.ops.positions import advanced, beginnings


def score(q, k, log_decay, start, *, levels, return_state, precision=None):
    """The definition as a masked matrix, in O(T²) time and memory."""
    first = 0 if start.position is None else start.position
    position = first + jnp.arange(q.shape[1], dtype=jnp.int32)
    decay = decay_matrix(split_heads(log_decay, q.shape[2]), beginnings(start.starts))
    weights = dot("bgtk,bgsk->bgts", *(jnp.moveaxis(x, 1, 2) for x in (q, k)), precision)[:, :, None] * decay
    scores = merge_heads(sum_by_level(weights, level_of_pairs(position), levels))
    return with_initial_state(scores, q, k, log_decay, levels, start, return_state, precision)


def with_initial_state(
    scores: Float[Array, "B T H L"],
    q: Float[Array, "B T G K"],
    k: Float[Array, "B T G K"],
    log_decay: Float[Array, "B T H"],
    levels: int,
    start: Start,
    return_state: bool,
    precision,
) -> tuple[Float[Array, "B T H L"], FenwickState | None]:
    """(the scores with those of the initial state's buckets, if there is one; the state after the last token)."""
    first: int | Int[Array, ""] = 0 if start.position is None else start.position
    old = None
    if start.state is not None:
        old = InitialState(start.state, split_heads(log_decay, q.shape[2]), levels, start.starts)
        found = dot("btgk,bgrlk->bgrtl", q, old.states[..., 0], precision) * old.since[..., None]
        moved = jax.nn.one_hot(old.found_at, levels, dtype=found.dtype)
        scores += merge_heads(jnp.einsum("bgrtl,tlm->bgrtm", found, moved, precision="highest"))
    if not return_state:
        return scores, None
    ones = jnp.ones((*log_decay.shape, 1), log_decay.dtype)
    length, begin = log_decay.shape[1], beginnings(start.starts)
    sums = levels_after(first + length - 1, k, ones, log_decay, levels, first=first, begin=begin, precision=precision)
    return scores, FenwickState(sums if old is None else sums + old.at_end(), advanced(first, length))
