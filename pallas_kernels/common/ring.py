"""A ring of slots in shared memory, which one warpgroup fills and others use; two barriers say of each slot which it is."""

from __future__ import annotations

import dataclasses
from typing import Any

from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu


def ring_barriers(depth: int, filled_by: int, used_by: int):
    """(full, empty) of a `Ring`. filled_by: how many copies, or arrivals, fill a slot; used_by: how many warpgroups use it."""
    return tuple(plgpu.Barrier(num_arrivals=number, num_barriers=depth) for number in (filled_by, used_by))


@dataclasses.dataclass(frozen=True)
class Ring:
    """full, empty: barriers, one a slot: all of it has been fetched; all have used it. depth: how many slots there are.

    The warpgroup that fills it goes `to_fill` → copies that arrive at `full_at(slot)`, or stores and an arrival of its own, and
    at the end `drain`; the others go `to_use` → `release`.
    """

    full: Any
    empty: Any
    depth: int

    def slot(self, count):
        """The slot of fetch number `count`."""
        return lax.rem(count, self.depth)

    def to_fill(self, count):
        """The slot for fetch number `count`, once what it held has been used."""
        slot = self.slot(count)

        @pl.when(count >= self.depth)
        def _():
            plgpu.barrier_wait(self.empty.at[slot])

        return slot

    def full_at(self, slot):
        """The barrier at which copies into the slot arrive."""
        return self.full.at[slot]

    def drain(self, count) -> None:
        """Waits until the last slots of `count` fetches have been used."""
        for slot in range(self.depth):

            @pl.when(count > slot)
            def _(slot=slot):
                plgpu.barrier_wait(self.empty.at[slot])

    def to_use(self, count):
        """The slot of fetch number `count`, once it is full."""
        slot = self.slot(count)
        self.wait(slot)
        return slot

    def wait(self, slot) -> None:
        """Waits until the slot is full."""
        plgpu.barrier_wait(self.full.at[slot])

    def release(self, slot) -> None:
        """Says that this warpgroup has used the slot."""
        plgpu.barrier_arrive(self.empty.at[slot])
