"""Places in memory of the delta rule's kernels for Hopper GPUs, and loads from them."""

from __future__ import annotations

from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.common.mosaic import BLOCK, BY_ROW, F32, TILE
from pallas_kernels.delta.chunks import ChunkSizes
from pallas_kernels.delta.tree import MapSizes

FETCHING = 24  # registers of a thread that only fetches


class Place:
    """Where the parts of a head's chunk are in global memory. columns: a block of 64 values."""

    def __init__(self, sizes: ChunkSizes | MapSizes, sequence_and_head):
        self.sizes = sizes
        self.sequence, self.head = lax.div(sequence_and_head, sizes.heads), lax.rem(sequence_and_head, sizes.heads)

    @property
    def group(self):
        return lax.div(self.head, self.sizes.group_heads)

    @staticmethod
    def columns(block):
        return pl.ds(block * BLOCK, BLOCK)

    def tokens(self, chunk):
        return pl.ds(chunk * BLOCK, BLOCK)

    def keys(self, ref, chunk):
        """[C, K] of an array [B, T, G, K]."""
        return ref.at[self.sequence, self.tokens(chunk), self.group]

    def values(self, ref, chunk, block):
        """[C, 64] of an array [B, T, H, V]."""
        return ref.at[self.sequence, self.tokens(chunk), self.head, self.columns(block)]

    def by_token(self, ref, chunk):
        """[C] of an array [B, H, T]."""
        return ref.at[self.sequence, self.head, self.tokens(chunk)]

    def whole(self, ref, chunk):
        """What an array [B, H, N, ...] has of a chunk."""
        return ref.at[self.sequence, self.head, chunk]

    def of_chunk(self, ref, chunk, block):
        """[rows, 64] of an array [B, H, N, rows, V]."""
        return ref.at[self.sequence, self.head, chunk, :, self.columns(block)]

    def tile(self, ref, place, row, column):
        """[64, 64] of an array [B, H, ..., rows, columns]. place: indices of the axes between."""
        return ref.at[self.sequence, self.head, *place, self.columns(row), self.columns(column)]

    def levels(self, ref, chunk, first: int, number: int):
        """[number, C] of an array [B, H, levels, T]."""
        return ref.at[self.sequence, self.head, pl.ds(first, number), self.tokens(chunk)]

    def state(self, ref, block):
        """[K, 64] of an array [B, H, K, V]."""
        return ref.at[self.sequence, self.head, :, self.columns(block)]


def fetch_parts(pairs, barrier) -> None:
    for source, target in pairs:
        plgpu.copy_gmem_to_smem(source, target, barrier)


def load_by_row(ref):
    return plgpu.load(ref, layout=BY_ROW)


def load_tile(ref):
    return plgpu.load(ref, layout=TILE).astype(F32)
