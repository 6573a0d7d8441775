"""Sequence parallelism: inside `jax.shard_map` a sequence is cut over a mesh axis, into equal pieces of a power of two.

Piece d starts at position d · T, which begins a window of the Fenwick tree. So levels inside a piece are the piece's own, and
each set bit i of d stands for one bucket of earlier pieces, [((d >> i) - 1) << i, (d >> i) << i), at level num_levels(T) + i.
Each device computes the state that its own tokens leave, the root of its subtree. The roots and the decays over whole pieces
are gathered by one collective; its transpose, for the gradients, is one reduce-scatter.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike
from jaxtyping import Array, Bool, Float, Int, PyTree

from loglinear_jax.fenwick import fenwick_level
from loglinear_jax.ops.continuation import Past
from loglinear_jax.ops.decays import decay_to_end
from loglinear_jax.ops.levels import dot, split_heads
from loglinear_jax.ops.positions import beginnings, beginnings_in_rows, segment_starts


def check_pieces(
    axis_name: str | None, length: int, first_position: Any = 0, initial_state: Any = None, return_state: bool = False
) -> int:
    """The number of pieces of this length: 1 without an axis.

    Raises ValueError unless it is an axis of the `jax.shard_map` around the call and the length is a power of two, and for
    arguments that do not go together with an axis.
    """
    if axis_name is None:
        return 1
    pieces = num_pieces(axis_name)
    if length & (length - 1):
        raise ValueError(
            f"T is {length} tokens on each device: expected a power of two with axis_name = {axis_name!r}; pad the sequence"
        )
    if initial_state is not None:
        raise ValueError(f"initial_state is given: expected None with axis_name = {axis_name!r}")
    if not isinstance(first_position, int) or first_position:
        raise ValueError(f"first_position is {first_position!r}: expected 0 with axis_name = {axis_name!r}")
    if return_state:
        raise ValueError(f"return_state is {return_state!r}: expected False with axis_name = {axis_name!r}")
    return pieces


def num_pieces(axis_name: str) -> int:
    """The axis's size. Raises ValueError unless it is an axis of the `jax.shard_map` around the call."""
    try:
        return jax.lax.axis_size(axis_name)
    except NameError:
        raise ValueError(
            f"axis_name is {axis_name!r}: expected an axis of the mesh of jax.shard_map, inside which this is to be called"
        ) from None


def from_piece_before(x: PyTree[Array], axis_name: str) -> PyTree[Array]:
    """x of the piece before; zeros for the first piece."""
    return jax.lax.ppermute(x, axis_name, [(piece, piece + 1) for piece in range(num_pieces(axis_name) - 1)])


def starts_in_piece(segment_ids: Int[ArrayLike, "B T"] | None, axis_name: str) -> Bool[Array, "B T"] | None:
    """`positions.segment_starts` of the whole sequence, for this piece: the first token may start a segment, too."""
    if segment_ids is None:
        return None
    segment_ids = jnp.asarray(segment_ids)
    before = from_piece_before(segment_ids[:, -1:], axis_name)
    at_cut = (segment_ids[:, :1] != before) & (jax.lax.axis_index(axis_name) > 0)
    return segment_starts(segment_ids).at[:, :1].set(at_cut)


def place_of_piece(length: int, axis_name: str) -> Int[Array, ""]:
    """The position of this piece's first token, of so many in each piece."""
    return jax.lax.axis_index(axis_name) * length


def first_read_in_piece(segment_ids: Int[ArrayLike, "B T"], axis_name: str) -> Int[Array, "B T"]:
    """`positions.first_read` of the whole sequence, for this piece: a segment may have begun in any of those before."""
    starts = starts_in_piece(segment_ids, axis_name)
    assert starts is not None
    begin, place = beginnings_in_rows(starts), place_of_piece(starts.shape[1], axis_name)
    begin = jnp.where(begin < 0, 0, place + begin)
    last = jax.lax.all_gather(begin[:, -1:], axis_name)  # 0 where no segment starts in the piece
    is_before = jnp.arange(len(last), dtype=jnp.int32) < jax.lax.axis_index(axis_name)
    return jnp.maximum(begin, jnp.max(jnp.where(is_before[:, None, None], last, 0), axis=0))


