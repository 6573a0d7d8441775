"""How the kernels are cut into programs: chunk, heads a program, warps and pipeline stages, by shape.

Those of the attention were found by `loglinear_jax benchmark tiles`, the others by trying a few on an H200; frozen here.
Results do not depend on any of it, up to rounding.
"""

from __future__ import annotations

import dataclasses
import heapq
import math
from typing import ClassVar

import jax.numpy as jnp

MIN_TILE = 16  # what a matrix unit takes


def tile_for(size: int) -> int:
    """The smallest power of two that holds `size` and that a matrix unit takes."""
    return max(1 << (size - 1).bit_length(), MIN_TILE)


@dataclasses.dataclass(frozen=True)
class Launch:
    """How one kernel is launched: heads a program (of one group, value blocks counting as heads), warps, pipeline stages."""

    heads: int
    warps: int
    stages: int


@dataclasses.dataclass(frozen=True)
class Tiles:
    """chunk: tokens that are multiplied out, between two states. value_block: columns of V a program.

    span: chunks whose tree one program builds in registers. radix: nodes of the tree that are joined, or parted, at once
    above that, in programs of `elements` of K x V each. read_chunks: chunks (1 or 2) that share the states which one
    program of `query_gradients` reads. The defaults are for bfloat16.
    """

    backend: ClassVar[str] = "triton"
    min_dim: ClassVar[int] = MIN_TILE

    chunk: int = 64
    value_block: int = 64
    span: int = 4
    radix: int = 16
    elements: int = 512
    read_chunks: int = 2
    chunk_states: Launch = Launch(1, 8, 2)
    merge_states: Launch = Launch(1, 4, 2)
    outputs: Launch = Launch(4, 4, 3)
    state_gradients: Launch = Launch(1, 4, 3)
    spread_gradients: Launch = Launch(1, 4, 1)
    query_gradients: Launch = Launch(4, 8, 3)
    chunk_gradients: Launch = Launch(8, 4, 1)

    def with_chunk(self, chunk: int) -> Tiles:
        """The same with chunks of this size; of large ones, a program of `query_gradients` has room for one only."""
        return dataclasses.replace(self, chunk=chunk, read_chunks=2 if chunk <= 64 else 1)

    def fitted(self, group_heads: int, value_blocks: int, groups: int) -> Tiles:
        """The same with no more heads a program than a group has, in whole heads or whole fractions of one head's blocks.

        groups: of a sequence, which make no difference here.
        """

        def fits(heads: int) -> bool:
            return group_heads % heads == 0 and (heads % value_blocks == 0 or value_blocks % heads == 0)

        launches = {name: launch for name, launch in vars(self).items() if isinstance(launch, Launch)}
        return dataclasses.replace(
            self,
            **{
                name: dataclasses.replace(launch, heads=max(h for h in range(1, launch.heads + 1) if fits(h)))
                for name, launch in launches.items()
            },
        )


# `for_maps` has those of small maps.
TREE_JOINS = Launch(1, 8, 3)
TREE_JOIN_GRADIENTS = Launch(1, 8, 3)
TREE_READS = Launch(1, 4, 1)
TREE_READ_GRADIENTS = Launch(1, 4, 1)
TREE_PULLS = Launch(1, 4, 2)
TREE_NODES = Launch(1, 4, 3)
CARRY = Launch(1, 4, 2)
CARRY_GRADIENTS = Launch(1, 4, 1)
MULTIPROCESSORS = 132  # of an H100 or H200
START = 1.5  # of a program, in heads' work
PROGRAMS_A_MULTIPROCESSOR = dict(chunk_states=2, chunk_gradients=1)
# Time to read a state, in a head's other work. Of these kernels a multiprocessor has one program at a time.
READ = dict(outputs=0.35, query_gradients=2.0)
HEADS_A_PROGRAM = (*PROGRAMS_A_MULTIPROCESSOR, *READ, "state_gradients")  # kernels of which a program has some heads
GROUPS_A_PROGRAM = ("outputs", "query_gradients", "chunk_gradients")  # or some groups, if each is of one head
MOST_PROGRAMS = 4096  # that are followed one by one, to see how long they take


