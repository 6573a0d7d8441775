"""Figures and tables of language models' scores on documents, which are compared document by document, or seed by seed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from loglinear_jax.analysis import style
from loglinear_jax.analysis.table import Cell, Table, with_interval
from loglinear_jax.evaluate.documents import Measure
from loglinear_jax.evaluate.needle import LENGTH
from loglinear_jax.statistics import FEWEST_FOR_INTERVAL

DIGITS = {"nats": 3, "%": 1}  # behind the point, by unit


def measure_table(measure: Measure, subject: str) -> Table:
    """Tabulate each model's mean in every group that has tokens, and the differences from the first model.

    Args:
        measure: sums and counts by document, group and model.
        subject: what was evaluated, for the title.

    Returns:
        A row for each group, with 95 % intervals, over documents or, where a model has several, over seeds.
    """
    first, *others = measure.sums
    digits, rows = DIGITS[measure.unit], []
    for group in np.flatnonzero(measure.counts.any(axis=0)):
        counts = measure.counts[:, group]
        row: dict[str, str] = {measure.by: measure.groups[group]}
        row["documents"] = Cell(f"{(counts > 0).sum():,}", documents=int((counts > 0).sum()))
        row["scored"] = Cell(f"{counts.sum():,}", scored=int(counts.sum()))
        for model in measure.sums:
            row[model] = with_interval(*measure.mean(model, group), digits=digits)
        for model in others:
            difference = measure.mean(model, group, first)
            row[f"{model} − {first}"] = with_interval(*difference, digits=digits, sign="+", name="difference")
        rows.append(row)
    note = f"Intervals: 95 % over documents, from {FEWEST_FOR_INTERVAL} documents on."
    if (seeds := len(measure.sums[first])) > 1:
        note = f"Means of {seeds} seeds."
        if measure.unit == "nats":
            note += " Intervals: 95 % over seeds (Student's t), for these documents."
    if others:
        note += f" Differences are from {first}, paired by {'document' if seeds == 1 else 'seed'}."
    return Table(f"{measure.name} ({measure.unit})", rows, note=note, of=subject)


def seed_rows(measures: Sequence[Measure], seeds: Sequence[int]) -> list[dict[str, Any]]:
    """List each model's mean loss or accuracy of each seed, in every group of every measure that has tokens.

    Args:
        measures: of the same models and documents.
        seeds: those of `Measure.sums`.

    Returns:
        Rows with the columns seed, measure, group, tokens, and one for each model.
    """
    rows = []
    for index, seed in enumerate(seeds):
        for measure in measures:
            counts = measure.counts.sum(axis=0)
            for group in np.flatnonzero(counts):
                about = dict(seed=seed, measure=measure.name, group=measure.groups[group], tokens=counts[group])
                means = {model: x[index, :, group].sum() / counts[group] for model, x in measure.sums.items()}
                rows.append(about | {model: f"{mean:.4f}" for model, mean in means.items()})
    return rows


def draw_measure(measure: Measure, subject: str) -> Figure:
    """Draw each model's mean in every group, and beside it the differences from the first model.

    Groups in a grid (lengths and depths) are drawn as one. Shaded, or as bars: the 95 % interval of `measure_table`.

    Args:
        measure: sums and counts by document, group and model.
        subject: what was evaluated, for the title.
    """
    if measure.grid is not None:
        return _draw_grid(measure, measure.grid, subject)
    first, *others = measure.sums
    figure, (axes,) = style.new_figure(9.3 if others else 5.6, 3.6, 1, 2 if others else 1)
    groups = np.flatnonzero(measure.counts.any(axis=0))
    ordered = measure.middles is not None
    x = np.array(measure.middles)[groups] if ordered else np.arange(len(groups))
    looks, handles, how = style.looks_of(measure.sums), {}, {} if ordered else {"linestyle": "none"}
    panels = [(axes[0], measure.sums, None)] + [(axis, others, first) for axis in axes[1:]]
    for axis, models, other in panels:
        for model in models:
            values = np.transpose([measure.mean(model, group, other) for group in groups])
            line = style.draw_line(axis, x, *values, bars=not ordered, **looks[model]._asdict(), **how)
            is_variant = model in style.LAM_LOOKS or model.startswith("mixer=")
            handles[style.describe_variant(model) if is_variant else model] = line
        axis.set(xlabel=measure.by, ylabel=f"{measure.unit_name} ({measure.unit})")
        if measure.by == LENGTH:
            style.length_axis(axis, x)
        elif ordered:
            axis.set_xscale("log")
            style.log_ticks(axis.xaxis)
        else:
            axis.set_xticks(x, [measure.groups[group] for group in groups], rotation=20, ha="right")
    for axis in axes[1:]:
        axis.axhline(0, color="0.5", linewidth=1)
        axis.set_ylabel(style.literal(f"difference from {first} ({measure.unit})"))
    style.finish(figure, f"{style.sentence(measure.name)}: {subject}", handles)
    return figure


def _draw_grid(measure: Measure, grid: tuple[Sequence[str], Sequence[str]], subject: str) -> Figure:
    """A panel for each model: its mean in each row and column."""
    across, down = grid
    widths = [min(3 + 0.7 * len(across) * columns, style.FULL_WIDTH) for columns in (1, 2)]
    figure, axes = style.panel_grid(len(measure.sums), widths, 1.0, 1 + 0.4 * len(down))
    groups = range(len(measure.groups))
    means = {
        model: np.reshape([measure.mean(model, g)[0] for g in groups], (-1, len(down))).T for model in measure.sums
    }
    most = 100.0 if measure.unit == "%" else np.nanmax(list(means.values()))
    for axis, (model, values) in zip(axes.flat, means.items(), strict=False):
        shown = axis.imshow(values, vmin=0, vmax=most, cmap="cividis", aspect="auto")
        for (row, column), value in np.ndenumerate(values):
            color = "white" if style.is_dark(shown.cmap(shown.norm(value))) else "black"
            text = f"{value:.{2 if measure.unit == 'nats' else 0}f}" if np.isfinite(value) else "–"
            axis.text(column, row, text, ha="center", va="center", color=color, fontsize=8)
        axis.set_xticks(range(len(across)), across, rotation=20, ha="right")
        axis.set_yticks(range(len(down)), down)
        axis.set_ylabel("depth")
        style.label_panel(axis, model, LENGTH)
    style.finish(figure, f"{style.sentence(measure.name)} ({measure.unit}): {subject}")
    return figure