def gathered(arrays: Sequence[Float[Array, "B H ..."]], axis_name: str) -> list[Float[Array, "N B H ..."]]:
    """The arrays of all pieces, by one collective, in the widest of their dtypes."""
    flat = [x.reshape(*x.shape[:2], -1) for x in arrays]
    together = jax.lax.all_gather(jnp.concatenate(flat, axis=-1), axis_name)
    parts = jnp.split(together, np.cumsum([x.shape[-1] for x in flat])[:-1], axis=-1)
    return [part.reshape(len(part), *x.shape) for part, x in zip(parts, arrays, strict=True)]


def own_state(
    k: Float[Array, "B T G K"],
    v: Float[Array, "B T H V"],
    log_decay: Float[Array, "B T H"],
    starts: Bool[Array, "B T"] | None,
    precision: jax.lax.PrecisionLike = None,
) -> Float[Array, "B H K V"]:
    """The state that these tokens leave at their end."""
    groups = k.shape[2]
    kept = decay_to_end(split_heads(log_decay, groups), beginnings(starts))
    values = (kept[..., None] * split_heads(v, groups)).astype(v.dtype)
    state = dot("bsgk,bgrsv->bgrkv", k, values, precision)
    return state.reshape(len(state), -1, *state.shape[3:])


def decay_over(log_decay: Float[Array, "B T H"], starts: Bool[Array, "B T"] | None) -> Float[Array, "B H"]:
    """The log decay over all of these tokens: -inf where a segment starts, as nothing of earlier ones is left after it."""
    total = jnp.sum(log_decay, axis=1)
    return total if starts is None else jnp.where(starts.any(axis=1, keepdims=True), -jnp.inf, total)


def left_of_pieces(
    root: Float[Array, "B H K V"], over_piece: Float[Array, "B H"], axis_name: str
) -> Float[Array, "N B H K V"]:
    """What is left of the state of each piece, from its own tokens, when this piece starts; 0 for those not before it.

    root: `own_state` of this piece. over_piece: `decay_over` it.
    """
    roots, over_piece = gathered((root, over_piece), axis_name)
    this, piece = jax.lax.axis_index(axis_name), np.arange(len(roots), dtype=np.int32)
    is_before = (piece < this)[:, None, None]
    between = ((piece[:, None] < piece) & (piece < this))[:, :, None, None]
    # Sums, not differences of sums: so exp is of what is ≤ 0, and nothing cancels.
    since = jnp.exp(jnp.sum(jnp.where(between, over_piece, 0), axis=1))
    weight = jnp.where(is_before, since, 0)[..., None, None]
    return weight * jnp.where(is_before[..., None, None], roots, 0)  # 0 · NaN of a later piece is NaN


def past_of_piece(left: Float[Array, "N B H K V"], axis_name: str) -> Past:
    """What `left_of_pieces` gives, as one state for each bucket of earlier pieces."""
    in_bucket = buckets_of_pieces(axis_name).T[:, :, None, None, None, None]
    states = [jnp.sum(jnp.where(inside, left, 0), axis=0) for inside in in_bucket]
    return Past(jnp.stack(states, axis=2), jax.lax.axis_index(axis_name))


@dataclasses.dataclass(frozen=True)
class Exchange:
    """That of `pallas_kernels.fenwick_attention`, over a mesh axis: what a piece finds of those before it."""

    axis_name: str

    @property
    def upper(self) -> int:
        return int(num_pieces(self.axis_name) - 1).bit_length()

    def __call__(self, root: Float[Array, "B H K V"], over_piece: Float[Array, "B H"]) -> Past:
        return past_of_piece(left_of_pieces(root, over_piece, self.axis_name), self.axis_name)


def buckets_of_pieces(axis_name: str) -> Bool[Array, "N U"]:
    """Whether each piece is in each of the buckets of earlier pieces that this one can have; later ones may be in any."""
    pieces = num_pieces(axis_name)
    level = fenwick_level(jax.lax.axis_index(axis_name), jnp.arange(pieces, dtype=jnp.int32))
    return level[:, None] == 1 + np.arange(int(pieces - 1).bit_length(), dtype=np.int32)
