"""How scores go on from an initial state, and the state that they leave."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from loglinear_jax.fenwick import FenwickState
from loglinear_jax.ops.continuation import InitialState, Start, Windows
from loglinear_jax.ops.heads import dot, merge_heads, split_heads
from loglinear_jax.ops.levels import levels_after
from loglinear_jax.ops.positions import advanced
from loglinear_jax.ops.segments import beginnings


def run_from(
    start: Start, tokens: tuple, aligned: Callable, levels: int, return_state: bool, precision=None
) -> tuple[Float[Array, "B T H L"], FenwickState | None]:
    """Runs a form that only knows sequences from position 0 on from anywhere.

    tokens: q, k, log_decay of `bucket_scores`. aligned: function of such tokens at positions 0, 1, ..., of `Start.starts` for
      them, and of a number of levels, that returns their scores.
    """
    q, k, log_decay = tokens
    if start.position is None:
        scores = aligned(*tokens, start.starts, levels)
        return scores, ending(k, log_decay, levels, start, None, precision) if return_state else None
    windows = Windows(start.position, q.shape[1], levels)

    def at_the_beginning():
        return _levels_of_sequence(windows.local_levels_at_end, aligned(*tokens, start.starts, windows.top))

    def anywhere():
        laid = (None if x is None else windows.lay(x) for x in (*tokens, start.starts))
        local = windows.take(aligned(*laid, windows.top + 1))
        return _levels_of_sequence(windows.levels_at_end, local)

    scores = jax.lax.cond(windows.offset == 0, at_the_beginning, anywhere)
    old = None
    if start.state is not None:
        by_group = jnp.moveaxis(q, 1, 2), split_heads(log_decay, q.shape[2])
        from_initial, old = scores_of_initial_state(*by_group, start, levels, precision)
        scores += merge_heads(from_initial)
    return scores, ending(k, log_decay, levels, start, old, precision) if return_state else None


def _levels_of_sequence(place: Callable, local: Float[Array, "B T H M"]) -> Float[Array, "B T H L"]:
    """Scores by the levels of the sequence. place: a method of Windows for [B, H, M, ...]."""
    return jnp.moveaxis(place(jnp.moveaxis(local, 3, 2)), 2, 3)


def scores_of_initial_state(
    q: Float[Array, "B G T K"], log_decay: Float[Array, "B G R T"], start: Start, levels: int, precision=None
) -> tuple[Float[Array, "B G R T L"], InitialState]:
    """What the initial state's buckets add to the scores."""
    old = InitialState(start.state, log_decay, levels, start.starts)
    scores = dot("bgtk,bgrlk->bgrtl", q, old.states[..., 0], precision) * old.since[..., None]
    moved = jax.nn.one_hot(old.found_at, levels, dtype=scores.dtype)
    return jnp.einsum("bgrtl,tlm->bgrtm", scores, moved, precision="highest"), old


def ending(
    k: Float[Array, "B T G K"],
    log_decay: Float[Array, "B T H"],
    levels: int,
    start: Start,
    old: InitialState | None,
    precision=None,
) -> FenwickState:
    """The state after the last token."""
    first, length = 0 if start.position is None else start.position, log_decay.shape[1]
    ones = jnp.ones((*log_decay.shape, 1), log_decay.dtype)
    begin = beginnings(start.starts)
    sums = levels_after(first + length - 1, k, ones, log_decay, levels, first=first, begin=begin, precision=precision)
    if old is not None:
        sums += old.at_end()
    return FenwickState(sums, advanced(first, length))
