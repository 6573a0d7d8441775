"""Windows of tokens: shuffled batches for many seeds, and the windows of an evaluation."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import grain
import numpy as np

from loglinear_jax.text.sources import CorpusError


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

    def iterate(self, first_step: int, state: Any = None, num_prefetch: int = 2) -> grain.DatasetIterator:
        """Batches from that step on, without end, `num_prefetch` of them read ahead in threads. state: of an iterator that has
        come there, instead of the step.

        get_state() and set_state() of the iterator hold the step, so that either way leads to the same batch; close()
        ends its threads.
        """
        options = grain.ReadOptions(num_threads=min(num_prefetch, 4), prefetch_buffer_size=num_prefetch)
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
