"""What a run shows while it goes on: the progress bar, TensorBoard and, if it is asked for, W&B."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from tensorboardX.event_file_writer import EventsWriter
from tensorboardX.proto.event_pb2 import Event, SessionLog
from tensorboardX.summary import scalar

from loglinear_jax.distributed import is_main
from loglinear_jax.progress import progress_bar
from loglinear_jax.runs.writing import writing
from loglinear_jax.tasks import Score


class Live:
    """Shows the training of variants in one program, from a step on. Processes other than the main one show nothing.

    tensorboards: by variant, the folder of its events. They are written as they come, not in a thread, so that a full disk is
    noticed. wandb_runs: by variant, its wandb.Run, if there is one.
    """

    def __init__(
        self,
        score: Score,
        num_steps: int,
        step: int,
        tensorboards: Mapping[str, Path],
        wandb_runs: Mapping[str, Any],
    ):
        self._score = score
        first, *others = tensorboards
        also = f" and {len(others)} of other rates" if others else ""
        self._bar = progress_bar(first + also, num_steps, step, shown=is_main())
        self._tensorboards, self._wandb_runs = tensorboards, wandb_runs
        self._writers: dict[str, EventsWriter] = {}
        for variant, folder in tensorboards.items() if is_main() else ():
            with writing(folder):
                self._writers[variant] = EventsWriter(str(folder / "events"))
            # What an earlier process showed past this step is shown no more.
            self._write(variant, step=step + 1, session_log=SessionLog(status=SessionLog.START))

    def __enter__(self) -> Live:
        self._bar.__enter__()
        return self

    def __exit__(self, *exc: Any) -> None:
        self._bar.__exit__(*exc)
        for run in self._wandb_runs.values():
            run.finish(exit_code=None if exc[0] is None else 1)
        for variant, writer in self._writers.items():
            with writing(self._tensorboards[variant]):
                writer.close()

    def steps(self, num_steps: int) -> None:
        """So many more steps are done."""
        self._bar.update(num_steps)

    def evaluating(self) -> None:
        """Steps wait for a validation."""
        self._bar.set_postfix_str("validating")

    def evaluation(self, records: Sequence[Mapping[str, Any]]) -> None:
        """The validation of all seeds of some variants; records: as in metrics.jsonl."""
        loss, accuracy = (
            np.concatenate([np.array(record[name], np.float64) for record in records])
            for name in ("val_loss", "val_accuracy")
        )
        shown = self._score.of(loss, accuracy)
        text = f"{self._score.name} {self._score.text(shown.mean())} ({shown.min():.1f} to {shown.max():.1f})"
        self._bar.set_postfix_str(text, refresh=False)
        for record in records:
            self._show(record)

    def _show(self, record: Mapping[str, Any]) -> None:
        accuracy = np.array(record["val_accuracy"], np.float64)
        scalars = {
            "val_accuracy/mean": accuracy.mean(),
            "val_accuracy/min": accuracy.min(),
            "val_accuracy/max": accuracy.max(),
            "val_loss/mean": _finite_mean(record["val_loss"]),
            "train_loss/mean": _finite_mean(record["train_loss"]),
            "active_seeds": np.sum(record["active"]),
            "seed_steps_per_second": record["seed_steps_per_second"],
            "tokens_per_second": record["tokens_per_second"],
            "utilisation": record.get("utilisation"),
        }
        scalars = {name: float(value) for name, value in scalars.items() if value is not None}
        for name, value in scalars.items() if record["variant"] in self._writers else ():
            self._write(record["variant"], step=record["step"], summary=scalar(name, value))
        if record["variant"] in self._wandb_runs:
            self._wandb_runs[record["variant"]].log(scalars, step=record["step"])

    def _write(self, variant: str, **event: Any) -> None:
        with writing(self._tensorboards[variant]):
            self._writers[variant].write_event(Event(wall_time=time.time(), **event))
            self._writers[variant].flush()


def _finite_mean(values: list[float]) -> float | None:
    """The mean over the seeds that have not diverged."""
    finite = np.asarray(values)[np.isfinite(values)]
    return float(finite.mean()) if len(finite) else None
