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
    span: int = 2
    radix: int = 8
    elements: int = 1024
    chunk_states: Launch = Launch(1, 8, 2)
    merge_states: Launch = Launch()
    outputs: Launch = Launch(4, 4, 2)
    read_gradients: Launch = Launch(1, 4, 3)
    spread_gradients: Launch = Launch(1, 4, 3)
    reader_gradients: Launch = Launch(8, 8, 3)
    chunk_gradients: Launch = Launch(8, 4, 2)

    def fitted(self, group_heads: int, value_blocks: int) -> Tiles:
        """The same with no more heads a program than a group has, in whole heads or whole fractions of one head's blocks."""

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


def choose_tiles(length: int, groups: int, heads: int, key_dim: int, value_dim: int, dtype: str) -> Tiles:
    """Tiles for a shape; key_dim a power of two, value_dim not necessarily."""
    chunk = 64
    while chunk > 16 and chunk >= 2 * length:
        chunk //= 2
    value_block = 16
    while value_block < min(value_dim, 64):
        value_block *= 2
    return Tiles(chunk=chunk, value_block=value_block)
