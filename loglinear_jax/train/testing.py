"""Testing: what trained parameters reach on sequences that neither training nor validation reads."""

from __future__ import annotations

from typing import Any

import numpy as np

from loglinear_jax.distributed import to_host
from loglinear_jax.train.data import place_windows
from loglinear_jax.train.many_seeds import ManySeeds


def measure_test(seeds: ManySeeds, params: Any) -> dict[str, Any]:
    """Measurements of the parameters [replicas, ...] on the task's test sequences, by the names of an outcome's fields.

    Each list, also in a dict, has one entry for each of `seeds.numbers`; what is no list is the same for all of them.
    """
    return _test_windows(seeds, params) if seeds.trainer.task.STREAMED else _test_drawn(seeds, params)


def _test_drawn(seeds: ManySeeds, params: Any) -> dict[str, Any]:
    """Loss and accuracy on the test sequences of each seed, and the accuracy on each part of them if there are several."""
    loss, accuracy = (x.astype(np.float64) for x in seeds.test(params))
    found = {"test_loss": loss.mean(axis=1).tolist(), "test_accuracy": accuracy.mean(axis=1).tolist()}
    if len(names := seeds.trainer.task.evaluated_on.names) > 1:
        found["test_accuracy_of_parts"] = dict(zip(names, accuracy.T.tolist(), strict=True))
    return found


def _test_windows(seeds: ManySeeds, params: Any) -> dict[str, Any]:
    """What was predicted; the loss over all of a text's test split; and that by position in the window, over positions 0, 1,
    2-3, 4-7 and so on, as far as the test split has such positions."""
    task: Any = seeds.trainer.task
    windows = place_windows(seeds, task.windows("test"))
    loss, scored = (x.astype(np.float64) for x in to_host(seeds.sums_by_position(params, windows)))
    reached = int(np.count_nonzero(scored[0]))  # by the longest window, which is the first
    by_position = loss[:, :reached] / scored[:, :reached]
    starts = [0, *(1 << np.arange((reached - 1).bit_length()))]
    parts = np.split(by_position, starts[1:], axis=1)
    return {
        "predicts": task.predicts,
        "test_loss": (loss.sum(axis=1) / scored.sum(axis=1)).tolist(),
        "test_loss_from_position": {
            str(start): part.mean(axis=1).tolist() for start, part in zip(starts, parts, strict=True)
        },
    }
