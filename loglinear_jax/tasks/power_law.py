"""Interleaved MQAR whose distances from key to query follow a power law."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from loglinear_jax.settings import setting
from loglinear_jax.tasks.interleaved import Interleaved


@dataclasses.dataclass(frozen=True)
class PowerLaw(Interleaved):
    """`Interleaved` with P(distance from key to query = d slots) ∝ 1 / d^alpha.

    The pairs of slots of a sequence are drawn one after the other. Each pair's distance follows the law over the distances
    at which two free slots still stand; its place is uniform over those two slots at that distance, and then they are taken.
    So the law is exact while every distance is free. Where the sequence becomes full, the longest distances, of which there
    are the fewest places, are somewhat rarer. With alpha = 1 each Fenwick level holds a share of the answers of
    similar size: of 24 pairs in 128 tokens from 11 % at level 2 to 28 % at level 7, where `Interleaved` has 1 to 51 %.
    """

    alpha: float = setting(1.0, "power of the distance: 0: all distances alike; 1: all levels about alike", least=0)

    TITLE = "Power-law MQAR"

    def slots(self, key, num):
        size = self.seq_len // 2
        distance = jnp.arange(size)
        log_weight = -self.alpha * jnp.log(jnp.maximum(distance, 1).astype(jnp.float32))

        def draw(free, key):
            key_distance, key_place = jax.random.split(key)
            # How many pairs of free slots stand at each distance: the autocorrelation of `free`, exact when rounded.
            spectrum = jnp.fft.rfft(free.astype(jnp.float32), 2 * size)
            count = jnp.fft.irfft(jnp.square(jnp.abs(spectrum)), 2 * size)[:, :size]
            possible = (count > 0.5) & (distance > 0)
            apart = jax.random.categorical(key_distance, jnp.where(possible, log_weight, -jnp.inf))[:, None]
            later = distance + apart
            both = free & (later < size) & jnp.take_along_axis(free, jnp.minimum(later, size - 1), axis=1)
            first = jax.random.categorical(key_place, jnp.where(both, 0.0, -jnp.inf))[:, None]
            pair = jnp.concatenate([first, first + apart], axis=1).astype(jnp.int32)
            return free.at[jnp.arange(num)[:, None], pair].set(False), pair

        pairs = jax.lax.scan(draw, jnp.ones((num, size), bool), jax.random.split(key, self.num_pairs))[1]
        return jnp.moveaxis(pairs, 0, 1)


TASK = PowerLaw
