"""The forms of causal softmax attention with rotary positions: all at once, and token by token over a cache of every key and
value, which is what decoding does."""

from __future__ import annotations

import functools

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from loglinear_jax.ops.positions import (
    advanced,
    as_position,
    beginnings,
    beginnings_in_rows,
    first_read,
    have_room,
    segment_starts,
)
from loglinear_jax.ops.sharding import varying_as
from pallas_kernels import runs_on_gpu


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


def parallel(q, k, v, segment_ids=None, *, window: int | None = None):
    # cuDNN's is FlashAttention; without it the scores take O(T²) memory.
    fast = runs_on_gpu() and q.dtype in (jnp.bfloat16, jnp.float16) and max(q.shape[-1], v.shape[-1]) <= 128
    fast = fast and max(q.shape[-1], v.shape[-1]) % 8 == 0
    begin = beginnings(segment_starts(segment_ids))
    return dot_product_attention(
        rotate_by_position(q), rotate_by_position(k), v, is_causal=True, implementation="cudnn" if fast else None,
        local_window_size=None if window is None else (window - 1, 0),
        mask=None if begin is None else begin[:, 0, :, :, None] <= jnp.arange(q.shape[1]),
    )  # fmt: skip


def parallel_in_piece(q, k, v, segment_ids=None, *, axis_name: str, window: int | None = None):
    """The same for the queries of one piece of a sequence (see `ops.sequence_parallel`), which gathers all keys and values."""
    length = q.shape[1]
    first = jax.lax.axis_index(axis_name) * length
    q, k = (rotate_by_position(x, first) for x in (q, k))
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


@flax.struct.dataclass
class KeyValueCache:
    """What softmax attention remembers: every key (already rotated) and value, with room for max_length tokens, or those of the
    last `window` tokens, the newest at the end.

    position: of the next token, a scalar or [B]. first: where its segment begins, the first position that it reads.
    """

    keys: Float[Array, "B S G K"]
    values: Float[Array, "B S H V"]
    position: Int[Array, "*B"]
    first: Int[Array, " B"]


def key_value_cache(
    k: Float[Array, "B T G K"],
    v: Float[Array, "B T H V"],
    max_length: int,
    window: int | None = None,
    segment_ids: Int[Array, "B T"] | None = None,
) -> KeyValueCache:
    """The cache after these first tokens, with room for max_length, or for `window` if that is no more.

    Raises ValueError if there are more than max_length.
    """
    if k.shape[1] > max_length:
        raise ValueError(
            f"k has shape {k.shape} with T = {k.shape[1]} tokens: expected at most max_length = {max_length}"
        )
    keys, position, first = rotate_by_position(k), jnp.asarray(k.shape[1], jnp.int32), jnp.zeros(len(k), jnp.int32)
    if segment_ids is not None:
        first = first_read(segment_ids, jnp.zeros_like(position), first)[:, -1]
    if window is not None and window <= max_length:
        of_window = [(0, 0), (max(window - k.shape[1], 0), 0), (0, 0), (0, 0)]
        keys, v = (jnp.pad(x[:, -window:], of_window) for x in (keys, v))
        return KeyValueCache(keys, v, position, first)
    room = [(0, 0), (0, max_length - k.shape[1]), (0, 0), (0, 0)]
    return KeyValueCache(jnp.pad(keys, room), jnp.pad(v, room), position, first)


def attend_to_cache(
    cache: KeyValueCache,
    q: Float[Array, "B T G K"],
    k: Float[Array, "B T G K"],
    v: Float[Array, "B T H V"],
    window: int | None = None,
    segment_ids: Int[Array, "B T"] | None = None,
) -> tuple[Float[Array, "B T H V"], KeyValueCache]:
    """`softmax_attention` of the next tokens to all before and themselves; and the cache with them, of the last segment.

    Where the cache has no room for all of them (or a negative position), the outputs are NaN, and so are all after them. A
    cache of the last `window` tokens always has room.
    """
    room, length = cache.keys.shape[1], q.shape[1]
    has_window = room == window
    if length > room and not has_window:
        raise ValueError(f"q has shape {q.shape} with T = {length} tokens: expected at most the cache's room, {room}")
    position = as_position(cache.position) if has_window else as_position(cache.position, room)
    q, k = (rotate_by_position(x, position) for x in (q, k))
    new = k.astype(cache.keys.dtype), v.astype(cache.values.dtype)
    if has_window:
        keys, values = (jnp.concatenate(both, axis=1) for both in zip((cache.keys, cache.values), new, strict=True))
        known = position >= 0
    else:
        keys, values = (_put(*both, position) for both in zip((cache.keys, cache.values), new, strict=True))
        known = have_room(position, length, room).all(axis=-1)
    of_row = position.reshape(-1, 1)
    query = (of_row + jnp.arange(length))[:, :, None]
    key = ((of_row - room if has_window else 0) + jnp.arange(keys.shape[1])[None])[:, None]
    first = cache.first[:, None] if segment_ids is None else first_read(segment_ids, position, cache.first)
    seen = (key <= query) & (key >= first[:, :, None])
    if has_window:
        seen &= key > query - room
        keys_kept, values_kept = keys[:, length:], values[:, length:]
    else:
        keys_kept, values_kept = keys, values
    out = dot_product_attention(q, keys, values, mask=seen[:, None])
    out = jnp.where(known.reshape(-1, 1, 1, 1), out, jnp.nan)
    return out, KeyValueCache(keys_kept, values_kept, advanced(position, length), first[:, -1])


def _put(
    all_: Float[Array, "B S ..."], new: Float[Array, "B T ..."], position: Int[Array, "*B"]
) -> Float[Array, "B S ..."]:
    """The new ones at their positions among all."""
    if position.ndim == 0:
        return jax.lax.dynamic_update_slice_in_dim(all_, new, position, axis=1)
    return jax.vmap(functools.partial(jax.lax.dynamic_update_slice_in_dim, axis=0))(all_, new, position)


def recurrent(q, k, v, segment_ids=None, *, window: int | None = None):
    """`attend_to_cache` of every token by `lax.scan`. Shapes as in `softmax_attention`."""

    def step(cache, token):
        *token, start = token
        if start is not None:
            cache = cache.replace(first=jnp.where(start, cache.position, cache.first))
        out, cache = attend_to_cache(cache, *(x[:, None] for x in token), window)
        return cache, out[:, 0]

    empty = varying_as(q, key_value_cache(k[:, :0], v[:, :0], k.shape[1], window))
    by_time = jax.tree.map(lambda x: jnp.moveaxis(x, 1, 0), (q, k, v, segment_starts(segment_ids)))
    _, out = jax.lax.scan(step, empty, by_time)
    return jnp.moveaxis(out, 0, 1)
