"""Where are the answers? The Fenwick levels that hold them, from a task's sequences alone: no model is asked."""

from __future__ import annotations

from collections.abc import Mapping

import matplotlib as mpl
import numpy as np
from jaxtyping import Float, Int
from matplotlib.figure import Figure

from loglinear_jax.analysis import style
from loglinear_jax.analysis.cells import percent
from loglinear_jax.analysis.section import Section
from loglinear_jax.analysis.table import Table
from loglinear_jax.fenwick import fenwick_level, num_levels
from loglinear_jax.tasks.base import BaseTask, with_length

NAMES_WIDTH = 2.6  # inches


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
    sources = checked_sources(task, tokens, targets)
    if sources is None:
        return None
    return np.where(targets >= 0, fenwick_level(np.arange(tokens.shape[1]), np.maximum(sources, 0)), -1)


def checked_sources(
    task: BaseTask, tokens: Int[np.ndarray, "num T"], targets: Int[np.ndarray, "num T"]
) -> Int[np.ndarray, "num T"] | None:
    """`BaseTask.sources` of these sequences. Raises ValueError if they are not what that promises."""
    given = task.sources(tokens, targets)
    if given is None:
        return None
    name, sources = f"{type(task).__name__}.sources", np.asarray(given)
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
    return sources


def answer_places(
    task: BaseTask, tokens: Int[np.ndarray, " T"], targets: Int[np.ndarray, " T"], position: int
) -> Int[np.ndarray, " answers"]:
    """Where the answer to a position of a sequence stands: none where nothing is scored. Of a task that does not say, every
    place so far at which the token stands in a role of its `ANSWERS`."""
    if targets[position] < 0:
        return np.zeros(0, int)
    sources = checked_sources(task, tokens[None], targets[None])
    if sources is not None:
        return sources[0, position : position + 1]
    roles = [task.ROLES.index(name) for name in task.ANSWERS]
    places = np.flatnonzero((tokens == targets[position]) & np.isin(task.roles(tokens[None])[0], roles))
    return places[places <= position]


def levels_table(shares: Mapping[str, Float[np.ndarray, " L"]]) -> Table:
    """The levels that hold answers in some task, and their shares, a row for each task. shares: by the task in words, of
    `answer_levels`."""
    held = sorted({int(level) for of_task in shares.values() for level in np.flatnonzero(of_task)})
    rows, raw = [], []
    for task, of_task in shares.items():
        padded = np.pad(of_task, (0, max(held) + 1))
        cells = {f"level {n}": percent(padded[n], digits=1) if padded[n] else "–" for n in held}
        rows.append({"task": task} | cells)
        raw += [{"task": task, "level": level, "share": float(share)} for level, share in enumerate(of_task)]
    note = (
        "Share of the answers at each Fenwick level, as their queries see them; other levels hold none. Level ℓ ≥ 1 is a "
        "bucket of 2^(ℓ−1) tokens."
    )
    return Table("Levels that hold the answers", rows, raw, note)


def draw_answer_levels(shares: Mapping[str, Float[np.ndarray, " L"]], message: str) -> Figure:
    """A bar for each task, divided by the levels that hold its answers, in one colour for each level.

    shares: by the task in words, of `answer_levels`. message: the figure's title.
    """
    names = [style.wrap(task, NAMES_WIDTH, 9) for task in shares]
    lines = max(name.count("\n") + 1 for name in names)
    figure, ((axis,),) = style.new_figure(style.FULL_WIDTH, 1.1 + (0.25 + 0.15 * lines) * len(names))
    padded = np.zeros((len(names), max(map(len, shares.values()))))
    for row, of_task in zip(padded, shares.values(), strict=True):
        row[: len(of_task)] = 100 * of_task
    held = np.flatnonzero(padded.any(0))
    colors = dict(zip(held, mpl.colormaps["viridis"](np.linspace(0.95, 0.1, len(held))), strict=True))
    ends, handles = padded.cumsum(1), {}
    for level in held:
        color = colors[level]
        at = range(len(names))
        bars = dict(left=ends[:, level] - padded[:, level], color=color, edgecolor="w", linewidth=0.8)
        handles[f"level {level}"] = axis.barh(at, padded[:, level], **bars)
        text = "w" if style.is_dark(color) else "k"
        for row, share in enumerate(padded[:, level]):
            if share >= 4:
                middle = ends[row, level] - share / 2
                axis.text(middle, row, f"{share:.0f}", ha="center", va="center", fontsize=8, color=text)
    axis.set_yticks(range(len(names)), names, fontsize=9)
    axis.invert_yaxis()
    axis.set(xlim=(0, 100), xlabel="answers (%)")
    style.open_frame(axis)
    style.legend_below(figure, handles)
    style.title(figure, message)
    return figure


class Answers(Section):
    """A row for each task that the runs have, drawn from its settings alone."""

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
                of_task = answer_levels(run.task)
                if of_task is not None:
                    shares[name] = of_task
        if shares:
            figure = draw_answer_levels(shares, _message(shares))
            self.add(figure, "answer-levels", title="Levels that hold the answers")
            self.add(levels_table(shares), "answer-levels-table")


def _message(shares: dict[str, np.ndarray]) -> str:
    """Of one task its levels; of several how many have all their answers at one."""
    if len(shares) > 1:
        one = sum(np.count_nonzero(of_task) == 1 for of_task in shares.values())
        return f"Tasks with all their answers at one Fenwick level: {one} of {len(shares)}"
    [held] = [np.flatnonzero(of_task) for of_task in shares.values()]
    if len(held) == 1:
        return f"Every answer is at Fenwick level {held[0]}"
    return f"The answers are at {len(held)} Fenwick levels, {held[0]} to {held[-1]}"
