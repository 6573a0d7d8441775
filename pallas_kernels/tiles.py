"""How the kernels are cut into programs: chunk, heads a program, warps and pipeline stages, by shape.

Found by `python -m pallas_kernels.tune`; frozen here. Results do not depend on any of it, up to rounding.
"""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class Launch:
    """How one kernel is launched: heads a program (of one group, value blocks counting as heads), warps, pipeline stages."""

    heads: int = 1
    warps: int = 4
    stages: int = 2


@dataclasses.dataclass(frozen=True)
class Tiles:
    """chunk: tokens that are multiplied out, between two states. value_block: columns of V a program.

    span: chunks whose tree one program builds in registers. radix: nodes of the tree that are joined, or parted, at once
    above that, in programs of `elements` of K x V each.
    """

    chunk: int = 64
    value_block: int = 64
    span: int = 4
    radix: int = 16
    elements: int = 1024
    chunk_states: Launch = Launch()
    merge_states: Launch = Launch()
    outputs: Launch = Launch()
    read_gradients: Launch = Launch()
    spread_gradients: Launch = Launch()
    reader_gradients: Launch = Launch()
    chunk_gradients: Launch = Launch()


def choose_tiles(length: int, groups: int, heads: int, key_dim: int, value_dim: int, dtype: str) -> Tiles:
    """Tiles for a shape; key_dim a power of two, value_dim not necessarily."""
    chunk = 64
    while chunk > 16 and chunk >= 2 * length:
        chunk //= 2
    value_block = 16
    while value_block < min(value_dim, 64):
        value_block *= 2
    return Tiles(chunk=chunk, value_block=value_block)
