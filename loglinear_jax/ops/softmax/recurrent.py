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
    """What softmax attention remembers: every key (already rotated) and value, with room for max_length tokens."""

    keys: Float[Array, "B S G K"]
    values: Float[Array, "B S H V"]
    position: Int[Array, ""]


def key_value_cache(k: Float[Array, "B T G K"], v: Float[Array, "B T H V"], max_length: int) -> KeyValueCache:
    """The cache after these first tokens, with room for max_length.

    Raises ValueError if there are more of them.
    """
    if k.shape[1] > max_length:
        raise ValueError(
            f"k has shape {k.shape} with T = {k.shape[1]} tokens: expected at most max_length = {max_length}"
        )
    room = [(0, 0), (0, max_length - k.shape[1]), (0, 0), (0, 0)]
    return KeyValueCache(jnp.pad(rotate_by_position(k), room), jnp.pad(v, room), jnp.asarray(k.shape[1], jnp.int32))


def attend_to_cache(
    cache: KeyValueCache, q: Float[Array, "B T G K"], k: Float[Array, "B T G K"], v: Float[Array, "B T H V"]
) -> tuple[Float[Array, "B T H V"], KeyValueCache]:
    """`softmax_attention` of the next tokens to all before and themselves; and the cache with them.

    Where the cache has no room for all of them (or a negative position), the outputs are NaN, and so are all after them.
    """
    room, length = cache.keys.shape[1], q.shape[1]
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


def recurrent(q, k, v):
    """`attend_to_cache` of every token by `lax.scan`. Shapes as in `softmax_attention`."""

    def step(cache, token):
        out, cache = attend_to_cache(cache, *(x[:, None] for x in token))
        return cache, out[:, 0]

    empty = key_value_cache(k[:, :0], v[:, :0], k.shape[1])
    _, out = jax.lax.scan(step, empty, tuple(jnp.moveaxis(x, 1, 0) for x in (q, k, v)))
    return jnp.moveaxis(out, 0, 1)
