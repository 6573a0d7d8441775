"""What is read of a corpus: windows of tokens, and packs of documents by Grain's packing; batches for many seeds, and what an
evaluation reads.

Documents longer than seq_len are cut into windows of seq_len tokens and a rest. A window is a pack by itself. Rests and short
documents share packs in one of two ways:

    concatenate    one after the other; one that does not fit goes on in the next pack, so that every pack is full
    first_fit      each in the first of up to MOST_BINS packs that has room for all of it; what stays empty is not scored

Every epoch has windows and rests in another order, mixed as there are many tokens in them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import grain
import numpy as np

from loglinear_jax.text.sources import CorpusError

PACKINGS = ("concatenate", "first_fit")
MOST_BINS = 64  # packs that first_fit fills at a time
PREFETCHED = 2  # batches, in as many threads
PARTS = ("tokens", "targets", "segment_ids")
Batch = dict[str, np.ndarray]


class Pieces:
    """Pieces of documents, by number: {"tokens", "targets"}. tokens: of a split of a `Corpus`.

    A piece predicts within its document: its first token from the end token before it, up to the end token behind it.
    """

    def __init__(self, tokens: np.ndarray, starts: np.ndarray, stops: np.ndarray):
        self._tokens, self._starts, self._stops = tokens, starts, stops
        self.num_tokens = int(np.sum(stops - starts))

    def __len__(self) -> int:
        return len(self._starts)

    def __getitem__(self, index: int) -> Batch:
        start, stop = self._starts[index], self._stops[index]
        return {"tokens": self._tokens[start:stop], "targets": self._tokens[start + 1 : stop + 1]}


class CutDocuments:
    """Documents as windows of seq_len tokens, and rests, which are shorter. tokens, starts: of a split of a `Corpus`."""

    def __init__(self, tokens: np.ndarray, starts: np.ndarray, seq_len: int):
        lengths = np.diff(starts)
        counts = lengths // seq_len
        number_in_document = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
        first = np.repeat(starts[:-1], counts) + seq_len * number_in_document
        has_rest = lengths % seq_len > 0
        self.seq_len = seq_len
        self.windows = Pieces(tokens, first, first + seq_len)
        self.rests = Pieces(tokens, (starts[:-1] + seq_len * counts)[has_rest], starts[1:][has_rest])

    def packs(
        self, packing: str, order: Callable[[grain.MapDataset], grain.MapDataset], seed: int
    ) -> list[tuple[grain.IterDataset, float]]:
        """Packs of the windows and of the rests, without those of which there are none; and about how many they are."""
        whole = _in_order(self.windows, order).map(_as_pack)
        pieces, lengths = _in_order(self.rests, order), {"tokens": self.seq_len, "targets": self.seq_len}
        packs_of_rests = self.rests.num_tokens / self.seq_len
        if packing == "concatenate":
            shared = grain.experimental.ConcatThenSplitIterDataset(pieces, length_struct=lengths)
        else:
            bins = min(MOST_BINS, int(np.ceil(packs_of_rests)) or 1)  # of few documents, not those of several epochs
            shared = grain.experimental.FirstFitPackIterDataset(
                pieces, length_struct=lengths, num_packing_bins=bins, seed=seed
            )
        each = (whole, len(self.windows)), (shared.map(_renamed), packs_of_rests)
        return [(packs, many) for packs, many in each if many]


class PackedBatches:
    """Training batches: {"tokens", "targets", "segment_ids"}, int32 [S, B, T] each, without end.

    segment_ids: which piece of a pack a token is of, from 1 on, and 0 where the pack is empty; there the target is -1. Every
    seed reads all documents in its own order, a new one in each epoch, and batches continue over the ends of epochs.
    """

    def __init__(self, documents: CutDocuments, *, packing: str, batch_size: int, seeds: Sequence[int]):
        self._packs = {}
        for seed in map(int, seeds):
            packs, weights = zip(
                *documents.packs(packing, lambda pieces, seed=seed: pieces.seed(seed).shuffle().repeat(), seed),
                strict=True,
            )
            self._packs[seed] = grain.IterDataset.mix(packs, weights).batch(batch_size)

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
        return {name: np.stack([batch[name] for batch in batches]) for name in PARTS}

    def get_state(self) -> dict[str, Any]:
        """What `PackedBatches.iterate` takes; it can be written as JSON."""
        return {str(seed): iterator.get_state() for seed, iterator in self._seeds.items()}

    def close(self) -> None:
        """Ends nothing: a batch is packed when it is asked for."""


def evaluation_packs(
    documents: CutDocuments, *, packing: str, limit: int | None = None
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(tokens, targets, segment_ids) [N, T] int32: every token of the documents is a target once, in a fixed random order of
    the packs. limit: only this many packs."""
    packs = [pack for some, _ in documents.packs(packing, lambda pieces: pieces, seed=0) for pack in some]
    chosen = [packs[index] for index in np.random.default_rng(0).permutation(len(packs))[:limit]]
    tokens, targets, segment_ids = (np.stack([pack[name] for pack in chosen]) for name in PARTS)
    return tokens, targets, segment_ids


