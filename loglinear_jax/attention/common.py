"""What the forms of log-linear attention share: head groups, level weights, and the part that reads an initial state."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from loglinear_jax.fenwick import FenwickState, bucket_level_after


def accumulation_dtype(*arrays) -> jnp.dtype:
    """Dtype of decays, λ, states and sums: float32, or float64 if an input is."""
    return jnp.promote_types(jnp.result_type(*arrays), jnp.float32)


def dot(subscripts: str, x: Array, y: Array, precision=None) -> Array:
    """einsum that multiplies in x's dtype and accumulates in float32 (float64 for float64)."""
    out_dtype = accumulation_dtype(x, y)
    return jnp.einsum(subscripts, x, y.astype(x.dtype), precision=precision, preferred_element_type=out_dtype)


def split_heads(x: Float[Array, "B T H ..."], groups: int) -> Float[Array, "B G R T ..."]:
    """Heads split into groups of R = H/G that share a key, and brought before time."""
    batch, length, heads = x.shape[:3]
    x = x.reshape(batch, length, groups, heads // groups, *x.shape[3:])
    return jnp.moveaxis(x, 1, 3)


def merge_heads(x: Float[Array, "B G R T ..."]) -> Float[Array, "B T H ..."]:
    """The inverse of `split_heads`."""
    x = jnp.moveaxis(x, 3, 1)
    return x.reshape(*x.shape[:2], -1, *x.shape[4:])


def select_level(lam: Float[Array, "... T L"], level: Int[Array, "T S"]) -> Float[Array, "... T S"]:
    """lam[..., t, level[t, s]] as a chain of selects, which fuses (and differentiates) better than a gather."""
    selected = jnp.zeros((), lam.dtype)
    for index in range(lam.shape[-1]):
        selected = jnp.where(level == index, lam[..., index, None], selected)
    return jnp.broadcast_to(selected, (*lam.shape[:-1], level.shape[-1]))


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
