"""What submitit runs in a process of its own: one cell, as run.py runs it. JAX is not imported before the GPU is chosen."""

from __future__ import annotations

import dataclasses
import logging
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import submitit
from submitit.helpers import DelayedSubmission

from loglinear_jax.command_line import INTERRUPTED

# Under SLURM, how long an interrupted cell waits for what comes after SIGTERM: its end, or the signal of preemption.
LONGEST_GRACE_SECONDS = 600


@dataclasses.dataclass
class Worker:
    """Trains a variant in a process of its own and returns the exit code of the command. The tasks of a job under SLURM, where
    there are several, train it together.

    train: the command, a function of its arguments. environment: variables to set, such as the GPU's. stopped: a file
    that is there once the sweep is stopped, for a variant that was too young then to hear a signal.
    """

    train: Callable[[list[str]], int]
    arguments: list[str]
    environment: dict[str, str]
    stopped: Path

    def __call__(self) -> int:
        os.environ.update(self.environment)
        logging.getLogger("submitit").propagate = False  # it has its own handlers; the run's line is to be the last one
        preempted = []

        def save(number: int, frame: FrameType | None) -> None:
            preempted.append(number)
            os.kill(os.getpid(), signal.SIGTERM)  # which the run hears

        preemption = getattr(signal, f"SIG{submitit.JobEnvironment.USR_SIG}")
        put_back = signal.signal(preemption, save)
        signal.signal(signal.SIGTERM, signal.default_int_handler)  # before and after training, as Ctrl-C
        if self.stopped.exists():
            return INTERRUPTED
        together = ["--distributed"] if submitit.JobEnvironment().num_tasks > 1 else []
        code = self.train([*self.arguments, *together])
        signal.signal(preemption, put_back)
        if code == INTERRUPTED and preempted:
            put_back(preemption, None)  # submitit's own: calls `checkpoint`, and ends this process
        if code == INTERRUPTED and os.environ.get("SUBMITIT_EXECUTOR") == "slurm":
            # SLURM takes a job off a machine by SIGTERM and then ends it. It puts back in the queue what it ended itself.
            time.sleep(LONGEST_GRACE_SECONDS)
        return code

    def checkpoint(self, *args: Any, **kwargs: Any) -> DelayedSubmission:
        """Returns what is put back in the queue: the same call, as the run goes on by itself."""
        return DelayedSubmission(self, *args, **kwargs)
