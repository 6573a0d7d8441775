"""Where are the answers? The Fenwick levels that hold them, from a task's sequences alone: no model is asked."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from jaxtyping import Float, Int

from loglinear_jax.analysis.section import Section
from loglinear_jax.analysis.table import Cell, Table, percent
from loglinear_jax.fenwick import fenwick_level, num_levels
from loglinear_jax.tasks.base import BaseTask, with_length


def answer_levels(task: BaseTask, num: int = 1024, seq_len: int | None = None) -> Float[np.ndarray, " L"] | None:
    """The share of the answers at each level, 0 .. num_levels(T) - 1, over `num` sequences: the level of the bucket in which
    the query at position t sees the position s of its answer (`BaseTask.sources`), fenwick_level(t, s).

    seq_len: T, that of the longest trained sequences if None. None for a task that does not say where its answers stand.
    Raises ValueError for an invalid num or seq_len, and for invalid sources.
    """
    task = with_length(task.trained_on.longest_part, num, seq_len)
    if type(task).sources is BaseTask.sources:  # asked first: a text would have to be opened
        return None
    tokens, targets = task.inspection_sequences(num)
    levels = levels_of_answers(task, tokens, targets)
    if levels is None:
        return None
    counts = np.bincount(levels[levels >= 0], minlength=num_levels(tokens.shape[1]))
    return counts / counts.sum()


def levels_of_answers(
    task: BaseTask, tokens: Int[np.ndarray, "num T"], targets: Int[np.ndarray, "num T"]
) -> Int[np.ndarray, "num T"] | None:
    """The level at which each scored position of these sequences of the task sees its answer; -1 where nothing is scored.

    None where the task does not say. Raises ValueError for invalid sources.
    """
    sources = _checked_sources(task, tokens, targets)
    if sources is None:
        return None
    return np.where(targets >= 0, fenwick_level(np.arange(tokens.shape[1]), np.maximum(sources, 0)), -1)


def _checked_sources(task: BaseTask, tokens: np.ndarray, targets: np.ndarray) -> Int[np.ndarray, "num T"] | None:
    """`BaseTask.sources` of these sequences. Raises ValueError if they are not what that promises."""
    given = task.sources(tokens, targets)
    if given is None:
        return None
    name, sources = f"{type(task).__name__}.sources", np.asarray(given)
    if sources.shape != targets.shape or not np.issubdtype(sources.dtype, np.integer):
        found = f"shape {sources.shape} and dtype {sources.dtype}"
        raise ValueError(f"{name} returns {found}: expected integers {targets.shape}")
    scored = targets >= 0
    wrong = np.where(scored, (sources < 0) | (sources > np.arange(targets.shape[1])), sources != -1)
    if wrong.any():
        row, column = np.argwhere(wrong)[0]
        expected = f"0 to {column}, as the position is scored" if scored[row, column] else "-1, as it is not scored"
        raise ValueError(f"{name} returns {sources[row, column]} at position {column}: expected {expected}")
    return sources


def answer_places(
    task: BaseTask, tokens: Int[np.ndarray, " T"], targets: Int[np.ndarray, " T"], position: int
) -> Int[np.ndarray, " answers"]:
    """Where the answer to a position of a sequence stands: none where nothing is scored. Of a task that does not say, every
    place so far at which the token stands in a role of its `ANSWERS`."""
    if targets[position] < 0:
        return np.zeros(0, int)
    sources = _checked_sources(task, tokens[None], targets[None])
    if sources is not None:
        return sources[0, position : position + 1]
    roles = [task.ROLES.index(name) for name in task.ANSWERS]
    places = np.flatnonzero((tokens == targets[position]) & np.isin(task.roles(tokens[None])[0], roles))
    return places[places <= position]


def levels_table(shares: Mapping[str, Float[np.ndarray, " L"]]) -> Table:
    """The levels that hold answers in some task, and their shares, a row for each task. shares: `answer_levels` by the task in
    words."""
    held = sorted({int(level) for of_task in shares.values() for level in np.flatnonzero(of_task)})
    rows = []
    for task, of_task in shares.items():
        padded = np.pad(of_task, (0, max(held) + 1))
        found = {n: Cell(percent(padded[n], 1) if padded[n] else "–", share=float(padded[n])) for n in held}
        rows.append({"task": Cell(task, task=task)} | {f"level {n}": cell for n, cell in found.items()})
    note = (
        "Share of the answers at each Fenwick level, as their queries see them; other levels hold none. Level ℓ ≥ 1 is a "
        "bucket of 2^(ℓ−1) tokens."
    )
    return Table("Levels that hold the answers", rows, note)


class Answers(Section):
    """A row for each task that the runs have, from its settings alone."""

    NAME = "answers"
    TITLE = "Where the answers are"
    INTRO = (
        "From sequences of the tasks alone, whatever was trained. Where one Fenwick level holds every answer, a λ that is "
        "the same for every query can single them out; where several do, which one it is may differ from query to query."
    )

    def show_all(self) -> None:
        shares = {}
        for name, run in {run.task.describe(): run for run in self.context.runs}.items():
            with self.context.attempt(run.workdir, "levels of the answers"):
                if (of_task := answer_levels(run.task)) is not None:
                    shares[name] = of_task
        if shares:
            self.add(levels_table(shares), "answer-levels-table")
