"""Random draws that the tasks share, vectorised over sequences."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int


def distinct(key: jax.Array, num: int, count: int, size: int) -> Int[Array, "num count"]:
    """In each row, `count` distinct integers of 0 .. size-1 in random order (a uniform permutation's beginning)."""
    bits = jax.random.bits(key, (num, size), jnp.uint32)
    return jnp.argsort(bits, axis=1)[:, :count].astype(jnp.int32)


def increasing(key: jax.Array, num: int, count: int, size: int) -> Int[Array, "num count"]:
    """In each row, a uniform subset of `count` of the integers 0 .. size-1, in increasing order.

    Floyd's sampling: `count` draws however large `size` is. Draw j comes from 0 .. size-count+j; one already taken is
    replaced by size-count+j itself, which no earlier draw can be.
    """

    def draw(taken, j_and_key):
        j, key = j_and_key
        last = size - count + j
        candidate = jax.random.randint(key, (num,), 0, last + 1)
        is_taken = jnp.any(taken == candidate[:, None], axis=1)
        chosen = jnp.where(is_taken, last, candidate)
        return taken.at[:, j].set(chosen), None

    empty = jnp.full((num, count), -1, jnp.int32)
    taken, _ = jax.lax.scan(draw, empty, (jnp.arange(count), jax.random.split(key, count)))
    return jnp.sort(taken, axis=1)
