"""Softmax attention one token at a time, over a cache of every key and value: what decoding does."""

from __future__ import annotations

import flax.struct
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from loglinear_jax.ops.positions import advanced, as_position, have_room
from loglinear_jax.ops.softmax.parallel import dot_product_attention
from loglinear_jax.ops.softmax.rotary import rotate_by_position


@flax.struct.dataclass
class KeyValueCache:
    """What softmax attention remembers: every key (already rotated) and value, with room for max_length tokens, or those of the
    last `window` tokens, the newest at the end."""

    keys: Float[Array, "B S G K"]
    values: Float[Array, "B S H V"]
    position: Int[Array, ""]


def key_value_cache(
    k: Float[Array, "B T G K"], v: Float[Array, "B T H V"], max_length: int, window: int | None = None
) -> KeyValueCache:
    """The cache after these first tokens, with room for max_length, or for `window` if that is no more.

    Raises ValueError if there are more than max_length.
    """
    if k.shape[1] > max_length:
        raise ValueError(
            f"k has shape {k.shape} with T = {k.shape[1]} tokens: expected at most max_length = {max_length}"
        )
    keys, position = rotate_by_position(k), jnp.asarray(k.shape[1], jnp.int32)
    if window is not None and window <= max_length:
        of_window = [(0, 0), (max(window - k.shape[1], 0), 0), (0, 0), (0, 0)]
        keys, v = (jnp.pad(x[:, -window:], of_window) for x in (keys, v))
        return KeyValueCache(keys, v, position)
    room = [(0, 0), (0, max_length - k.shape[1]), (0, 0), (0, 0)]
    return KeyValueCache(jnp.pad(keys, room), jnp.pad(v, room), position)


def attend_to_cache(
    cache: KeyValueCache,
    q: Float[Array, "B T G K"],
    k: Float[Array, "B T G K"],
    v: Float[Array, "B T H V"],
    window: int | None = None,
) -> tuple[Float[Array, "B T H V"], KeyValueCache]:
    """`softmax_attention` of the next tokens to all before and themselves; and the cache with them.

    Where the cache has no room for all of them (or a negative position), the outputs are NaN, and so are all after them. A
    cache of the last `window` tokens always has room.
    """
    room, length = cache.keys.shape[1], q.shape[1]
    if room == window:
        return _attend_to_window(cache, q, k, v)
    if length > room:
        raise ValueError(f"q has shape {q.shape} with T = {length} tokens: expected at most the cache's room, {room}")
    position = as_position(cache.position, room)
    q, k = (rotate_by_position(x, position) for x in (q, k))
    keys, values = (
        jax.lax.dynamic_update_slice_in_dim(all_, new.astype(all_.dtype), position, axis=1)
        for all_, new in ((cache.keys, k), (cache.values, v))
    )
    seen = jnp.arange(room) <= position + jnp.arange(length)[:, None]
    out = dot_product_attention(q, keys, values, mask=seen[None, None])
    out = jnp.where(have_room(position, length, room).all(), out, jnp.nan)
    return out, KeyValueCache(keys, values, advanced(position, length))


def _attend_to_window(cache: KeyValueCache, q, k, v) -> tuple[Float[Array, "B T H V"], KeyValueCache]:
    window, length = cache.keys.shape[1], q.shape[1]
    position = as_position(cache.position)
    q, k = (rotate_by_position(x, position) for x in (q, k))
    keys, values = (
        jnp.concatenate([all_, new.astype(all_.dtype)], axis=1) for all_, new in ((cache.keys, k), (cache.values, v))
    )
    # Counted from the first key of the window, which holds nothing before token 0.
    key_index, query_index = jnp.arange(window + length), window + jnp.arange(length)[:, None]
    seen = (key_index <= query_index) & (key_index > query_index - window) & (key_index >= window - position)
    out = dot_product_attention(q, keys, values, mask=seen[None, None])
    out = jnp.where(position >= 0, out, jnp.nan)
    return out, KeyValueCache(keys[:, length:], values[:, length:], advanced(position, length))


def recurrent(q, k, v, window: int | None = None):
    """`attend_to_cache` of every token by `lax.scan`. Shapes as in `softmax_attention`."""

    def step(cache, token):
        out, cache = attend_to_cache(cache, *(x[:, None] for x in token), window)
        return cache, out[:, 0]

    empty = key_value_cache(k[:, :0], v[:, :0], k.shape[1], window)
    _, out = jax.lax.scan(step, empty, tuple(jnp.moveaxis(x, 1, 0) for x in (q, k, v)))
    return jnp.moveaxis(out, 0, 1)
