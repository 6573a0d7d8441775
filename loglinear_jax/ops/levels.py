"""What tokens have by group of heads and by level: λ of each pair, and the states that the last token's partition leaves."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from loglinear_jax.fenwick import fenwick_level
from loglinear_jax.ops.decays import accumulation_dtype, decay_to_end


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


def pad_to(x: Array, size: int, axis: int) -> Array:
    """x with zeros behind, up to `size` along an axis."""
    pad = [(0, 0)] * x.ndim
    pad[axis] = (0, max(size - x.shape[axis], 0))
    return jnp.pad(x, pad)


def level_of_pairs(position: Int[Array | np.ndarray, " T"]) -> Int[Array | np.ndarray, "T T"]:
    """Level of each pair (t, s) of tokens at these positions, in order; -1 where s comes later."""
    level = fenwick_level(position[:, None], position)
    place = np.arange(len(position))
    seen = place[:, None] >= place
    return np.where(seen, level, -1) if isinstance(level, np.ndarray) else jnp.where(seen, level, -1)


def select_level(lam: Float[Array, "... T L"], level: Int[Array | np.ndarray, "T S"]) -> Float[Array, "... T S"]:
    """lam[..., t, level[t, s]] as a chain of selects, which fuses (and differentiates) better than a gather."""
    selected = jnp.zeros((), lam.dtype)
    for index in range(lam.shape[-1]):
        selected = jnp.where(level == index, lam[..., index, None], selected)
    return jnp.broadcast_to(selected, (*lam.shape[:-1], level.shape[-1]))


def sum_by_level(
    x: Float[Array, "... T S"], level: Int[Array | np.ndarray, "T S"], levels: int
) -> Float[Array, "... T L"]:
    """Sums of x over the pairs of each level; those without one don't count."""
    return jnp.stack([jnp.sum(jnp.where(level == index, x, 0), axis=-1) for index in range(levels)], axis=-1)


def levels_after(
    last: int | Int[Array, ""],
    k: Float[Array, "B T G K"],
    v: Float[Array, "B T H V"],
    log_decay: Float[Array, "B T H"],
    levels: int,
    *,
    first: int | Int[Array, ""] = 0,
    begin: Int[Array, "B 1 1 T"] | None = None,
    precision: jax.lax.PrecisionLike = None,
) -> Float[Array, "B H L K V"]:
    """The states at the levels of token `last`'s partition, from the tokens at positions first, first + 1, ... alone.

    first and last may be traced; then every level takes a product over all tokens, else over its own bucket's. begin: where
    the segment of each token begins, if there are several; the last one's count alone, of which `last` is, too.
    """
    groups = k.shape[2]
    position = first + jnp.arange(v.shape[1], dtype=jnp.int32)
    seen = position <= last
    by_head = jnp.swapaxes(jnp.where(seen[:, None], log_decay, 0.0), 1, 2)
    decay = jnp.swapaxes(decay_to_end(by_head, None if begin is None else begin[:, 0]), 1, 2)
    values = jnp.where(seen[:, None], decay, 0.0)[..., None] * v

    def bucket(k, values):
        values = values.reshape(*values.shape[:2], groups, -1, values.shape[-1])
        state = dot("bsgk,bsgrv->bgrkv", k, values, precision)
        return state.reshape(v.shape[0], v.shape[2], *state.shape[3:])

    if isinstance(last, int) and isinstance(first, int) and first == 0:
        empty = jnp.zeros((v.shape[0], v.shape[2], k.shape[-1], v.shape[-1]), log_decay.dtype)
        states = [bucket(k[:, last : last + 1], values[:, last : last + 1])] + [empty] * (levels - 1)
        for height in range(last.bit_length()):
            if last >> height & 1:
                end = last >> height << height
                tokens = slice(end - (1 << height), end)
                states[height + 1] = bucket(k[:, tokens], values[:, tokens])
        return jnp.stack(states, axis=2)
    level_of = fenwick_level(last, position)
    states = jax.lax.map(
        lambda level: bucket(k, jnp.where((level_of == level)[:, None, None], values, 0.0)), jnp.arange(levels)
    )
    return jnp.moveaxis(states, 0, 2)
