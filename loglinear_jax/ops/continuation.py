"""How a sequence goes on from an initial state: the tokens' own part at any position, and what they read of the state."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from loglinear_jax.fenwick import FenwickState, bucket_level_after, fenwick_level, num_levels
from loglinear_jax.ops.heads import dot, merge_heads, split_heads
from loglinear_jax.ops.positions import advanced


def run_from(
    initial: FenwickState | None,
    tokens: tuple,
    aligned: Callable,
    return_state: bool,
    precision=None,
) -> tuple[Float[Array, "B T H V"], FenwickState | None]:
    """Runs a form that only knows sequences from position 0 on from any initial state; returns its output and last state.

    tokens: q, k, v, log_decay, lam of `log_linear_attention`.
    aligned: function of such tokens at positions 0, 1, ... and of an index `last` (an int, or traced), that returns the
      outputs and, if return_state, the levels [B, H, L, K, V] after token `last`.
    """
    length = tokens[0].shape[1]
    if initial is None:
        out, levels = aligned(*tokens, length - 1)
        return out, FenwickState(levels, jnp.asarray(length, jnp.int32)) if return_state else None
    out, levels = _continue(initial, tokens, aligned, return_state, precision)
    return out, FenwickState(levels, advanced(initial.position, length)) if return_state else None


def _continue(initial: FenwickState, tokens, aligned, return_state, precision):
    """Tokens that follow an initial state, at a position that may be traced and lie anywhere in a chunk.

    The tokens are laid into a buffer of two windows of 2**w ≥ T tokens, shifted so that window boundaries in the
    buffer are window boundaries of the sequence. Any T tokens fit, and the buffer's own levels are the sequence's,
    except the topmost: pairs across the window boundary meet at the level where the boundary's position does.
    """
    q, k, v, log_decay, lam = tokens
    length, groups, levels = q.shape[1], q.shape[2], lam.shape[-1]
    window = 1 << (num_levels(length) - 1)
    top = num_levels(2 * window) - 1
    offset = initial.position % window
    boundary = initial.position - offset + window
    # Clipped where no token lies beyond the boundary, and the level is not used.
    boundary_level = jnp.minimum(fenwick_level(boundary, boundary - 1), levels - 1)

    def lay(x):
        return jnp.roll(jnp.pad(x, [(0, 0), (0, 2 * window - length)] + [(0, 0)] * (x.ndim - 2)), offset, axis=1)

    known = min(top, levels)
    local_lam = jnp.pad(lam[..., :known], [(0, 0)] * 3 + [(0, top - known)])
    at_boundary = jax.lax.dynamic_index_in_dim(lam, boundary_level, axis=3)
    local_lam = jnp.concatenate([local_lam, at_boundary], axis=3)
    out, local_levels = aligned(*(lay(x) for x in (q, k, v, log_decay, local_lam)), offset + length - 1)
    out = jax.lax.dynamic_slice_in_dim(out, offset, length, axis=1)

    by_group = jnp.moveaxis(q, 1, 2), split_heads(log_decay, groups), split_heads(lam, groups)
    from_initial, initial_at_end = read_initial_state(*by_group, initial, precision)
    out = out + merge_heads(from_initial)
    if not return_state:
        return out, None
    below = jnp.pad(local_levels[:, :, :known], [(0, 0)] * 2 + [(0, levels - known)] + [(0, 0)] * 2)
    above = jax.nn.one_hot(boundary_level, levels, dtype=below.dtype)[:, None, None] * local_levels[:, :, top, None]
    at_end = initial_at_end()
    return out, below + above + at_end.reshape(at_end.shape[0], -1, *at_end.shape[3:])


def read_initial_state(
    q: Float[Array, "B G T K"],
    log_decay: Float[Array, "B G R T"],
    lam: Float[Array, "B G R T L"],
    initial: FenwickState,
    precision=None,
) -> tuple[Float[Array, "B G R T V"], Callable]:
    """What the initial state's buckets add to the outputs, and a function that gives what they leave at the end.

    A bucket that stood at level l when the state was taken is found by token t at bucket_level_after(l, last, t).
    """
    batch, groups, reps, length, levels = lam.shape
    states = initial.levels.reshape(batch, groups, reps, levels, *initial.levels.shape[3:])
    # Position 0 has no past: whatever the levels hold there belongs to nothing.
    states = jnp.where(initial.position == 0, 0, states)
    last = initial.position - 1
    level = jnp.arange(levels, dtype=jnp.int32)
    found_at = bucket_level_after(level, last, initial.position + jnp.arange(length, dtype=jnp.int32)[:, None])
    found_at = jnp.minimum(found_at, levels - 1)  # only unreachable levels exceed it
    since = jnp.exp(jnp.cumsum(log_decay, axis=-1))
    weights = jnp.take_along_axis(lam, jnp.broadcast_to(found_at, lam.shape), axis=-1) * since[..., None]

    @jax.checkpoint
    def add_level(out, state_and_weight):
        state, weight = state_and_weight
        return out + weight[..., None] * dot("bgtk,bgrkv->bgrtv", q, state, precision), None

    zeros = jnp.zeros((batch, groups, reps, length, states.shape[-1]), states.dtype)
    out, _ = jax.lax.scan(add_level, zeros, (jnp.moveaxis(states, 3, 0), jnp.moveaxis(weights, -1, 0)))

    def at_end() -> Float[Array, "B G R L K V"]:
        moved = (found_at[-1][:, None] == level).astype(states.dtype)
        return jnp.einsum("bgrlkv,lm->bgrmkv", states * since[..., -1, None, None, None], moved, precision="highest")

    return out, at_end
