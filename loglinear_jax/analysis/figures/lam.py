"""Figures of λ: over the tokens of a sequence, by head and level, and how much it depends on its input."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from jaxtyping import Bool, Float
from matplotlib.figure import Figure

from loglinear_jax.analysis.figures.style import (
    FULL_WIDTH,
    MARK,
    handles_of,
    hide,
    legend_below,
    new_figure,
    open_frame,
    title,
    wrap,
)
from loglinear_jax.analysis.labels import colors_of, describe_variant

CELL_DIGITS = 2


@dataclasses.dataclass(frozen=True)
class Panel:
    """One heatmap under a title. values: [rows, columns]; by head [layers, heads, levels]."""

    values: Float[np.ndarray, "*shape"]
    title: str
    used: Bool[np.ndarray, "*shape"] | None = None  # cells that have no effect are drawn faded
    marks: Mapping[str, int] = dataclasses.field(default_factory=dict)


def draw_lam_over_tokens(panels: Sequence[Sequence[Panel]], message: str) -> Figure:
    """Heatmaps of λ, levels × positions, in a grid of panels, at most three beside each other; each panel has its own colour
    scale. message: the figure's title.

    Where a level's bucket is empty λ has no effect: those cells are faded. Marks are red dashed lines.
    """
    panels = _at_most(3, panels)
    columns = max(map(len, panels))
    levels = max(panel.values.shape[0] for row in panels for panel in row)
    height = len(panels) * (1.5 + 0.13 * levels) + 0.7
    figure, axes = new_figure(FULL_WIDTH, height, len(panels), columns)
    for row_axes, row in zip(axes, panels, strict=True):
        hide(row_axes[len(row) :])
        for axis, panel in zip(row_axes, row, strict=False):
            levels, length = panel.values.shape
            used = np.ones_like(panel.values, bool) if panel.used is None else panel.used
            low, high = _limits(panel.values[used])
            extent = (-0.5, length - 0.5, -0.5, levels - 0.5)
            how = dict(aspect="auto", origin="lower", extent=extent, vmin=low, vmax=high, interpolation="nearest")
            image = axis.imshow(panel.values, cmap="viridis", alpha=np.where(used, 1.0, 0.22), **how)
            bar = figure.colorbar(image, ax=axis, pad=0.01, aspect=12, label="λ")
            bar.solids.set_alpha(1)
            bar.ax.tick_params(labelsize=8)
            bar.ax.yaxis.get_major_locator().set_params(nbins=4)
            for number, (name, position) in enumerate(sorted(panel.marks.items(), key=lambda mark: mark[1])):
                axis.axvline(position - 0.5, color=MARK, linestyle="--", linewidth=1.4)
                left = position > 0.5 * length  # of its line, where the end is near on the right
                axis.annotate(
                    f"{name} →" if left else f"← {name}", (position - 0.5, 1.0), xycoords=("data", "axes fraction"),
                    xytext=(-2 if left else 2, 2 + 9 * (number % 2)), textcoords="offset points",
                    ha="right" if left else "left", va="bottom", fontsize=7, color=MARK,
                )  # fmt: skip
            lines = min(len(panel.marks), 2)
            width = figure.get_figwidth() / columns - 0.5
            axis.set_title(wrap(panel.title, width, 9), fontsize=9, pad=6 + 9 * lines)
            axis.set(xlabel="position (token)", ylabel="level")
            axis.xaxis.get_major_locator().set_params(nbins=6, integer=True)
            axis.set_yticks(range(0, levels, 1 if levels <= 8 else 2))
            axis.tick_params(labelsize=8)
    title(figure, f"{message}\ncolour: λ (faded where the level's bucket is empty, so that λ has no effect)")
    return figure


def draw_lam_by_head(panels: Sequence[Sequence[Panel]], message: str) -> Figure:
    """Heatmaps of (layers · heads) × levels with the numbers in the cells, a line between layers; the panels' values are
    [layers, heads, levels]. Levels of which no panel has a value are left out. message: the figure's title."""
    levels = max(1 + np.flatnonzero(np.isfinite(p.values).any((0, 1)))[-1:].sum() for row in panels for p in row)
    names_width, bar_width = 0.9, 0.65  # inches
    wanted = max(0.27 * levels, 1.9) + bar_width
    panels = _at_most(int(np.clip((FULL_WIDTH - names_width) // wanted, 1, 3)), panels)
    columns = max(map(len, panels))
    width = min(max(wanted * columns + names_width, 5.5), FULL_WIDTH)
    heights = [0.3 * max(p.values.shape[0] * p.values.shape[1] for p in row) + 1.3 for row in panels]
    grid = {"height_ratios": heights}
    figure, axes = new_figure(width, sum(heights) + 0.7, len(panels), columns, gridspec_kw=grid)
    numbers = ((width - names_width) / columns - bar_width) / levels > 0.24  # inches a cell: room for them
    for row_axes, row in zip(axes, panels, strict=True):
        hide(row_axes[len(row) :])
        for axis, panel in zip(row_axes, row, strict=False):
            layers, heads, _ = panel.values.shape
            values = panel.values[..., :levels].reshape(layers * heads, -1)
            low, high = _limits(values[np.isfinite(values)])
            image = axis.imshow(values, cmap="viridis", aspect="auto", vmin=low, vmax=high)
            for (i, j), value in np.ndenumerate(values):
                if numbers and np.isfinite(value):
                    dark = np.dot(image.to_rgba(value)[:3], (0.3, 0.59, 0.11)) < 0.5
                    axis.text(
                        j, i, short(float(value)), ha="center", va="center", fontsize=7, color="w" if dark else "k"
                    )
            bar = figure.colorbar(image, ax=axis, pad=0.01, aspect=14)
            bar.ax.tick_params(labelsize=7)
            bar.ax.yaxis.get_major_locator().set_params(nbins=4)
            first = axis is row_axes[0]
            names = [f"layer {layer} head {head}" for layer in range(layers) for head in range(heads)]
            axis.set_yticks(range(layers * heads), names if first else [""] * len(names))
            for layer in range(1, layers):
                axis.axhline(layer * heads - 0.5, color="w", linewidth=3)
            axis.set_xticks(range(0, values.shape[1], 1 if numbers else 4))
            axis.tick_params(labelsize=8)
            axis.set_title(wrap(panel.title, (width - names_width) / columns - 0.2, 9), fontsize=9)
            axis.set_xlabel("level", fontsize=9)
    title(figure, message)
    return figure


def draw_dependence(
    by_variant: Mapping[str, Mapping[int, Mapping[str, np.ndarray]]], message: str, subject: str
) -> Figure:
    """For each level: std of λ over tokens relative to its mean, and the share of that variance between token roles.

    by_variant: for each variant, an `input_dependence` by seed. Lines are means over layers, heads and seeds; dots are seeds.
    message: the figure's title; subject: what it is of.
    """
    panels = [
        (lambda d: 100 * d["std"] / d["mean"], "std over tokens / mean of λ (%)"),
        (lambda d: 100 * d["role_share"], "share of variance between roles (%)"),
    ]
    if not any(np.isfinite(d["role_share"]).any() for seeds in by_variant.values() for d in seeds.values()):
        del panels[1]
    figure, (axes,) = new_figure(2.0 + 3.7 * len(panels), 4.0, 1, len(panels))
    for axis, (value, label) in zip(axes, panels, strict=True):
        for variant, color in colors_of(by_variant).items():
            seeds = np.array([_nanmean(value(d), (0, 1)) for d in by_variant[variant].values()])
            used = [_nanmean(d["mean"], (0, 1)) for d in by_variant[variant].values()]
            levels = np.flatnonzero(np.isfinite(used).any(0))
            seeds = seeds[:, levels]
            axis.plot(np.tile(levels, (len(seeds), 1)).T, seeds.T, ".", color=color, alpha=0.35, markersize=5)
            axis.plot(levels, _nanmean(seeds, 0), color=color, linewidth=2.2, label=describe_variant(variant))
        axis.set(xlabel="level", ylabel=label, xticks=levels)
        axis.set_ylim(bottom=0)
        open_frame(axis)
    legend_below(figure, handles_of(axes[0]))
    title(figure, f"{message}\n{subject}\nlines: means over layers, heads and seeds; dots: seeds")
    return figure


def short(value: float) -> str:
    """λ in a cell."""
    return f"{value:.{CELL_DIGITS}f}" if abs(value) < 10 else f"{value:.3g}"


def _at_most(columns: int, panels: Sequence[Sequence[Panel]]) -> list[Sequence[Panel]]:
    """The same rows, those that are too long broken."""
    return [row[start : start + columns] for row in panels for start in range(0, len(row), columns)]


def _limits(values: np.ndarray) -> tuple[float, float]:
    low, high = (float(values.min()), float(values.max())) if values.size else (0.0, 1.0)
    # A constant λ would otherwise show the last bits of its rounding.
    smallest = 0.02 * max(abs(low), abs(high), 1e-6)
    if high - low < smallest:
        middle = (low + high) / 2
        low, high = middle - smallest / 2, middle + smallest / 2
    return low, high


def _nanmean(values: np.ndarray, axis: Any) -> np.ndarray:
    counted = np.isfinite(values)
    total = np.where(counted, values, 0).sum(axis)
    return np.where(counted.any(axis), total / np.maximum(counted.sum(axis), 1), np.nan)
