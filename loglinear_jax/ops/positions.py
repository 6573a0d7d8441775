"""Positions of tokens in states that are traced: how they count, and where they end. One for all rows of a batch, or [B].

A traced position can't be refused, so tokens that have no place in a state get NaN, and their state never gets a valid position
again.
"""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

# The largest int32. Counting stops here, so no token has this position.
END = 2**31 - 1


def as_position(position, most: int = END) -> Int[Array, "*B"]:
    """A state's number of tokens as int32. It becomes -1, which no token has, unless it is from 0 to `most`."""
    position = jnp.asarray(position)
    valid = position >= 0
    if most < jnp.iinfo(position.dtype).max:
        valid &= position <= most
    return jnp.where(valid, position.astype(jnp.int32), -1)


def as_int32(position) -> Int[Array, "*B"]:
    """`as_position`, but an int32 passes unchanged, so that XLA runs no kernel for it. Negative ones need no check here:
    `have_room` and `advanced` refuse them."""
    position = jnp.asarray(position)
    return position if position.dtype == jnp.int32 else as_position(position)


def advanced(position, tokens: int) -> Int[Array, "*B"]:
    """The position after so many more tokens, an int32; END if there are not so many, or the position is none."""
    position = jnp.asarray(position, jnp.int32)
    return jnp.where((position < 0) | (position > END - tokens), END, position + tokens)


def have_room(position, tokens: int, room: int) -> Bool[Array, "*B T"]:
    """Whether each of the tokens at position, position + 1, ... is among the first `room` (and at a position below END)."""
    position = jnp.asarray(position)[..., None]
    left = min(room, END) - jnp.maximum(position, 0)
    return (position >= 0) & (jnp.arange(tokens, dtype=jnp.int32) < left)
