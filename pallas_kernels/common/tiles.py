"""Sizes that matrix units take, and how a kernel is launched."""

from __future__ import annotations

import dataclasses

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


def fractions(heads: int, most: int) -> list[int]:
    """Numbers of heads, up to `most`, of which a group of `heads` has a whole number."""
    return [h for h in range(1, most + 1) if heads % h == 0]
