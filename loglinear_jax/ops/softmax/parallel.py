"""The quadratic form: the whole sequence at once."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from loglinear_jax.ops.positions import beginnings_in_rows, segment_starts
from loglinear_jax.ops.sequence_parallel import from_piece_before
from loglinear_jax.ops.tree import into_parts
from pallas_kernels import runs_on_gpu

SMALLEST_BLOCK = 64  # tokens, of a window by blocks


def attend(q, k, v, segment_ids=None, *, window: int | None = None):
    # cuDNN's is FlashAttention; without it the scores take O(T²) memory, or O(T window) by blocks.
    fast = runs_on_gpu() and q.dtype in (jnp.bfloat16, jnp.float16) and max(q.shape[-1], v.shape[-1]) <= 128
    fast = fast and max(q.shape[-1], v.shape[-1]) % 8 == 0
    begin = None if segment_ids is None else beginnings_in_rows(segment_starts(segment_ids))
    q, k = rotate_by_position(q), rotate_by_position(k)
    if window is not None and 2 * (size := max(window, SMALLEST_BLOCK)) < q.shape[1] and not (fast and begin is None):
        return _attend_by_blocks(q, k, v, begin, window, size)
    return dot_product_attention(
        q, k, v, is_causal=True, implementation="cudnn" if fast else None,
        local_window_size=None if window is None else (window - 1, 0),
        mask=None if begin is None else begin[:, None, :, None] <= jnp.arange(q.shape[1]),
    )  # fmt: skip


def _attend_by_blocks(q, k, v, begin, window: int, size: int, before=(None, None), first: Int[Array, ""] | int = 0):
    """The queries of each block of `size` ≥ window tokens attend to the keys of theirs and of the block before.

    before: the `size` keys and values before these, of which there are `first` in the sequence. begin: from the first of these.
    """
    batch, length = q.shape[:2]
    q, k, v = (into_parts(x, 1, size) for x in (q, k, v))

    def with_those_before(x, before):
        earlier = jnp.roll(x, 1, axis=1)
        earlier = earlier if before is None else earlier.at[:, 0].set(before)
        return jnp.concatenate([earlier, x], axis=2)

    k, v = map(with_those_before, (k, v), before)
    block = jnp.arange(q.shape[1])[:, None, None] * size
    query, key = block + jnp.arange(size)[:, None], block + jnp.arange(-size, size)
    seen = ((key <= query) & (key > query - window) & (key >= -first))[None]
    if begin is not None:
        seen &= into_parts(begin, 1, size)[..., None] <= key
    seen = jnp.broadcast_to(seen, (batch, *seen.shape[1:])).reshape(-1, 1, size, 2 * size)
    out = dot_product_attention(*(x.reshape(-1, *x.shape[2:]) for x in (q, k, v)), mask=seen)
    return out.reshape(batch, -1, *out.shape[2:])[:, :length]


def attend_piece(q, k, v, segment_ids=None, *, axis_name: str, window: int | None = None):
    """The same for the queries of one piece of a sequence (see `ops.sequence_parallel`), which gathers all keys and values.
    With a window that fits into a piece it gets keys and values of the piece before alone."""
    length = q.shape[1]
    first = jax.lax.axis_index(axis_name) * length
    q, k = (rotate_by_position(x, first) for x in (q, k))
    if window is not None and window <= length:
        size = max(window, min(SMALLEST_BLOCK, length))
        last = jax.tree.map(lambda x: x[:, -size:], (k, v, segment_ids))
        *before, ids = from_piece_before(last, axis_name)
        begin = None
        if segment_ids is not None:
            begin = beginnings_in_rows(segment_starts(jnp.concatenate([ids, segment_ids], axis=1)))[:, size:] - size
        return _attend_by_blocks(q, k, v, begin, window, size, before, first)
    k, v, segment_ids = jax.lax.all_gather((k, v, segment_ids), axis_name, axis=1, tiled=True)
    query, key = first + jnp.arange(length)[:, None], jnp.arange(k.shape[1])
    seen = (key <= query)[None]
    if window is not None:
        seen &= key > query - window
    if segment_ids is not None:
        begin = beginnings_in_rows(segment_starts(segment_ids))
        seen &= jax.lax.dynamic_slice_in_dim(begin, first, length, axis=1)[:, :, None] <= key
    return dot_product_attention(q, k, v, mask=seen[:, None])


def dot_product_attention(q, k, v, **how):
    """jax.nn.dot_product_attention, of keys for groups of heads and of values of any size. q and k are rotated already."""
    value_dim, key_dim, heads = v.shape[-1], q.shape[-1], v.shape[2]
    q, k = (jnp.repeat(x, heads // x.shape[2], axis=2) for x in (q, k))
    # The library wants one size for keys and values: the smaller is padded with zeros.
    size = max(key_dim, value_dim)
    q, k, v = (jnp.pad(x, [(0, 0)] * 3 + [(0, size - x.shape[-1])]) for x in (q, k, v))
    out = jax.nn.dot_product_attention(q, k, v.astype(q.dtype), scale=key_dim**-0.5, **how)
    return out[..., :value_dim]


def rotate_by_position(
    x: Float[Array, "B T G K"], first_position: Int[Array, "*B"] | int = 0, base: float = 10000.0
) -> Float[Array, "B T G K"]:
    """Rotary position embedding (Su et al. 2021) over the two halves of K; an odd last feature stays as it is."""
    half = x.shape[-1] // 2
    frequency = jnp.asarray(base ** (-np.arange(half) / half), jnp.float32)
    angle = (jnp.asarray(first_position)[..., None] + jnp.arange(x.shape[1]))[..., None] * frequency
    cos, sin = (f(angle)[..., None, :].astype(x.dtype) for f in (jnp.cos, jnp.sin))
    first, second, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin, rest], axis=-1)
