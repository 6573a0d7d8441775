"""Random draws: those that the tasks share, vectorised over sequences, and what makes them follow from the seed alone."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int


@contextlib.contextmanager
def standard_settings() -> Iterator[None]:
    """JAX's own defaults of the settings on which random numbers and dtypes depend, whatever JAX_DEFAULT_PRNG_IMPL,
    JAX_THREEFRY_PARTITIONABLE and JAX_ENABLE_X64 say: everything about a seed follows from its number."""
    with jax.default_prng_impl("threefry2x32"), jax.threefry_partitionable(True), jax.enable_x64(False):
        yield


def distinct(key: jax.Array, num: int, count: int, size: int) -> Int[Array, "num count"]:
    """In each row, `count` distinct integers of 0 .. size-1 in random order (a uniform permutation's beginning)."""
    bits = jax.random.bits(key, (num, size), jnp.uint32)
    return jnp.argsort(bits, axis=1)[:, :count].astype(jnp.int32)


def distinct_of_many(key: jax.Array, num: int, count: int, size: int) -> Int[Array, "num count"]:
    """What `distinct` draws, by time and memory that do not grow with `size`."""
    key_subset, key_order = jax.random.split(key)
    subset = increasing(key_subset, num, count, size)
    return jnp.take_along_axis(subset, distinct(key_order, num, count, count), axis=1)


def weighted(key: jax.Array, num: int, count: int, weights: Float[Array, " size"]) -> Int[Array, "num count"]:
    """In each row, `count` distinct integers of 0 .. size-1 in the order in which they are drawn: each in proportion to its
    weight among those that are left (the largest of log weight + Gumbel noise)."""
    noise = jax.random.gumbel(key, (num, len(weights)))
    return jax.lax.top_k(jnp.log(weights) + noise, count)[1].astype(jnp.int32)


def by_power_law(key: jax.Array, num: int, count: int, size: int, power: float) -> Int[Array, "num count"]:
    """`weighted`, integer i in proportion to (i + 1)^(power - 1)."""
    return weighted(key, num, count, jnp.arange(1, size + 1, dtype=jnp.float32) ** (power - 1))


def increasing(key: jax.Array, num: int, count: int, size: int) -> Int[Array, "num count"]:
    """In each row, a uniform subset of `count` of the integers 0 .. size-1, in increasing order.

    Floyd's sampling: `count` draws however large `size` is. Draw j comes from 0 .. size-count+j; one already taken is
    replaced by size-count+j itself, which no earlier draw can be.
    """

    def draw(taken, j_and_key):
        j, key = j_and_key
        last = size - count + j
        candidate = jax.random.randint(key, (num,), 0, last + 1, jnp.int32)
        is_taken = jnp.any(taken == candidate[:, None], axis=1)
        chosen = jnp.where(is_taken, last, candidate)
        return taken.at[:, j].set(chosen), None

    empty = jnp.full((num, count), -1, jnp.int32)
    taken, _ = jax.lax.scan(draw, empty, (jnp.arange(count, dtype=jnp.int32), jax.random.split(key, count)))
    return jnp.sort(taken, axis=1)
