"""What a task is, and how one is found by name."""

from __future__ import annotations

import dataclasses
import importlib
from typing import Any

import jax
from jaxtyping import Array, Int


@dataclasses.dataclass(frozen=True)
class Task:
    """Synthetic sequences to learn. A subclass adds its settings as fields with defaults, and the two methods."""

    seq_len: int = 128
    vocab_size: int = 128

    def check(self) -> None:
        """Raises ValueError, naming the settings, if they admit no sequence."""
        raise NotImplementedError

    def sample(self, key: jax.Array, num: int) -> tuple[Int[Array, "num T"], Int[Array, "num T"]]:
        """`num` sequences: token ids, and at each position the id to predict there, or -1 where nothing is scored.

        Pure and traceable: it is jitted, and vmapped over the keys of the seeds.
        """
        raise NotImplementedError


def find_task(name: str) -> type[Task]:
    """The Task subclass TASK of loglinear_jax/tasks/<name>.py, or of the module of that import path if it has a dot.

    Raises ValueError if there is no such module, or it names no TASK.
    """
    path = name if "." in name else f"loglinear_jax.tasks.{name}"
    try:
        module = importlib.import_module(path)
    except ModuleNotFoundError as error:
        if error.name is None or not path.startswith(error.name):
            raise
        raise ValueError(f"task.name: no task {name!r}: there is no module {path}") from None
    if not hasattr(module, "TASK"):
        raise ValueError(f"task.name: {path} names no TASK, the Task subclass to use")
    return module.TASK


def load_task(name: str, **settings: Any) -> Task:
    """The task of that name (see `find_task`) with these settings. Raises ValueError if they are unknown or impossible."""
    task_class = find_task(name)
    known = {field.name for field in dataclasses.fields(task_class)}
    if unknown := sorted(set(settings) - known):
        raise ValueError(f"task.{unknown[0]}: {name} has no such setting; it has {', '.join(sorted(known))}")
    task = task_class(**settings)
    task.check()
    return task
