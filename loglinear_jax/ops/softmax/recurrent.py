"""The recurrent form: token by token over a cache of every key and value, as in decoding."""

from __future__ import annotations

import functools

import flax.struct
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from loglinear_jax.ops.positions import advanced, as_position, first_read, have_room, segment_starts
from loglinear_jax.ops.sharding import varying_as
from loglinear_jax.ops.softmax.parallel import attend_to, rotate_by_position


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
    end = position.reshape(-1, 1) + jnp.arange(length, dtype=jnp.int32)
    first = cache.first[:, None] if segment_ids is None else first_read(segment_ids, position, cache.first)
    begin = jnp.maximum(first, end - room + 1)
    of_first_key = position.reshape(-1, 1) - room if has_window else 0
    out = attend_to(q, keys, values, begin - of_first_key, end - of_first_key)
    out = jnp.where(known.reshape(-1, 1, 1, 1), out, jnp.nan)
    if has_window:
        keys, values = keys[:, length:], values[:, length:]
    return out, KeyValueCache(keys, values, advanced(position, length), first[:, -1])


def _put(
    all_: Float[Array, "B S ..."], new: Float[Array, "B T ..."], position: Int[Array, "*B"]
) -> Float[Array, "B S ..."]:
    """The new ones at their positions among all."""
    if position.ndim == 0:
        return jax.lax.dynamic_update_slice_in_dim(all_, new, position, axis=1)
    return jax.vmap(functools.partial(jax.lax.dynamic_update_slice_in_dim, axis=0))(all_, new, position)


def attend(q, k, v, segment_ids=None, *, window: int | None = None):
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