@dataclasses.dataclass(frozen=True)
class HopperTiles:
    """Those of the kernels for Hopper. rows: blocks of 64 tokens a chunk, 1 or 2. value_block: V, up to whole blocks of 64.

    span: chunks, 1 or 2, whose states one program builds. warpgroups: of that program, at most. radix: nodes of the tree that
    are joined, or parted, at once. The others: heads a program of a kernel, at most.
    """

    backend: ClassVar[str] = "hopper"
    min_dim: ClassVar[int] = 64
    read_chunks: ClassVar[int] = 1

    rows: int = 2
    span: int = 2
    warpgroups: int = 2
    value_block: int = 64
    radix: int = 16
    chunk_states: int = 24
    outputs: int = 24
    state_gradients: int = 3
    query_gradients: int = 24
    chunk_gradients: int = 48

    def __post_init__(self):
        if self.span not in (1, 2):
            raise ValueError(f"span is {self.span}: expected 1 or 2")
        if self.warpgroups not in (1, 2, 3):  # at K = 128 four would have no room to fetch ahead
            raise ValueError(f"warpgroups is {self.warpgroups}: expected 1, 2 or 3")

    @property
    def chunk(self) -> int:
        return 64 * self.rows

    def with_chunk(self, chunk: int) -> HopperTiles:
        """The same with chunks of this size, 64 or 128."""
        return dataclasses.replace(self, rows=chunk // 64)

    def fitted(self, group_heads: int, value_blocks: int, groups: int) -> HopperTiles:
        """The same with no more heads a program than a group has, or than there are groups of one head, in whole fractions.

        groups: of a sequence.
        """
        assert value_blocks == 1
        return dataclasses.replace(
            self, **{name: self.heads_of(name, group_heads, groups)[-1] for name in HEADS_A_PROGRAM}
        )

    def heads_of(self, name: str, group_heads: int, groups: int) -> list[int]:
        """Numbers of heads that a program of this kernel may have, in ascending order."""
        together = groups if group_heads == 1 and name in GROUPS_A_PROGRAM else group_heads
        return _fractions(together, getattr(self, name))

    def sharing_warpgroups(self, heads: int) -> int:
        """How many warpgroups of a program of `chunk_states` share so many heads equally."""
        most = self.warpgroups if self.value_block <= 64 else 1  # a larger state takes the registers of several
        return max(number for number in range(1, most + 1) if heads % number == 0)

    def filling(self, group_heads: int, groups: int, length: int, sequences: int = 1) -> HopperTiles:
        """The same with so many heads a program, and no more than now, that the multiprocessors are done soonest.

        groups: of a sequence. A program has a chunk of heads, in `chunk_states` `span` chunks.
        """
        chunks, all_heads = -(-length // self.chunk), sequences * groups * group_heads

        def alike(name: str, heads: int) -> float:
            """Time of programs that all take the same."""
            span, workers = (self.span, self.sharing_warpgroups(heads)) if name == "chunk_states" else (1, 1)
            programs = -(-chunks // span) * (all_heads // heads)
            at_once = MULTIPROCESSORS * max(PROGRAMS_A_MULTIPROCESSOR[name] // workers, 1)
            return math.ceil(programs / at_once) * (span * heads / workers + START)

        def reading(name: str, heads: int) -> float:
            """Time of programs that read so many states as their chunk's number has bits, the longest first."""
            blocks = all_heads // heads
            times = sorted(
                (START + heads * (1 + READ[name] * chunk.bit_count()) for chunk in range(chunks)), reverse=True
            )
            if blocks * chunks > MOST_PROGRAMS:  # then the last ones to start make up for what is uneven
                return blocks * sum(times) / MULTIPROCESSORS + times[-1]
            busy = [0.0] * MULTIPROCESSORS
            for time in times:
                for _ in range(blocks):
                    heapq.heapreplace(busy, busy[0] + time)
            return max(busy)

        def fill(name: str, time) -> int:
            """Among equally fast numbers the largest, as a program's heads share what it fetches once."""
            return min(self.heads_of(name, group_heads, groups), key=lambda heads: (time(name, heads), -heads))

        heads = {name: fill(name, alike) for name in PROGRAMS_A_MULTIPROCESSOR} | {
            name: fill(name, reading) for name in READ
        }
        return dataclasses.replace(self, **heads)


def _fractions(heads: int, most: int) -> list[int]:
    """Numbers of heads, up to `most`, of which a group of `heads` has a whole number."""
    return [h for h in range(1, most + 1) if heads % h == 0]


def delta_chunk(key_dim: int, value_dim: int, dtype) -> int:
    """Tokens a chunk of the kernels of the delta rule."""
    if jnp.dtype(dtype).itemsize == 2:
        return 64
    return next((size for size in (16, 32) if max(key_dim, value_dim) <= size), 64)


def delta_launch(*tile: int, gradients: bool = False, pipelined: bool = False) -> Launch:
    """Of what happens inside chunks, by the sizes of a chunk, K and V: no more warps than such tiles keep busy.

    pipelined: whether the columns of large tiles are fetched while those before are multiplied.
    """
    largest = max(tile)
    small = 2 if gradients and largest > 16 else 1
    return Launch(1, small if largest <= 32 else 4, 2 if pipelined and largest > 32 else 1)


def for_maps(launch: Launch, *tile: int) -> Launch:
    """A launch with one warp where a program's tile is 32 x 32 at most (timed there, in TF32)."""
    return dataclasses.replace(launch, warps=1) if max(tile) <= 32 else launch


def carry_columns(sequences: int, value_dim: int) -> int:
    """Columns of V a program of the kernels that carry a state over the chunks of all heads' sequences.

    Programs are few and long there: smaller ones where they leave multiprocessors idle.
    """
    block = value_dim
    while block > MIN_TILE and sequences * (value_dim // block) < MULTIPROCESSORS:
        block //= 2
    return block


SCORE_PROGRAMS = 384  # of the gradients of bucket scores, almost three a multiprocessor


@dataclasses.dataclass(frozen=True)
class ScoreTiles:
    """Those of bucket scores."""

    scores: Launch = Launch(8, 1, 1)
    gradients: Launch = Launch(48, 2, 1)

    def fitted(self, group_heads: int) -> ScoreTiles:
        """The same with no more heads a program than a group has, in whole fractions of them."""

        def fits(launch: Launch) -> Launch:
            heads = max(h for h in range(1, launch.heads + 1) if group_heads % h == 0)
            return dataclasses.replace(launch, heads=heads)

        return ScoreTiles(fits(self.scores), fits(self.gradients))


def choose_score_tiles(group_heads: int, chunks: int) -> ScoreTiles:
    """Tiles for so many chunks of all groups' sequences: many heads a program, but enough programs."""
    tiles = ScoreTiles()
    fits = _fractions(group_heads, tiles.gradients.heads)
    heads = max((h for h in fits if chunks * (group_heads // h) >= SCORE_PROGRAMS), default=1)
    return dataclasses.replace(tiles, gradients=dataclasses.replace(tiles.gradients, heads=heads))


SCORE_CHUNK = 32


def chunk_of_scores(length: int) -> int:
    """Tokens a chunk for bucket scores: what is quadratic in them weighs more there, and a state less."""
    return min(tile_for(length), SCORE_CHUNK)


def choose_hopper_tiles(length: int, value_dim: int) -> HopperTiles:
    """Tiles of the kernels for Hopper, with as many heads a program as pay in a large problem: see `HopperTiles.filling`."""
    tiles = HopperTiles(rows=1 if length <= 64 else 2, value_block=64 * -(-value_dim // 64))
    # A state of 128 x 128 takes half of the registers that one warpgroup can have beside another.
    return dataclasses.replace(tiles, state_gradients=1) if tiles.value_block > 64 else tiles


def choose_tiles(length: int, key_dim: int, value_dim: int, dtype) -> Tiles:
    """Tiles for a shape, found on an H200. key_dim: a power of two; value_dim: not necessarily."""
    if jnp.dtype(dtype).itemsize == 2:
        tiles = BFLOAT16
    elif key_dim <= 64:
        tiles = FLOAT32
    else:
        tiles = FLOAT32_WIDE
    chunk, value_block = tiles.chunk, tiles.value_block
    while chunk > MIN_TILE and chunk >= 2 * length:
        chunk //= 2
    while value_block > MIN_TILE and value_block >= 2 * value_dim:
        value_block //= 2
    return dataclasses.replace(tiles, chunk=chunk, value_block=value_block)


BFLOAT16 = Tiles()
# Full float32 takes three products on the matrix units, and its operands twice the room.
FLOAT32 = Tiles(
    chunk=32,
    chunk_states=Launch(1, 2, 1),
    outputs=Launch(4, 2, 1),
    state_gradients=Launch(1, 1, 2),
    query_gradients=Launch(4, 4, 1),
    chunk_gradients=Launch(4, 2, 1),
)
FLOAT32_WIDE = Tiles(
    chunk=32,
    value_block=16,
    span=2,
    radix=8,
    chunk_states=Launch(1, 4, 1),
    outputs=Launch(4, 4, 1),
    state_gradients=Launch(1, 4, 1),
    query_gradients=Launch(4, 4, 1),
    chunk_gradients=Launch(4, 4, 1),
)
