"""What a run shows while it goes on: the progress bar, TensorBoard, warnings about seeds that diverged."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from tensorboardX import SummaryWriter

from loglinear_jax.distributed import is_main, to_host
from loglinear_jax.progress import progress_bar
from loglinear_jax.tasks import Score
from loglinear_jax.train import SeedState

log = logging.getLogger(__name__)


class Live:
    """Shows one variant's training from a step on. Processes other than the main one show nothing."""

    def __init__(self, variant: str, score: Score, num_steps: int, step: int, tensorboard: Path):
        self._score = score
        self._bar = progress_bar(variant, num_steps, step, shown=is_main())
        self._writer = SummaryWriter(str(tensorboard), purge_step=step + 1) if is_main() else None

    def __enter__(self) -> Live:
        self._bar.__enter__()
        return self

    def __exit__(self, *exc: Any) -> None:
        self._bar.__exit__(*exc)
        if self._writer is not None:
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
                self._writer.add_scalar(name, value, record["step"])


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
