"""What a run shows while it goes on: the progress bar, TensorBoard and, if it is asked for, Weights & Biases.

W&B shows each variant as a run of its own. Its library's environment variables say where to: WANDB_MODE=offline writes to the
variant's folder alone.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from tensorboardX.event_file_writer import EventsWriter
from tensorboardX.proto.event_pb2 import Event, SessionLog
from tensorboardX.summary import scalar

from loglinear_jax.command_line import needs_extra
from loglinear_jax.distributed import is_main
from loglinear_jax.progress import progress_bar
from loglinear_jax.runs.folders import VariantFolder
from loglinear_jax.runs.writing import RunFailed, replace_file, writing
from loglinear_jax.settings import first_line
from loglinear_jax.tasks import Score


class Live:
    """Shows the training of variants in one program, from a step on. Processes other than the main one show nothing.

    name: of the progress bar. folders: by variant. wandb_runs: by variant, its wandb.Run, if there is one. TensorBoard's events
    are written as they come, not in a thread, so that a full disk is noticed.
    """

    def __init__(
        self,
        name: str,
        score: Score,
        num_steps: int,
        step: int,
        folders: Mapping[str, VariantFolder],
        wandb_runs: Mapping[str, Any],
    ):
        self._score = score
        self._bar = progress_bar(name, num_steps, step, shown=is_main())
        self._folders, self._wandb_runs = folders, wandb_runs
        self._writers: dict[str, EventsWriter] = {}
        for variant, folder in folders.items() if is_main() else ():
            with writing(folder.tensorboard):
                self._writers[variant] = EventsWriter(str(folder.tensorboard / "events"))
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
            with writing(self._folders[variant].tensorboard):
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
            np.concatenate([_array(record, name) for record in records]) for name in ("val_loss", "val_accuracy")
        )
        shown = self._score.of(loss, accuracy)
        text = f"{self._score.name} {self._score.text(shown.mean())} ({shown.min():.1f} to {shown.max():.1f})"
        self._bar.set_postfix_str(text, refresh=False)
        for record in records:
            scalars, variant = _scalars(record), record["variant"]
            for name, value in scalars.items() if variant in self._writers else ():
                self._write(variant, step=record["step"], summary=scalar(name, value))
            if variant in self._wandb_runs:
                self._wandb_runs[variant].log(scalars, step=record["step"])

    def _write(self, variant: str, **event: Any) -> None:
        with writing(self._folders[variant].tensorboard):
            self._writers[variant].write_event(Event(wall_time=time.time(), **event))
            self._writers[variant].flush()


def _array(record: Mapping[str, Any], name: str) -> np.ndarray:
    return np.array(record[name], np.float64)


def _scalars(record: Mapping[str, Any]) -> dict[str, float]:
    """What is drawn of an evaluation; losses are means over the seeds that have not diverged."""
    accuracy = _array(record, "val_accuracy")
    scalars = {f"val_accuracy/{name}": getattr(accuracy, name)() for name in ("mean", "min", "max")}
    for name in ("val_loss", "train_loss"):
        loss = _array(record, name)
        if np.isfinite(loss).any():
            scalars[f"{name}/mean"] = loss[np.isfinite(loss)].mean()
    scalars["active_seeds"] = np.sum(record["active"])
    rates = ("seed_steps_per_second", "tokens_per_second", "utilisation")
    scalars |= {name: record[name] for name in rates if name in record}
    return {name: float(value) for name, value in scalars.items()}


def check_wandb() -> None:
    """Raises ModuleNotFoundError, with what to install, if the library is missing."""
    with needs_extra("wandb"):
        import wandb  # noqa: F401


def open_wandb(project: str, folder: VariantFolder, config: dict[str, Any]) -> Any:
    """The wandb.Run of a variant: a new one, or that which an earlier process of it has begun. Raises RunFailed if W&B
    refuses."""
    import wandb

    known = folder.wandb_file.read_text(encoding="utf-8").strip() if folder.wandb_file.exists() else None
    group, variant = folder.path.parts[-2:]
    try:
        run = wandb.init(
            project=project,
            id=known,
            resume="allow",
            group=group,
            name=f"{group}/{variant}",
            config=config,
            dir=str(folder.path),
            reinit="create_new",  # the variants of one program are shown at the same time
        )
    except wandb.errors.Error as error:
        raise RunFailed(f"--wandb={project}: {first_line(error)}") from error
    replace_file(folder.wandb_file, lambda file: file.write(run.id + "\n"))
    return run
