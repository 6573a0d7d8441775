"""λ as the Hopper kernels fetch it."""

from __future__ import annotations

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.attention.triton import AttentionSizes
from pallas_kernels.common.launch import pad
from pallas_kernels.common.mosaic import BLOCK, BY_ROW, plain


class Lams:
    """λ [B, T, H, L] as kernels fetch it: of a block's tokens and a head, the `needed` first levels, or none with one state.

    TMA takes FLOATS numbers at a time, 16 bytes, and begins at multiples of so many; a start elsewhere ends in an illegal
    instruction. So what lies around the levels comes with them. An odd multiple of FLOATS a token leaves the tokens that a
    warp reads at once in different banks of shared memory.
    """

    FLOATS = 4

    def __init__(self, lam, needed: int, sizes: AttentionSizes):
        self.operand, self.copies = None, 0 if sizes.one_state else 1
        if sizes.one_state:
            return
        levels = max(lam.shape[3], sizes.levels)
        while levels * sizes.heads % self.FLOATS:
            levels += 1
        self.levels, self.width = levels, levels * sizes.heads
        before = max(head * levels % self.FLOATS for head in range(sizes.heads))
        parts = -(-(before + needed) // self.FLOATS)
        self.fetched = min((parts | 1) * self.FLOATS, self.width)
        self.operand = pad(lam, (3, levels)).reshape(*lam.shape[:2], self.width)

    def _start(self, head):
        first = lax.div(head * self.levels, self.FLOATS) * self.FLOATS
        return jnp.minimum(first, self.width - self.fetched)

    def slots(self, depth: int, rows: int):
        """Shared memory for so many heads, of so many blocks."""
        return plain(depth, rows, BLOCK, self.fetched) if self.copies else None

    def fetch(self, lam_ref, sequence, tokens, head, fetched_ref, slot, row, barrier) -> None:
        if self.copies:
            source = lam_ref.at[sequence, tokens, pl.ds(self._start(head), self.fetched)]
            plgpu.copy_gmem_to_smem(source, fetched_ref.at[slot, row], barrier)

    def load(self, fetched_ref, slot, row, head, level):
        """[tokens] of a level."""
        if not self.copies:
            return 1.0
        here = fetched_ref.at[slot, row].at[:, head * self.levels - self._start(head) + level]
        return plgpu.load(here, layout=BY_ROW, optimized=False)  # as tokens are not next to each other