def _in_order(pieces: Pieces, order: Callable[[grain.MapDataset], grain.MapDataset]) -> grain.IterDataset:
    """Read one by one when they are asked for, as a slice of a memory map takes no time to wait for."""
    return order(grain.MapDataset.source(pieces)).to_iter_dataset(
        grain.ReadOptions(num_threads=0, prefetch_buffer_size=0)
    )


def _as_pack(window: Batch) -> Batch:
    """A window as a pack of one piece."""
    return _pack(window["tokens"], window["targets"], np.ones(len(window["tokens"])))


def _renamed(packed: Batch) -> Batch:
    """A pack as training reads it, of one as Grain names its parts."""
    return _pack(packed["tokens"], packed["targets"], packed["tokens_segment_ids"])


def _pack(tokens: np.ndarray, targets: np.ndarray, segment_ids: np.ndarray) -> Batch:
    targets = np.where(segment_ids > 0, targets.astype(np.int32), -1)
    return {"tokens": tokens.astype(np.int32), "targets": targets, "segment_ids": segment_ids.astype(np.int32)}


def _with_tuples(state: Any) -> Any:
    """A state as it was before JSON made lists of its tuples, which Grain 0.2.18 compares with tuples."""
    if isinstance(state, Mapping):
        return {key: _with_tuples(value) for key, value in state.items()}
    return tuple(map(_with_tuples, state)) if isinstance(state, (list, tuple)) else state


class SeedBatches:
    """Training batches by step: {"tokens": int32 [S, B, T], "targets": int32 [S, B, T]}, a random-access source.

    Window i is tokens[i*T : (i+1)*T], and its targets are the tokens target_offset later; a last part of the tokens
    that fills no window is left out. Every seed reads all windows in its own order, a new one in each epoch, which depends
    only on the seed and the step. Batches continue over the ends of epochs.
    """

    def __init__(self, tokens: np.ndarray, *, seq_len: int, target_offset: int, batch_size: int, seeds: Sequence[int]):
        """Raises CorpusError for settings that admit no window, or fewer windows than a batch has."""
        self.num_windows = max(0, len(tokens) - target_offset) // seq_len
        if self.num_windows < batch_size:
            raise CorpusError(
                f"seq_len={seq_len}: {len(tokens)} tokens make {self.num_windows} windows with targets "
                f"{target_offset} later, fewer than batch_size={batch_size}: give more text, or make either smaller"
            )
        self._tokens = tokens
        self._target_offset = target_offset
        self._position = np.arange(seq_len)
        # Grain orders the windows' numbers; the windows themselves are then read all at once.
        numbers = range(self.num_windows)
        self._orders = [
            grain.MapDataset.source(numbers).seed(int(seed)).shuffle().repeat().batch(batch_size) for seed in seeds
        ]

    def __len__(self) -> int:
        return min(len(order) for order in self._orders)

    def __getitem__(self, step: int) -> dict[str, np.ndarray]:
        windows = np.stack([order[step] for order in self._orders])
        at = windows[..., None] * len(self._position) + self._position
        return {
            "tokens": self._tokens[at].astype(np.int32),
            "targets": self._tokens[at + self._target_offset].astype(np.int32),
        }

    def iterate(self, first_step: int, state: Any = None) -> grain.DatasetIterator:
        """Batches from that step on, without end, PREFETCHED of them read ahead in threads. state: of an iterator that has
        come there, instead of the step.

        get_state() and set_state() of the iterator hold the step, so that either way leads to the same batch; close()
        ends its threads.
        """
        options = grain.ReadOptions(num_threads=PREFETCHED, prefetch_buffer_size=PREFETCHED)
        iterator = iter(grain.MapDataset.source(self).to_iter_dataset(options))
        if state is None:
            grain.experimental.set_next_index(iterator, first_step)
        else:
            iterator.set_state(state)
        return iterator


def evaluation_windows(
    tokens: np.ndarray, *, seq_len: int, target_offset: int, limit: int | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """Inputs and targets, int32 [N, T]: every token from target_offset on is a target exactly once, in order.

    The last window is filled up with token 0 and target -1. limit: only this many windows, from 1 on.
    Raises CorpusError if there is no token to predict.
    """
    num_targets = len(tokens) - target_offset
    if num_targets < 1:
        raise CorpusError(f"seq_len={seq_len}: {len(tokens)} tokens have no targets {target_offset} later")
    num_windows = -(-num_targets // seq_len)
    if limit is not None and limit < num_windows:
        num_windows = limit
        num_targets = limit * seq_len
    inputs = np.zeros(num_windows * seq_len, np.int32)
    targets = np.full(num_windows * seq_len, -1, np.int32)
    inputs[:num_targets] = tokens[:num_targets]
    targets[:num_targets] = tokens[target_offset : target_offset + num_targets]
    return inputs.reshape(-1, seq_len), targets.reshape(-1, seq_len)
