"""Fenwick-tree arithmetic over positions, and the state that lives on the tree.

Which level a pair of tokens meets at, which buckets a new token merges, which levels a token's past fills and which
left-sibling states a chunk reads is told here.

The partition (Guo et al., "Log-Linear Attention"): the past [0, t] of token t is split into the token itself (level 0)
and, for each set bit i of t, one bucket of 2**i tokens (level i + 1). Positions count from 0.
"""

from __future__ import annotations

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from loglinear_jax.settings import is_of


def num_levels(length: int) -> int:
    """Number of levels that `length` tokens need: ceil(log2 length) + 1.

    Raises:
      ValueError: if `length` is not a positive integer.

    Examples:
      >>> from loglinear_jax import num_levels
      >>> num_levels(128), num_levels(1_000_000)
      (8, 21)
    """
    _check_positive("length", length)
    return int(length - 1).bit_length() + 1


def _check_positive(name: str, value) -> None:
    if not is_of(value, int) or value < 1:
        raise ValueError(f"{name} must be an integer ≥ 1, got {value!r}")


def _check_positions(name: str, x) -> None:
    dtype = x.dtype if isinstance(x, jax.Array) else np.asarray(x).dtype
    if not jnp.issubdtype(dtype, jnp.integer):
        raise ValueError(f"{name} has dtype {dtype}: expected integers")
    if not isinstance(x, jax.Array) and np.min(x, initial=0) < 0:
        raise ValueError(f"{name} has {np.min(x)}: expected positions, at least 0")


def capacity(levels: int) -> int:
    """The most positions for which so many levels are enough: 2^(levels - 1)."""
    return 1 << (levels - 1)


def occupied_levels(position, num_levels: int, first=0):
    """Which levels have a bucket at a position: level 0 always, level ℓ ≥ 1 where bit ℓ - 1 of the position is set.

    Args:
      position: integers of any shape [...], at least 0.
      num_levels: number of levels.
      first: position of the first token that exists, integers that broadcast; buckets entirely before it are empty.

    Returns:
      bool [..., num_levels]; NumPy for NumPy.

    Raises:
      ValueError: for positions that are not integers, or known to be negative, and a num_levels below 1.

    Examples:
      >>> from loglinear_jax import occupied_levels
      >>> print(occupied_levels(5, 4))  # 5 is 101 in binary
      [ True  True False  True]
    """
    _check_positive("num_levels", num_levels)
    _check_positions("position", position)
    _check_positions("first", first)
    xp = jnp if any(isinstance(x, jax.Array) for x in (position, first)) else np
    position, first = (xp.asarray(x)[..., None] for x in (position, first))
    # A shift by as many bits as the type has is not defined.
    bit, bits = np.arange(num_levels - 1).reshape(*[1] * (position.ndim - 1), -1), xp.iinfo(position.dtype).bits
    shift = np.minimum(bit, bits - 1).astype(position.dtype)
    to_end = position >> shift
    is_set = (to_end & 1 == 1) & (bit < bits) & (to_end << shift > first)
    return xp.concatenate([xp.ones_like(is_set, bool, shape=(*is_set.shape[:-1], 1)), is_set], axis=-1)


def bit_length(x):
    """Number of bits of each non-negative integer in `x` (0 for 0); int32, vectorised. Plain NumPy in, NumPy out."""
    if isinstance(x, (int, np.integer, np.ndarray)):
        x = np.asarray(x).astype(np.int64)
        # frexp is exact for every integer below 2**53, so for each half: x = m * 2**e with 0.5 <= m < 1.
        high, low = (np.frexp(half.astype(np.float64))[1].astype(np.int32) for half in (x >> 32, x & 0xFFFFFFFF))
        return np.where(high > 0, high + 32, low)[()]
    x = jnp.asarray(x)
    return jnp.iinfo(x.dtype).bits - jax.lax.clz(x).astype(jnp.int32)


def fenwick_level(t, s):
    """Level at which token t reads token s: bit_length(t XOR s).

    Args:
      t, s: integers or integer arrays that broadcast, t ≥ s ≥ 0.

    Returns:
      int32 array of the broadcast shape: 0 where t == s, else one plus the index of the highest bit in which they differ.

    Raises:
      ValueError: for arrays that are not of integers, or known to be negative.

    Examples:
      >>> from loglinear_jax import fenwick_level
      >>> [int(fenwick_level(6, s)) for s in range(7)]
      [3, 3, 3, 3, 2, 2, 0]
    """
    for name, x in (("t", t), ("s", s)):
        _check_positions(name, x)
    if any(isinstance(x, jax.Array) for x in (t, s)):
        return bit_length(jnp.bitwise_xor(*(jnp.asarray(x) for x in (t, s))))
    return bit_length(np.bitwise_xor(t, s))


def merged_level(t, num_levels: int):
    """The level into which token t's partition merges all lower ones; num_levels before token 0, where there are none.

    Token t = ...1000 (binary, z trailing zeros) merges levels 0 .. z into level z + 1, like the increment of a binary counter.
    """
    return jnp.where(t == 0, num_levels, fenwick_level(t, t - 1))


