"""How the attention's kernels are cut into programs: chunk, heads a program, warps and pipeline stages, by shape.

The numbers were found on an H200 by timing every launch of every kernel, and are frozen here. Results do not depend on
them, up to rounding.
"""

from __future__ import annotations

import dataclasses
from typing import ClassVar

import jax.numpy as jnp
from jax.lax import PrecisionLike

from pallas_kernels.common.support import dot_mode, gpu
from pallas_kernels.common.tiles import MIN_TILE, Launch

MAX_KEY_DIM = 256
RESERVED = 2048  # bytes of shared memory for numbers of single tokens


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
        return dataclasses.replace(self, chunk=chunk, read_chunks=self.read_chunks if chunk <= 64 else 1)

    def in_shared_memory(self, key_dim: int, dtype) -> Tiles:
        """The same, with smaller chunks where the queries and keys of one have no room on this GPU."""
        room = gpu().shared_memory - RESERVED
        if self.chunk == MIN_TILE or 2 * self.chunk * key_dim * jnp.dtype(dtype).itemsize <= room:
            return self
        return self.with_chunk(self.chunk // 2).in_shared_memory(key_dim, dtype)

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


def choose_tiles(length: int, key_dim: int, value_dim: int, dtype, precision: PrecisionLike = None) -> Tiles:
    """Tiles for a shape, found on an H200. key_dim: a power of two; value_dim: not necessarily."""
    mode, largest = dot_mode(dtype, precision), key_dim == MAX_KEY_DIM
    if mode == "bf16":
        tiles = BFLOAT16_LARGEST if largest else BFLOAT16
    elif key_dim <= 64:
        tiles = FLOAT32 if mode == "f32" else TF32
    else:
        tiles = FLOAT32_LARGEST if largest else FLOAT32_WIDE
    if mode == "bf16" and gpu().capability[0] == 10:  # on Hopper and Ampere four warps have enough registers
        tiles = dataclasses.replace(tiles, chunk_gradients=dataclasses.replace(tiles.chunk_gradients, warps=8))
    chunk, value_block = tiles.chunk, tiles.value_block
    while chunk > MIN_TILE and chunk >= 2 * length:
        chunk //= 2
    while value_block > MIN_TILE and value_block >= 2 * value_dim:
        value_block //= 2
    return dataclasses.replace(tiles, chunk=chunk, value_block=value_block)


# Of the largest keys and in full float32, which takes three products, fewer warps would have too few registers: see
# `pallas_kernels.compile_table`.
BFLOAT16 = Tiles()
BFLOAT16_LARGEST = Tiles(read_chunks=1, state_gradients=Launch(1, 8, 3))
TF32 = Tiles(
    chunk=32,
    chunk_states=Launch(1, 2, 1),
    outputs=Launch(4, 2, 1),
    state_gradients=Launch(1, 1, 2),
    query_gradients=Launch(4, 4, 1),
    chunk_gradients=Launch(4, 2, 1),
)
FLOAT32 = dataclasses.replace(TF32, state_gradients=Launch(1, 4, 2), chunk_gradients=Launch(4, 4, 1))
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
FLOAT32_LARGEST = dataclasses.replace(
    FLOAT32_WIDE, outputs=Launch(4, 8, 1), query_gradients=Launch(4, 8, 1), chunk_gradients=Launch(4, 8, 1)
)
