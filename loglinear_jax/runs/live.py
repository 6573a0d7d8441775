"""What a run shows while it goes on: the progress bar, TensorBoard, warnings about seeds that diverged."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from tensorboardX.event_file_writer import EventsWriter
from tensorboardX.proto.event_pb2 import Event, SessionLog
from tensorboardX.summary import scalar

from loglinear_jax.distributed import is_main, to_host
from loglinear_jax.progress import progress_bar
from loglinear_jax.runs.writing import writing
from loglinear_jax.tasks import Score
from loglinear_jax.train import SeedState

log = logging.getLogger(__name__)


class Live:
    """Shows one variant's training from a step on. Processes other than the main one show nothing.

    tensorboard: the folder of its events. They are written as they come, not in a thread, so that a full disk is noticed.
    """

    def __init__(self, variant: str, score: Score, num_steps: int, step: int, tensorboard: Path):
        self._score = score
        self._bar = progress_bar(variant, num_steps, step, shown=is_main())
        self._tensorboard = tensorboard
        self._writer: EventsWriter | None = None
        if is_main():
            with writing(tensorboard):
                self._writer = EventsWriter(str(tensorboard / "events"))
            # What an earlier process showed past this step is shown no more.
            self._write(step=step + 1, session_log=SessionLog(status=SessionLog.START))

    def __enter__(self) -> Live:
        self._bar.__enter__()
        return self

    def __exit__(self, *exc: Any) -> None:
        self._bar.__exit__(*exc)
        if self._writer is not None:
            with writing(self._tensorboard):
                self._writer.close()

    def steps(self, num_steps: int) -> None:
        """So many more steps are done."""
        self._bar.update(num_steps)

    def evaluation(self, record: Mapping[str, Any]) -> None:
        """The validation of all seeds; record: as in metrics.jsonl."""
        loss, accuracy = (np.array(record[name], np.float64) for name in ("val_loss", "val_accuracy"))
        shown = self._score.of(loss, accuracy)
        text = f"{self._score.name} {self._score.text(shown.mean())} ({shown.min():.1f} to {shown.max():.1f})"
        self._bar.set_postfix_str(text, refresh=False)
        scalars = {
            "val_accuracy/mean": accuracy.mean(),
            "val_accuracy/min": accuracy.min(),
            "val_accuracy/max": accuracy.max(),
            "val_loss/mean": _finite_mean(record["val_loss"]),
            "train_loss/mean": _finite_mean(record["train_loss"]),
            "active_seeds": np.sum(record["active"]),
            "seed_steps_per_second": record["seed_steps_per_second"],
            "tokens_per_second": record["tokens_per_second"],
        }
        for name, value in scalars.items():
            if value is not None and self._writer is not None:
                self._write(step=record["step"], summary=scalar(name, value))

    def _write(self, **event: Any) -> None:
        with writing(self._tensorboard):
            self._writer.write_event(Event(wall_time=time.time(), **event))
            self._writer.flush()


class DivergedSeeds:
    """Warns once of each seed that diverged."""

    def __init__(self, variant: str, numbers: list[int]):
        self._variant, self._numbers, self._reported = variant, numbers, set()

    def report(self, state: SeedState) -> None:
        for seed, step in zip(self._numbers, to_host(state.diverged_step), strict=True):
            if step >= 0 and seed not in self._reported:
                self._reported.add(seed)
                log.warning(
                    "%s: seed %d: loss or gradient not finite at step %d; frozen there, the others go on",
                    self._variant, seed, step,
                )  # fmt: skip


def _finite_mean(values: list[float]) -> float | None:
    """The mean over the seeds that have not diverged."""
    finite = np.asarray(values)[np.isfinite(values)]
    return float(finite.mean()) if len(finite) else None
