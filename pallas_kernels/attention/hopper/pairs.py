"""Pairs of a query and a key inside a block of tokens, in strips of a few keys: their decays, levels, and sums by level."""

from __future__ import annotations

import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from loglinear_jax.fenwick import num_levels
from pallas_kernels.common.mosaic import BLOCK, BY_ROW, TILE, columns_of, columnwise, rowwise

STRIP = 8  # keys; of a tile of pairs as few as a warpgroup can have by themselves
STRIP_PAIRS = (BLOCK, STRIP)
STRIPS = BLOCK // STRIP
NEAR_LEVELS = num_levels(STRIP)
LEVELS_IN_BLOCK = num_levels(BLOCK)


class Pairs:
    """Pairs of a query (row) and a key (column) of a block, by strips of STRIP keys, as many as share the levels above 3 with
    each query.

    The barrier keeps what is made of the rows' numbers out of the registers of loops: an instruction makes it anew.
    """

    def __init__(self):
        self.query = lax.optimization_barrier(plgpu.broadcasted_iota(jnp.int32, (BLOCK,), 0, layout=BY_ROW))
        self.key = plgpu.broadcasted_iota(jnp.int32, STRIP_PAIRS, 1, layout=TILE)

    def near(self):
        """Where query and key are of one strip, the XOR of their numbers in it, whose highest bit is the level less one."""
        return rowwise(self.query & STRIP - 1, STRIP_PAIRS) ^ self.key

    def has_bit(self, bit: int):
        """Whether the number of the query's strip has this bit, [queries]."""
        return (self.query & STRIP << bit) != 0

    def decay(self, strip: int, since_query, since_key):
        """Decay of each pair; 0 where the key comes later."""
        decay = jnp.exp2(rowwise(since_query, STRIP_PAIRS) - columnwise(since_key, STRIP_PAIRS))
        return jnp.where(rowwise(self.query, STRIP_PAIRS) >= self.key + strip * STRIP, decay, 0.0)

    def is_before(self, strip: int):
        """Whether the key comes before the query."""
        return rowwise(self.query, STRIP_PAIRS) > self.key + strip * STRIP

    def latest(self, strip: int, x, before):
        """x where the query is of this strip or a later one, else what was there before."""
        return jnp.where(rowwise(self.query >= strip * STRIP, STRIP_PAIRS), x, before)

    def near_lam(self, lams):
        """lams[level] [queries] of each pair's level, where query and key are of one strip; None if λ ≡ 1."""
        if isinstance(lams[0], float):
            return None
        lam, near = rowwise(lams[NEAR_LEVELS - 1], STRIP_PAIRS), self.near()
        for level in reversed(range(NEAR_LEVELS - 1)):
            lam = jnp.where(near < 1 << level, rowwise(lams[level], STRIP_PAIRS), lam)
        return lam

    def lam(self, strip: int, near_lam, lams):
        """lams[level] [queries] of each pair's level, any where the key comes later; 1 if λ ≡ 1.

        A query of a later strip is at level NEAR_LEVELS + i, where i is the highest bit in which the numbers of the two strips
        differ, and this one's has it not: there are as few levels as it has such bits.
        """
        if near_lam is None:
            return 1.0
        lam = None
        for bit in reversed(missing_bits(strip)):
            level = lams[NEAR_LEVELS + bit]
            until = (strip >> bit + 1) + 1 << bit + 1
            lam = level if lam is None else jnp.where(self.query < until * STRIP, level, lam)
        if lam is None:
            return near_lam
        return jnp.where(rowwise(self.query < (strip + 1) * STRIP, STRIP_PAIRS), near_lam, rowwise(lam, STRIP_PAIRS))


def missing_bits(strip: int) -> list[int]:
    return [bit for bit in range((STRIPS - 1).bit_length()) if not strip >> bit & 1]


class LevelSums:
    """Sums of pairs over the keys of a block, by level, if pairs are 0 where the key comes later.

    They are added strip after strip. A strip has one level for each query, but for queries in it. Those of a level beyond
    strips have a bit in their strip's number that the keys' strips have not, and are next to each other: where they begin,
    the sum of the level starts anew. What is found for queries without the bit is none.
    """

    def __init__(self):
        self.by_bit, self.odd = [None] * (STRIPS - 1).bit_length(), None

    def add(self, strip: int, pairs: Pairs, x):
        """x [queries, STRIP]"""

        def latest(before):
            return x if before is None else pairs.latest(strip, x, before)

        if strip & 1:
            self.odd = latest(self.odd)
        for bit in missing_bits(strip):
            starts = strip & (2 << bit) - 1 == 0
            self.by_bit[bit] = latest(self.by_bit[bit]) if starts else self.by_bit[bit] + x

    def keep(self, *others):
        """A barrier for the sums and others, which it returns; what comes later is not computed before it."""
        sums = [x for x in (*self.by_bit, self.odd) if x is not None]
        found = iter(lax.optimization_barrier((*sums, *others)))
        self.by_bit = [None if x is None else next(found) for x in self.by_bit]
        self.odd = None if self.odd is None else next(found)
        return tuple(found)

    def own_strip(self, pairs: Pairs):
        """Of the pairs in the query's own strip, [queries, STRIP]."""
        return jnp.where(rowwise(pairs.has_bit(0), STRIP_PAIRS), self.odd, self.by_bit[0])

    def sums(self, pairs: Pairs) -> list:
        """[queries] of each level."""
        own, distance = self.own_strip(pairs), pairs.near()
        near = [jnp.sum(of_level(own, distance, level), axis=1) for level in range(NEAR_LEVELS)]
        far = [jnp.where(pairs.has_bit(bit), jnp.sum(x, axis=1), 0.0) for bit, x in enumerate(self.by_bit)]
        return near + far


def of_level(x, distance, level: int):
    """x where the highest bit of distance says this level, counted from 0; else 0."""
    is_level = distance == 0 if level == 0 else lax.shift_right_logical(distance, level - 1) == 1
    return jnp.where(is_level, x, 0.0)


def diagonal(tile):
    """[queries], of a tile of all pairs of a block."""
    pairs, own_strip = Pairs(), columns_of(tile, 0, STRIP)
    for strip in range(1, STRIPS):
        own_strip = pairs.latest(strip, columns_of(tile, strip, STRIP), own_strip)
    return jnp.sum(of_level(own_strip, pairs.near(), 0), axis=1)
