"""Passes of the delta rule's kernels for Hopper GPUs, which carry the states of all levels from chunk to chunk.

Chunk c has a level for each bit of c that is set. After it its own state joins the levels below the lowest bit of c + 1, as in
a binary counter, and their sum is the level of that bit.

A pass has up to MOST_LEVELS levels. It goes over segments of chunks, at whose ends all its levels are joined to one state. That
is what a segment hands to the next pass, which has the levels above, as a state of its own.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from loglinear_jax.fenwick import next_end, node_height
from pallas_kernels.common.mosaic import BLOCK, PAIRS, program_index, rounded, tiled, zeros
from pallas_kernels.delta.hopper.place import Place
from pallas_kernels.delta.tree import MapSizes

MOST_LEVELS, OF_WORKER = 4, 2  # of a pass; of a warpgroup that carries them


@dataclasses.dataclass(frozen=True)
class Pass:
    """Levels from height `first` on; level 0 is the first."""

    first: int
    num_levels: int
    num_chunks: int

    @property
    def stride(self) -> int:
        """Every so many chunks a state joins."""
        return 1 << self.first

    @property
    def segment(self) -> int:
        """Chunks of a segment."""
        return 1 << (self.first + self.num_levels)

    @property
    def is_last(self) -> bool:
        return self.num_chunks <= self.segment

    @property
    def workers(self) -> int:
        """How many warpgroups carry levels."""
        return -(-self.num_levels // OF_WORKER)

    def levels_of(self, worker: int) -> range:
        return range(worker * OF_WORKER, min((worker + 1) * OF_WORKER, self.num_levels))

    def grid(self, sizes: MapSizes) -> dict[str, int]:
        segments = -(-self.num_chunks // self.segment)
        return dict(head=sizes.batch * sizes.heads, segment=segments, block=sizes.value_dim // BLOCK)

    def chunks(self):
        """The first chunk of the program's segment, and how many it has."""
        start = program_index("segment") * self.segment
        return start, jnp.minimum(self.segment, self.num_chunks - start)

    def has(self, chunk, level):
        """Whether a chunk has a level."""
        return (chunk >> (self.first + level)) & 1 == 1

    def for_levels(self, chunk, body, carry):
        """body(level, carry) for each level that a chunk has, from the lowest."""

        def step(bits_and_carry):
            bits, carry = bits_and_carry
            return next_end(bits), body(node_height(bits), carry)

        bits = (chunk >> self.first) & ((1 << self.num_levels) - 1)
        return lax.while_loop(lambda x: x[0] != 0, step, (bits, carry))[1]

    def kept_at(self, chunk, level):
        """Where what is kept of a chunk's level is in an array [B, H, levels, N / 2, ...]."""
        height = self.first + level
        return level, (chunk >> (height + 1) << height) + (chunk & ((1 << height) - 1))

    def kept_type(self, sizes: MapSizes) -> jax.ShapeDtypeStruct:
        """[B, H, levels, N / 2, V, K]: of each level, a state for each chunk that has it."""
        shape = (sizes.batch, sizes.heads, self.num_levels, -(-self.num_chunks // 2), sizes.value_dim, sizes.key_dim)
        return jax.ShapeDtypeStruct(shape, jnp.bfloat16)

    def joins_at(self, chunk):
        """The level that is joined after a chunk; below 0 if none is, num_levels or more at the end of a segment."""
        return node_height(chunk + 1) - self.first

    def joined_at(self, chunk):
        """The number of the state that joins after a chunk."""
        return jnp.maximum(lax.div(chunk + 1, self.stride) - 1, 0)

    def is_handed_on(self, target):
        """Whether a state that is joined at this level goes from the first worker to the second."""
        return (target >= OF_WORKER) & ((target < self.num_levels) | (not self.is_last))

    def num_handed_on(self, count):
        """How often in the first `count` chunks of a segment."""
        often = lax.div(count, self.stride << OF_WORKER)
        return often - jnp.where(count == self.segment, 1, 0) if self.is_last else often


def passes_for(sizes: MapSizes) -> list[Pass]:
    """Each with about as many levels; all but the last have two workers."""
    count = -(-sizes.heights // MOST_LEVELS)
    firsts = [-(-sizes.heights * index // count) for index in range(count + 1)]
    return [Pass(first, end - first, sizes.num_chunks) for first, end in itertools.pairwise(firsts)]


# --- States, [V, K], as tiles of 64 × 64 ------------------------------------------------------------------------------


def zero_states(levels: range, blocks: int):
    """One for each level."""
    return tuple(tuple(zeros(BLOCK) for _ in range(blocks)) for _ in levels)


def map_slots(depth: int, blocks: int):
    """Shared memory for D and reads of so many chunks."""
    return dict(lost=tiled(depth, blocks, blocks, *PAIRS), reads=tiled(depth, blocks, *PAIRS))


def maps_of(place: Place, ref, shared, slot, chunk, blocks: int):
    """(source, target) of D and reads: a list."""
    tiles = [(row, column) for row in range(blocks) for column in range(blocks)]
    lost = [(place.tile(ref.lost, (chunk,), *tile), shared.lost.at[slot, *tile]) for tile in tiles]
    return lost + [(place.tile(ref.reads, (chunk,), 0, row), shared.reads.at[slot, row]) for row in range(blocks)]


def if_has(one: Pass, chunk, levels: range, change, states):
    """change(level, *state) of the states that a chunk has, and the others as they are."""
    return tuple(
        lax.cond(one.has(chunk, level), functools.partial(change, level), lambda *state: state, *state)
        for level, state in zip(levels, states, strict=True)
    )


def store_negative(ref, one: Pass, chunk, levels: range, states) -> None:
    """-1 times those that a chunk has, in shared memory."""

    def store(level, *state):
        for row, tile in enumerate(state):
            ref[level, row] = -rounded(tile, ref.dtype)
        return ()

    for level, state in zip(levels, states, strict=True):
        lax.cond(one.has(chunk, level), functools.partial(store, level), lambda *_: (), *state)
    plgpu.commit_smem()


def for_target(target, change, states, hands_on):
    """change(target, *states) if the target is the index of a state, or, if `hands_on`, their number; else the states."""
    branches = [lambda *states: states, *(functools.partial(change, index) for index in range(len(states)))]
    branch = jnp.where((target >= 0) & (target < len(states)), target + 1, 0)
    if hands_on is not None:
        branches.append(functools.partial(change, len(states)))
        branch = jnp.where(hands_on, len(states) + 1, branch)
    return lax.switch(branch, branches, *states)
