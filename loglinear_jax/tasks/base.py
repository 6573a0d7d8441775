"""What a task is, and how one is found by name."""

from __future__ import annotations

import dataclasses
import importlib
import importlib.util
from typing import Any, ClassVar

import jax
import numpy as np
from jaxtyping import Array, Int


@dataclasses.dataclass(frozen=True)
class Task:
    """Synthetic sequences to learn. A subclass adds its settings as fields with defaults, and the two methods."""

    seq_len: int = 128
    vocab_size: int = 128

    # What tokens are for, and which of them hold what is to be predicted; for analysis.
    ROLES: ClassVar[tuple[str, ...]] = ("token",)
    ANSWERS: ClassVar[tuple[str, ...]] = ROLES

    def roles(self, tokens: Int[np.ndarray, "num T"]) -> Int[np.ndarray, "num T"]:
        """What each token of a sample is for, as an index of ROLES."""
        return np.zeros(tokens.shape, np.int32)

    def shown(self, token: int) -> str:
        """A token in a figure."""
        return str(token)

    def marks(self) -> dict[str, int]:
        """Where parts of a sequence begin, by name; for figures."""
        return {}

    @property
    def scored(self) -> slice:
        """Where targets may be other than -1, in every sequence; training computes no logits elsewhere."""
        return slice(None)

    def check(self) -> None:
        """Raises ValueError, naming the settings, if they admit no sequence."""

    def sample(self, key: jax.Array, num: int) -> tuple[Int[Array, "num T"], Int[Array, "num T"]]:
        """`num` sequences: token ids, and at each position the id to predict there, or -1 where nothing is scored.

        Pure and traceable: it is jitted, and vmapped over the keys of the seeds.
        """
        raise NotImplementedError(f"{type(self).__name__} has no method sample(key, num)")


def find_task(name: str) -> type[Task]:
    """The Task subclass TASK of loglinear_jax/tasks/<name>.py or, if there is none, of the module `name`.

    Raises ValueError if there is no such module, or it names no TASK.
    """
    own = f"loglinear_jax.tasks.{name}"
    path = own if _exists(own) else name
    if not _exists(path):
        raise ValueError(f"task.name: no task {name!r}: there is no module {own} and no module {name}")
    module = importlib.import_module(path)
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


def check_sample(task: Task, num: int = 4) -> None:
    """Draws `num` sequences; raises ValueError if they are not what `Task.sample` promises, or nothing in them is scored."""
    drawn = jax.jit(task.sample, static_argnums=1)(jax.random.key(0), num)
    if not isinstance(drawn, (tuple, list)) or len(drawn) != 2:
        raise ValueError(f"sample returns a {type(drawn).__name__}: expected the pair (tokens, targets)")
    for name, ids, lowest in (("tokens", drawn[0], 0), ("targets", drawn[1], -1)):
        if ids.shape != (num, task.seq_len) or not np.issubdtype(ids.dtype, np.integer):
            raise ValueError(
                f"sample({num} sequences) returns {name} of shape {ids.shape} and dtype {ids.dtype}: expected integers "
                f"[{num}, task.seq_len={task.seq_len}]"
            )
        if ids.min() < lowest or ids.max() >= task.vocab_size:
            raise ValueError(
                f"sample returns {name} from {ids.min()} to {ids.max()}: expected {lowest} to task.vocab_size - 1 = "
                f"{task.vocab_size - 1}"
            )
    scored = np.asarray(drawn[1]) >= 0
    if not scored.any():
        raise ValueError("sample returns no target ≥ 0: expected something to predict")
    scored[:, task.scored] = False
    if scored.any():
        raise ValueError(f"sample has a target at position {scored.any(0).argmax()}, outside of scored = {task.scored}")


def _exists(path: str) -> bool:
    try:
        return importlib.util.find_spec(path) is not None
    except (ImportError, ValueError):  # no such package on the way, or no module's name
        return False
