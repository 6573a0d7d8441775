"""Which Fenwick levels hold the answers of a task: from its sequences alone, no model is asked."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from jaxtyping import Float

from loglinear_jax.analysis.tables import Table
from loglinear_jax.fenwick import fenwick_level, num_levels
from loglinear_jax.tasks.base import BaseTask, with_length


def answer_levels(task: BaseTask, num: int = 1024, seq_len: int | None = None) -> Float[np.ndarray, " L"] | None:
    """The share of the answers at each level, 0 .. num_levels(T) - 1, over `num` sequences: the level of the bucket in which
    the query at position t sees the position s of its answer (`BaseTask.sources`), fenwick_level(t, s).

    seq_len: T, the task's own if None. None for a task that does not say where its answers stand.
    Raises ValueError for a num or a seq_len that can't be, or sources that are not what `BaseTask.sources` promises.
    """
    task = with_length(task, num, seq_len)
    if type(task).sources is BaseTask.sources:  # asked first: a text would have to be opened
        return None
    tokens, targets = task.inspection_sequences(num)
    sources = task.sources(tokens, targets)
    if sources is None:
        return None
    _check_sources(task, np.asarray(sources), targets)
    at = np.broadcast_to(np.arange(tokens.shape[1]), tokens.shape)[targets >= 0]
    levels = fenwick_level(at, np.asarray(sources)[targets >= 0])
    return np.bincount(levels, minlength=num_levels(tokens.shape[1])) / len(levels)


def _check_sources(task: BaseTask, sources: np.ndarray, targets: np.ndarray) -> None:
    name = f"{type(task).__name__}.sources"
    if sources.shape != targets.shape or not np.issubdtype(sources.dtype, np.integer):
        raise ValueError(
            f"{name} returns shape {sources.shape} and dtype {sources.dtype}: expected integers {targets.shape}"
        )
    at, scored = np.arange(targets.shape[1]), targets >= 0
    wrong = np.where(scored, (sources < 0) | (sources > at), sources != -1)
    if wrong.any():
        row, column = np.argwhere(wrong)[0]
        expected = f"0 to {column}, as the position is scored" if scored[row, column] else "-1, as it is not scored"
        raise ValueError(f"{name} returns {sources[row, column]} at position {column}: expected {expected}")


def table(shares: Mapping[str, Float[np.ndarray, " L"]]) -> Table:
    """The levels that hold answers in some task, and their shares, a row for each task. shares: by the task in words, of
    `answer_levels`."""
    held = levels_held(shares)
    rows, raw = [], []
    for task, of_task in shares.items():
        padded = np.pad(of_task, (0, max(held) + 1))
        rows.append({"task": task} | {f"level {level}": _percent(padded[level]) for level in held})
        raw += [{"task": task, "level": level, "share": float(share)} for level, share in enumerate(of_task)]
    note = (
        "Share of the answers at each Fenwick level, as their queries see them; other levels hold none. Level ℓ ≥ 1 is a "
        "bucket of 2^(ℓ−1) tokens."
    )
    return Table("Levels that hold the answers", rows, raw, note)


def levels_held(shares: Mapping[str, Float[np.ndarray, " L"]]) -> list[int]:
    """The levels that hold answers in any of these tasks."""
    return sorted({int(level) for of_task in shares.values() for level in np.flatnonzero(of_task)})


def _percent(share: float) -> str:
    """100 % only for all of them, 0 only for none."""
    if share in (0, 1):
        return f"{100 * share:.0f} %" if share else "–"
    return f"{min(max(100 * share, 0.1), 99.9):.1f} %"
