"""How the Hopper kernels are cut into programs: heads a program, blocks of tokens a chunk, warpgroups.

The numbers were found on an H200 by timing every launch of every kernel, and are frozen here. Results do not depend
on them, up to rounding.
"""

from __future__ import annotations

import dataclasses
import heapq
import math
from typing import ClassVar

from pallas_kernels.common.support import gpu
from pallas_kernels.common.tiles import fractions

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
        return fractions(together, getattr(self, name))

    def sharing_warpgroups(self, heads: int) -> int:
        """How many warpgroups of a program of `chunk_states` share so many heads equally."""
        most = self.warpgroups if self.value_block <= 64 else 1  # a larger state takes the registers of several
        return max(number for number in range(1, most + 1) if heads % number == 0)

    def filling(
        self, group_heads: int, groups: int, length: int, sequences: int = 1, one_state: bool = False
    ) -> HopperTiles:
        """The same with so many heads a program, and no more than now, that the multiprocessors are done soonest.

        groups: of a sequence. A program has a chunk of heads, in `chunk_states` `span` chunks.
        """
        multiprocessors = gpu().multiprocessors
        chunks, all_heads = -(-length // self.chunk), sequences * groups * group_heads

        def alike(name: str, heads: int) -> float:
            """Time of programs that all take the same."""
            span, workers = 1, 1
            if name == "chunk_states":
                span, workers = 1 if one_state else self.span, self.sharing_warpgroups(heads)
            programs = -(-chunks // span) * (all_heads // heads)
            at_once = multiprocessors * max(PROGRAMS_A_MULTIPROCESSOR[name] // workers, 1)
            return math.ceil(programs / at_once) * (span * heads / workers + START)

        def reading(name: str, heads: int) -> float:
            """Time of programs that read so many states as their chunk's number has bits, or one, the longest first."""
            blocks = all_heads // heads
            reads = [1] * chunks if one_state else [chunk.bit_count() for chunk in range(chunks)]
            times = sorted((START + heads * (1 + READ[name] * number) for number in reads), reverse=True)
            if blocks * chunks > MOST_PROGRAMS:  # then the last ones to start make up for what is uneven
                return blocks * sum(times) / multiprocessors + times[-1]
            busy = [0.0] * multiprocessors
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


def choose_hopper_tiles(length: int, value_dim: int) -> HopperTiles:
    """Tiles of the kernels for Hopper, with as many heads a program as pay in a large problem: see `HopperTiles.filling`."""
    tiles = HopperTiles(rows=1 if length <= 64 else 2, value_block=64 * -(-value_dim // 64))
    # A state of 128 x 128 takes half of the registers that one warpgroup can have beside another.
    return dataclasses.replace(tiles, state_gradients=1) if tiles.value_block > 64 else tiles
