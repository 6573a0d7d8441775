"""Packs of documents: batches for many seeds, and the packs of an evaluation, by Grain's packing.

Documents longer than seq_len are cut into pieces of seq_len tokens; what is left of each is shorter. Every epoch has the
pieces in another order. A piece of seq_len tokens is a pack by itself; shorter ones share packs in one of two ways:

    concatenate    one after the other; a piece that does not fit goes on in the next pack, so that every pack is full
    first_fit      each in the first of up to MOST_BINS packs that has room for all of it; what stays empty is not scored
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import grain
import numpy as np

PACKINGS = ("concatenate", "first_fit")
MOST_BINS = 64  # packs that first_fit fills at a time
Batch = dict[str, np.ndarray]


class Pieces:
    """The pieces of documents, by number: {"tokens", "targets"}, of seq_len tokens or fewer.

    tokens, starts: of a split of a `Corpus`. A piece predicts within its document: its first token, from the end token before
    it, to the end token behind it.
    """

    def __init__(self, tokens: np.ndarray, starts: np.ndarray, seq_len: int):
        counts = -(-np.diff(starts) // seq_len)
        number_in_document = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
        self.seq_len = seq_len
        self.num_tokens = int(starts[-1])
        self._tokens = tokens
        self._starts = np.repeat(starts[:-1], counts) + seq_len * number_in_document
        self._stops = np.minimum(self._starts + seq_len, np.repeat(starts[1:], counts))

    @property
    def source(self) -> grain.MapDataset:
        """The pieces as Grain reads them."""
        return grain.MapDataset.source(self)

    def __len__(self) -> int:
        return len(self._starts)

    def __getitem__(self, index: int) -> Batch:
        start, stop = self._starts[index], self._stops[index]
        return {"tokens": self._tokens[start:stop], "targets": self._tokens[start + 1 : stop + 1]}


class PackedBatches:
    """Training batches: {"tokens", "targets", "segment_ids"}, int32 [S, B, T] each, without end.

    segment_ids: which piece of a pack a token is of, from 1 on, and 0 where the pack is empty; there the target is -1. Every
    seed reads all pieces in its own order, a new one in each epoch, and batches continue over the ends of epochs.
    """

    def __init__(self, pieces: Pieces, *, packing: str, batch_size: int, seeds: Sequence[int]):
        self._packs = {
            seed: _packed(pieces, pieces.source.seed(seed).shuffle().repeat(), packing, seed).batch(batch_size)
            for seed in map(int, seeds)
        }

    def iterate(self, first_step: int, state: Mapping[str, Any] | None = None) -> PackedIterator:
        """Batches from that step on. state: of an iterator that has come there, or of its JSON; None, or one that lacks a seed:
        the batches before are read and left out."""
        return PackedIterator({seed: iter(packs) for seed, packs in self._packs.items()}, first_step, state)


class PackedIterator:
    """Batches of several seeds, with a state that leads to the next one."""

    def __init__(self, seeds: dict[int, grain.DatasetIterator], first_step: int, state: Mapping[str, Any] | None):
        self._seeds = seeds
        if state is None or not {str(seed) for seed in seeds} <= state.keys():
            for _ in range(first_step):
                next(self)
        else:
            for seed, iterator in seeds.items():
                iterator.set_state(_with_tuples(state[str(seed)]))

    def __next__(self) -> Batch:
        batches = [next(iterator) for iterator in self._seeds.values()]
        return _named({name: np.stack([batch[name] for batch in batches]) for name in batches[0]})

    def get_state(self) -> dict[str, Any]:
        """What `PackedBatches.iterate` takes; it can be written as JSON."""
        return {str(seed): iterator.get_state() for seed, iterator in self._seeds.items()}

    def close(self) -> None:
        """Ends nothing: a batch is packed when it is asked for."""


def evaluation_packs(
    pieces: Pieces, *, packing: str, limit: int | None = None
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(tokens, targets, segment_ids) [N, T] int32: every token of the documents is a target once, in a fixed random order of
    the pieces. limit: only this many packs."""
    packs = list(itertools.islice(_packed(pieces, pieces.source.shuffle(seed=0), packing, seed=0), limit))
    named = _named({name: np.stack([pack[name] for pack in packs]) for name in packs[0]})
    return named["tokens"], named["targets"], named["segment_ids"]


def _packed(pieces: Pieces, order: grain.MapDataset, packing: str, seed: int) -> grain.IterDataset:
    """The pieces in packs. Grain reads one piece at a time, as a slice of a memory map takes no time to wait for."""
    ordered = order.to_iter_dataset(grain.ReadOptions(num_threads=0, prefetch_buffer_size=0))
    lengths = {"tokens": pieces.seq_len, "targets": pieces.seq_len}
    if packing == "concatenate":
        return grain.experimental.ConcatThenSplitIterDataset(
            ordered, length_struct=lengths, split_full_length_features=False
        )
    bins = min(MOST_BINS, -(-pieces.num_tokens // pieces.seq_len))  # of a few documents, not those of several epochs
    return grain.experimental.FirstFitPackIterDataset(ordered, length_struct=lengths, num_packing_bins=bins, seed=seed)


def _named(packed: Batch) -> Batch:
    """A batch as training reads it, of one as Grain names its parts."""
    segments = packed["tokens_segment_ids"].astype(np.int32)
    targets = np.where(segments > 0, packed["targets"].astype(np.int32), -1)
    return {"tokens": packed["tokens"].astype(np.int32), "targets": targets, "segment_ids": segments}


def _with_tuples(state: Any) -> Any:
    """A state as it was before JSON made lists of its tuples, which Grain 0.2.18 compares with tuples."""
    if isinstance(state, Mapping):
        return {key: _with_tuples(value) for key, value in state.items()}
    return tuple(map(_with_tuples, state)) if isinstance(state, (list, tuple)) else state
