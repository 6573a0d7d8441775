"""What training and its test read: sequences that the devices draw, or windows of a text that come from the host."""

from __future__ import annotations

import concurrent.futures
import math
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np

from loglinear_jax.distributed import to_host
from loglinear_jax.train.many_seeds import ManySeeds
from loglinear_jax.train.meshes import OF_BATCH

BATCH = ("tokens", "targets", "segment_ids")  # of windows; the last where the task has segments


class DrawnData:
    """Sequences that the devices draw themselves: a fixed set for each seed, or fresh ones.

    validation: data["validation"] of ManySeeds, on the devices. state: nothing beside the step says where it stands.
    """

    state = None

    def __init__(self, seeds: ManySeeds):
        data = seeds.data()
        self.validation = {"validation": data.pop("validation")}
        self._train = data

    def dispatches(self, sizes: Iterable[int]) -> Iterator[tuple[int, dict[str, Any]]]:
        """For each number of steps to come, that number and what `ManySeeds.train_steps` reads in them."""
        for size in sizes:
            yield size, self._train

    def close(self) -> None:
        """Ends what reads ahead."""
        self._train = {}


class StreamedData:
    """Windows of a text, every seed in its own order, from a step on.

    The next dispatch is read and copied to the devices while they work on this one. state: where it stands after the dispatch
    that was given last, as JSON can have it; another one of the same seeds goes on from there.
    """

    def __init__(self, seeds: ManySeeds, first_step: int, state: Any = None):
        self._seeds, self.state = seeds, state
        task: Any = seeds.trainer.task
        batches = task.batches(seeds.trainer.settings.batch_size, seeds.seeds_of_data)
        self._batches = batches.iterate(first_step, state)
        self._names = BATCH if task.has_segments else BATCH[:2]
        self.validation = {"validation": (place_windows(seeds, task.windows("validation")),)}

    def dispatches(self, sizes: Iterable[int]) -> Iterator[tuple[int, dict[str, Any]]]:
        with concurrent.futures.ThreadPoolExecutor(1) as pool:
            ready = None
            for size in sizes:
                coming = size, pool.submit(self._next, size)
                if ready is not None:
                    yield self._given(*ready)
                ready = coming
            if ready is not None:
                yield self._given(*ready)

    def close(self) -> None:
        self._batches.close()

    def _given(self, size: int, coming: concurrent.futures.Future) -> tuple[int, dict[str, Any]]:
        data, self.state = coming.result()
        return size, data

    def _next(self, num_steps: int) -> tuple[dict[str, Any], Any]:
        steps = [next(self._batches) for _ in range(num_steps)]
        batches = tuple(np.stack([step[name] for step in steps], axis=1) for name in self._names)
        return {"batches": self._seeds.place("batches", batches)}, self._batches.get_state()


def place_windows(seeds: ManySeeds, windows: tuple[np.ndarray, ...]) -> Any:
    """(tokens, targets) or (tokens, targets, segment_ids), [windows, T], the same for every seed, as the one part of
    data["validation"] of ManySeeds.

    Windows in which nothing is scored fill up what the devices could not share evenly.
    """
    fill = -len(windows[0]) % math.prod(seeds.mesh.shape[axis] for axis in OF_BATCH)
    padded = (np.pad(x, [(0, fill), (0, 0)], constant_values=v) for x, v in zip(windows, (0, -1, 0), strict=False))
    return seeds.place("validation", tuple(np.broadcast_to(x, (len(seeds.seeds_of_data), *x.shape)) for x in padded))


Data = DrawnData | StreamedData


def open_data(seeds: ManySeeds, first_step: int, state: Any = None) -> Data:
    """The data of a task's training from a step on, 0 for a new run. state: that of the data of a run that has come there, if
    it is known."""
    streamed = seeds.trainer.task.STREAMED
    return StreamedData(seeds, first_step, state) if streamed else DrawnData(seeds)


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
    """The loss over all of a text's test split, and that over positions 0, 1, 2-3, 4-7 and so on in the window."""
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
