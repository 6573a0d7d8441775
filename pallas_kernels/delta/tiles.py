"""How the delta rule's kernels are cut into programs, found by trying a few launches on an H200."""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp

from pallas_kernels.common.support import gpu
from pallas_kernels.common.tiles import Launch

# `for_maps` has those of small maps.
TREE_JOINS = Launch(1, 8, 3)
TREE_JOIN_GRADIENTS = Launch(1, 8, 3)
TREE_READS = Launch(1, 4, 1)
TREE_READ_GRADIENTS = Launch(1, 4, 1)
TREE_PULLS = Launch(1, 4, 2)
TREE_NODES = Launch(1, 4, 3)


def delta_chunk(key_dim: int, value_dim: int, dtype) -> int:
    """Tokens a chunk of the kernels of the delta rule. In float32, tiles of 64 tokens find room on Hopper GPUs only."""
    if jnp.dtype(dtype).itemsize == 2:
        return 64
    largest = 64 if _is_hopper() else 32
    return next((size for size in (16, 32) if max(key_dim, value_dim) <= size), largest)


def _is_hopper() -> bool:
    """Whether matrix units read their operands from shared memory, which leaves more registers."""
    return gpu().capability[0] == 9


def delta_launch(*tile: int, gradients: bool = False, pipelined: bool = False) -> Launch:
    """Of what happens inside chunks, by the sizes of a chunk, K and V: no more warps than such tiles keep busy.

    pipelined: whether the columns of large tiles are fetched while those before are multiplied.
    """
    largest = max(tile)
    if largest > 32:
        wide = not _is_hopper() and (pipelined or largest > 64)
        return Launch(1, 8 if wide else 4, 2 if pipelined and _is_hopper() else 1)
    return Launch(1, 2 if gradients and largest > 16 else 1, 1)


def for_maps(launch: Launch, *tile: int) -> Launch:
    """A launch with one warp where a program's tile is 32 x 32 at most (timed there, in TF32), and with eight where four have
    too few registers."""
    if max(tile) <= 32:
        return dataclasses.replace(launch, warps=1)
    return dataclasses.replace(launch, warps=8) if max(tile) > 64 and not _is_hopper() else launch


def scan_columns(sequences: int, value_dim: int) -> int:
    """Columns of V a program of the kernels that go over all chunks: each reads all keys of its sequence again, so that more
    programs than fill the multiprocessors would only wait for memory."""
    columns = value_dim
    while columns > 32 and sequences * (value_dim // columns) * 4 < 3 * gpu().multiprocessors:
        columns //= 2
    return columns


def scan_launch(chunk: int, key_dim: int, columns: int, dtype, back: bool = False) -> Launch:
    """As many stages as find room, of the chunk × K tiles that a step multiplies: two forward, three backward."""
    tiles = (3 if back else 2) * chunk * key_dim * jnp.dtype(dtype).itemsize
    room = gpu().shared_memory - (key_dim + 2 * chunk) * columns * 4
    warps = 8 if key_dim * columns > 128 * 32 else 4
    return Launch(1, warps, min(max(room // tiles, 1), 3))