def bucket_level_after(level, last_position, t):
    """Level at which token t finds a bucket that stood at `level` after token `last_position` < t.

    Counting from last_position to t carries every bucket up to fenwick_level(t, last_position) into that level and
    leaves the higher ones where they are.
    """
    return jnp.maximum(level, fenwick_level(t, last_position))


# --- The tree over chunks -------------------------------------------------------------------------------------------


def tree_heights(num_chunks: int) -> int:
    """Heights at which some chunk reads a left sibling's state: bit_length(num_chunks - 1)."""
    return int(num_chunks - 1).bit_length()


def left_sibling(chunk, height: int):
    """(whether the chunk's bit `height` is set, the node at that height left of the chunk's own): the state it reads.

    The node covers chunks [((chunk >> height) - 1) << height, (chunk >> height) << height); 0 where the bit is not set.
    """
    is_right = (chunk >> height) & 1
    return is_right, ((chunk >> height) - 1) * is_right


def has_left_sibling(chunk, height):
    """Whether the chunk reads a node at that height: whether its bit `height` is set."""
    return (chunk >> height) & 1 == 1


def highest_bit(x):
    """Index of the highest bit of each int32 above 0."""
    return 31 - jax.lax.clz(x)


def node_height(end):
    """Height of the node that ends before chunk `end` and that later chunks read: the number of trailing zeros of end > 0."""
    return highest_bit(end & -end)


def next_end(end):
    """Where the next node ends that a chunk reads: chunk c reads those that end at c, at next_end(c), and so on until 0."""
    return end & (end - 1)


def right_siblings(num_chunks: int, height: int) -> tuple[int, int]:
    """How the right siblings at `height` lie among `num_chunks` chunks: (full pairs, chunks of a partial one).

    The first 2 * pairs * 2**height chunks are `pairs` (left, right) blocks of equal size; behind them follow one more
    complete left block and `partial` chunks of its right sibling, if partial > 0.
    """
    block = 1 << height
    pairs = num_chunks // (2 * block)
    partial = max(num_chunks - (2 * pairs + 1) * block, 0)
    return pairs, partial


# --- The recurrent state --------------------------------------------------------------------------------------------


class FenwickState(flax.struct.PyTreeNode):
    """State of log-linear attention between tokens: one K × V matrix for each level, and the position.

    Attributes:
      levels: [B, H, L, K, V], float32 unless made in another dtype: the state of the bucket that the last token has at
        each level, decayed up to that token; zero where it has no bucket.
      position: int32, the number of tokens seen, which is also the next token's position: a scalar, or [B] if the rows
        of a batch are at different positions. It stops at 2^31 - 1, where outputs are NaN.
    """

    levels: Float[Array, "B H L K V"]
    position: Int[Array, "*B"]


def init_fenwick_state(
    batch: int, heads: int, key_dim: int, value_dim: int, max_length: int, dtype=jnp.float32
) -> FenwickState:
    """Empty state, before the first of up to `max_length` tokens.

    Returns:
      FenwickState with levels [batch, heads, num_levels(max_length), key_dim, value_dim], at position 0.

    Raises:
      ValueError: for a size below 1, or a dtype that is not a floating dtype of 16 bits or more.

    Examples:
      >>> from loglinear_jax import init_fenwick_state
      >>> init_fenwick_state(batch=2, heads=4, key_dim=16, value_dim=32, max_length=100).levels.shape
      (2, 4, 8, 16, 32)
    """
    sizes = dict(batch=batch, heads=heads, key_dim=key_dim, value_dim=value_dim, max_length=max_length)
    for name, size in sizes.items():
        _check_positive(name, size)
    try:
        dtype = jnp.dtype(dtype)
    except TypeError as error:
        raise ValueError(f"dtype is {dtype!r}: expected a floating dtype, of 16 bits or more") from error
    if not jnp.issubdtype(dtype, jnp.floating) or dtype.itemsize < 2:
        raise ValueError(f"dtype is {dtype.name}: expected a floating dtype, of 16 bits or more")
    levels = jnp.zeros((batch, heads, num_levels(max_length), key_dim, value_dim), dtype)
    return FenwickState(levels=levels, position=jnp.zeros((), jnp.int32))


def merge_for_token(levels: Float[Array, "B H L K V"], t) -> Float[Array, "B H L K V"]:
    """The carry chain: add every bucket that token t's partition merges into the level it moves to, `merged_level`.

    t: of all rows, or [B]. Before token 0 nothing exists, so everything is cleared.
    """
    t = jnp.asarray(t, jnp.int32)
    t = t.reshape(*t.shape, *[1] * (4 if t.ndim else 0))
    level = jnp.arange(levels.shape[2], dtype=jnp.int32)[:, None, None]
    into = merged_level(t, levels.shape[2])
    merges = level < into
    merged = jnp.sum(jnp.where(merges, levels, 0), axis=2, keepdims=True)
    return jnp.where(merges, 0, levels) + jnp.where(level == into, merged, 0)
