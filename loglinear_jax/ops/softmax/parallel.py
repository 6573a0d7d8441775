"""The quadratic form: the whole sequence, by cuDNN or some queries at a time."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from loglinear_jax.ops.decays import accumulation_dtype
from loglinear_jax.ops.levels import dot
from loglinear_jax.ops.positions import beginnings_in_rows, segment_starts
from loglinear_jax.ops.sequence_parallel import from_piece_before
from loglinear_jax.ops.tree import into_parts
from pallas_kernels import runs_on_gpu

SMALLEST_BLOCK = 64  # tokens, of a window by blocks
QUERIES_AT_ONCE = 256  # whose scores exist at a time
MOST_OF_MASK = 2**28  # elements, of which cuDNN makes a bias in 16 bits
# Products of the backward pass are then in the dtype of those of the forward pass, too.
PRODUCTS = {
    "bfloat16": jax.lax.DotAlgorithmPreset.BF16_BF16_F32,
    "float16": jax.lax.DotAlgorithmPreset.F16_F16_F32,
}


def attend(q, k, v, segment_ids=None, *, window: int | None = None):
    # cuDNN's FlashAttention takes documents as a mask [B, 1, T, T] alone: jax.nn does not expose its packed layout, which needs
    # a static bound M on their number and keeps statistics [B M, H, T].
    (batch, length), largest = q.shape[:2], max(q.shape[-1], v.shape[-1])
    q, k = rotate_by_position(q), rotate_by_position(k)
    has_cudnn = runs_on_gpu() and q.dtype in (jnp.bfloat16, jnp.float16) and largest <= 128 and largest % 8 == 0
    if has_cudnn and segment_ids is None:
        return _attend_by_cudnn(q, k, v, window)
    place = jnp.arange(length, dtype=jnp.int32)[None]
    begin = jnp.zeros_like(place)
    if segment_ids is not None:  # -1 in the first segment, which by blocks is a key of the last block
        begin = jnp.maximum(begin, beginnings_in_rows(segment_starts(segment_ids)))
    if has_cudnn and window is None and batch * length**2 <= MOST_OF_MASK:
        return _attend_by_cudnn(q, k, v, mask=begin[:, None, :, None] <= place)
    if window is None:
        return attend_to(q, k, v, begin, place)
    begin = jnp.maximum(begin, place - window + 1)
    size = max(window, SMALLEST_BLOCK)
    return _attend_by_blocks(q, k, v, begin, size) if 2 * size < length else attend_to(q, k, v, begin, place)


def attend_piece(q, k, v, segment_ids=None, *, axis_name: str, window: int | None = None):
    """The same for the queries of one piece of a sequence (see `ops.sequence_parallel`), which gathers all keys and values.
    With a window that fits into a piece it gets keys and values of the piece before alone."""
    length = q.shape[1]
    first = jax.lax.axis_index(axis_name) * length
    q, k = (rotate_by_position(x, first) for x in (q, k))
    place = jnp.arange(length, dtype=jnp.int32)[None]
    if window is not None and window <= length:
        size = max(window, min(SMALLEST_BLOCK, length))
        last = jax.tree.map(lambda x: x[:, -size:], (k, v, segment_ids))
        *before, ids = from_piece_before(last, axis_name)
        begin = jnp.maximum(place - window + 1, -first)
        if segment_ids is not None:
            starts = segment_starts(jnp.concatenate([ids, segment_ids], axis=1))
            begin = jnp.maximum(begin, beginnings_in_rows(starts)[:, size:] - size)
        return _attend_by_blocks(q, k, v, begin, size, before)
    k, v, segment_ids = jax.lax.all_gather((k, v, segment_ids), axis_name, axis=1, tiled=True)
    place = first + place
    begin = jnp.zeros_like(place) if window is None else place - window + 1
    if segment_ids is not None:
        of_all = beginnings_in_rows(segment_starts(segment_ids))
        begin = jnp.maximum(begin, jax.lax.dynamic_slice_in_dim(of_all, first, length, axis=1))
    return attend_to(q, k, v, begin, place)


def attend_to(
    q: Float[Array, "B T G K"],
    k: Float[Array, "B S G K"],
    v: Float[Array, "B S H V"],
    begin: Int[Array, "#B T"],
    end: Int[Array, "#B T"],
) -> Float[Array, "B T H V"]:
    """Softmax attention of each query to the keys from its `begin` to its `end`, itself included. All are rotated already.

    Scores are those of QUERIES_AT_ONCE queries at a time, and are not kept for the backward pass: their memory is O(S).
    """
    batch, length = q.shape[:2]
    if length <= QUERIES_AT_ONCE:
        return _attend_at_once(q, k, v, begin, end)
    parts = [jnp.moveaxis(into_parts(x, 1, QUERIES_AT_ONCE), 1, 0) for x in (q, begin, end)]
    out = jax.lax.map(jax.checkpoint(lambda part: _attend_at_once(part[0], k, v, *part[1:])), parts)
    out = jnp.moveaxis(out, 0, 1)
    return out.reshape(batch, -1, *out.shape[3:])[:, :length]


def _attend_by_blocks(q, k, v, begin, size: int, before=(None, None)):
    """The queries of each block of `size` tokens attend to the keys of theirs and of the block before, from `begin` on.

    begin: [B, T] or [1, T], a place among these tokens, at most `size` before the query. before: the `size` keys and values
    before these; then a `begin` may be negative.
    """
    batch, length = q.shape[:2]
    q, k, v, begin = (into_parts(x, 1, size) for x in (q, k, v, begin))

    def with_those_before(x, before):
        earlier = jnp.roll(x, 1, axis=1)
        earlier = earlier if before is None else earlier.at[:, 0].set(before)
        return jnp.concatenate([earlier, x], axis=2)

    k, v = map(with_those_before, (k, v), before)
    blocks = jnp.arange(q.shape[1], dtype=jnp.int32)[:, None]
    begin = jnp.broadcast_to(begin - (blocks - 1) * size, q.shape[:3])
    q, k, v, begin = (x.reshape(-1, *x.shape[2:]) for x in (q, k, v, begin))
    out = _attend_at_once(q, k, v, begin, size + jnp.arange(size, dtype=jnp.int32)[None])
    return out.reshape(batch, -1, *out.shape[2:])[:, :length]


def _attend_at_once(q, k, v, begin, end):
    """`attend_to` with all scores at the same time."""
    batch, length, groups, key_dim = q.shape
    key = jnp.arange(k.shape[1], dtype=jnp.int32)
    seen = (begin[..., None] <= key) & (key <= end[..., None])
    precision = PRODUCTS.get(q.dtype.name)
    scores = dot("btgk,bsgk->bgts", q, k, precision) * key_dim**-0.5
    # What is not seen is finite: tokens that fill up the last part may see nothing.
    weights = jax.nn.softmax(jnp.where(seen[:, None], scores, jnp.finfo(scores.dtype).min / 2), axis=-1).astype(q.dtype)
    v = v.reshape(*v.shape[:2], groups, -1, v.shape[-1])
    out = dot("bgts,bsgrv->btgrv", weights, v, precision).astype(q.dtype)
    return out.reshape(batch, length, -1, v.shape[-1])


def _attend_by_cudnn(q, k, v, window: int | None = None, mask=None):
    """jax.nn.dot_product_attention, of keys for groups of heads and of values of any size."""
    value_dim, key_dim, heads = v.shape[-1], q.shape[-1], v.shape[2]
    q, k = (jnp.repeat(x, heads // x.shape[2], axis=2) for x in (q, k))
    # The library wants one size for keys and values: the smaller is padded with zeros.
    size = max(key_dim, value_dim)
    q, k, v = (jnp.pad(x, [(0, 0)] * 3 + [(0, size - x.shape[-1])]) for x in (q, k, v))
    out = jax.nn.dot_product_attention(
        q, k, v.astype(q.dtype), scale=key_dim**-0.5, is_causal=True, implementation="cudnn", mask=mask,
        local_window_size=None if window is None else (window - 1, 0),
    )  # fmt: skip
    return out[..., :value_dim]


def rotate_by_position(
    x: Float[Array, "B T G K"], first_position: Int[Array, "*B"] | int = 0, base: float = 10000.0
) -> Float[Array, "B T G K"]:
    """Rotary position embedding (Su et al. 2021) over the two halves of K; an odd last feature stays as it is."""
    half = x.shape[-1] // 2
    frequency = jnp.asarray(base ** (-np.arange(half) / half), accumulation_dtype(x))
    angle = (jnp.asarray(first_position)[..., None] + jnp.arange(x.shape[1]))[..., None] * frequency
    cos, sin = (f(angle)[..., None, :].astype(x.dtype) for f in (jnp.cos, jnp.sin))
    first, second, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin, rest], axis=-1)
