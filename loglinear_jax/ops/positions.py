"""Positions of tokens, and packed documents: several segments in one sequence, of which none reads another.

A position, one for all rows of a batch or [B], may be traced, and then can't be refused: tokens that have no place in a state
get NaN, and their state never gets a valid position again.

Every token knows where its segment begins, counted from the first token of a run (a chunk, or the sequence): at a negative
place if it begins before the run, as the first segment of a sequence does, to which an initial state belongs. Whether a token
reads another one, a node of the tree or an initial state is then a comparison of places, which masks factors. No decay stands
for a boundary, so those inside of a segment keep their precision.
"""

from __future__ import annotations

from typing import Any, overload

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from loglinear_jax.ops.decays import MIN_LOG_DECAY
from loglinear_jax.ops.levels import pad_to

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


@overload
def segment_starts(segment_ids: None) -> None: ...


@overload
def segment_starts(segment_ids: Int[Array | np.ndarray, "B T"]) -> Bool[Array, "B T"]: ...


def segment_starts(segment_ids: Int[Array | np.ndarray, "B T"] | None) -> Bool[Array, "B T"] | None:
    """Whether each token starts a segment after the first: whether its id differs from that of the token before."""
    if segment_ids is None:
        return None
    segment_ids = jnp.asarray(in_32_bits(segment_ids))
    first = jnp.zeros_like(segment_ids[:, :1], bool)
    return jnp.concatenate([first, segment_ids[:, 1:] != segment_ids[:, :-1]], axis=1)


def in_32_bits(segment_ids: Any) -> Any:
    """NumPy's ids of more bits, of which JAX may drop the upper half, as numbers of segments; others as they are."""
    if not isinstance(segment_ids, np.ndarray) or segment_ids.itemsize <= 4:
        return segment_ids
    return np.cumsum(np.diff(segment_ids, axis=1, prepend=segment_ids[:, :1]) != 0, axis=1, dtype=np.int32)


def beginnings(starts: Bool[Array, "B T"] | None) -> Int[Array, "B 1 1 T"] | None:
    """Where each token's segment begins, in a run that is the whole sequence, for arrays [B, G, R, T]; None for one segment."""
    return None if starts is None else beginnings_in_rows(starts)[:, None, None]


def beginnings_in_rows(starts: Bool[Array, "B T"]) -> Int[Array, "B T"]:
    """The same without axes of heads."""
    place = jnp.arange(starts.shape[1], dtype=jnp.int32)
    return jax.lax.cummax(jnp.where(starts, place, -1), axis=1)


def first_read(
    segment_ids: Int[Array | np.ndarray, "B T"], position: Int[Array, "*P"], first: Int[Array, "*F"]
) -> Int[Array, "B T"]:
    """The position of the first token that each of the tokens at position, position + 1, ... reads: where its segment begins;
    `first` for those of the first segment."""
    begin = beginnings_in_rows(segment_starts(segment_ids))
    return jnp.where(begin < 0, first.reshape(-1, 1), position.reshape(-1, 1) + begin)


def beginnings_in_chunks(starts: Bool[Array, "B T"] | None, chunk_size: int) -> Int[Array, "B 1 1 N C"] | None:
    """The same in runs that are chunks, the last of them filled up with more of the last segment."""
    if starts is None:
        return None
    num_chunks = -(-starts.shape[1] // chunk_size)
    begin = beginnings_in_rows(pad_to(starts, num_chunks * chunk_size, axis=1))
    chunk = np.arange(num_chunks, dtype=np.int32)[:, None]
    return begin.reshape(len(starts), 1, 1, num_chunks, chunk_size) - chunk * chunk_size


def forgetting(log_decay: Float[Array, "B T H"], starts: Bool[Array, "B T"] | None) -> Float[Array, "B T H"]:
    """log_decay for kernels, whose decays stand for boundaries: a token that starts a segment forgets all before it."""
    return log_decay if starts is None else jnp.where(starts[..., None], MIN_LOG_DECAY, log_decay)


def reads_left_sibling(begin: Int[Array, "B 1 1 N C"], height: int) -> Bool[Array, "B 1 1 N C"]:
    """Whether each token's segment begins before its chunk's node at this height, so that it reads what is left of that."""
    num_chunks, chunk_size = begin.shape[3:]
    before_chunk = np.arange(num_chunks, dtype=np.int32) % (1 << height) * chunk_size  # tokens of the node
    return begin + before_chunk[:, None] < 0
