"""Figures of answers: the Fenwick levels that hold those of tasks, and how often λ finds them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import matplotlib as mpl
import numpy as np
from jaxtyping import Float
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from loglinear_jax.analysis.figures.style import (
    FULL_WIDTH,
    hide,
    legend_below,
    new_figure,
    open_frame,
    title,
    wrap,
)
from loglinear_jax.analysis.labels import colors_of, describe_variant

NAMES_WIDTH = 2.6  # inches


def draw_answer_levels(shares: Mapping[str, Float[np.ndarray, " L"]], message: str) -> Figure:
    """A bar for each task, divided by the levels that hold its answers, in one colour for each level.

    shares: by the task in words, of `answer_levels`. message: the figure's title.
    """
    names = [wrap(task, NAMES_WIDTH, 9) for task in shares]
    lines = max(name.count("\n") + 1 for name in names)
    figure, ((axis,),) = new_figure(FULL_WIDTH, 1.1 + (0.25 + 0.15 * lines) * len(names))
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
        dark = np.dot(color[:3], (0.3, 0.59, 0.11)) < 0.5
        for row, share in enumerate(padded[:, level]):
            if share >= 4:
                middle = ends[row, level] - share / 2
                axis.text(middle, row, f"{share:.0f}", ha="center", va="center", fontsize=8, color="w" if dark else "k")
    axis.set_yticks(range(len(names)), names, fontsize=9)
    axis.invert_yaxis()
    axis.set(xlim=(0, 100), xlabel="answers (%)")
    open_frame(axis)
    legend_below(figure, handles)
    title(figure, message)
    return figure


def draw_looks(
    by_variant: Mapping[str, tuple[Float[np.ndarray, "S layers"], Float[np.ndarray, " S"]]],
    by_position: float,
    accuracy: str,
    message: str,
) -> Figure:
    """Every seed's accuracy against how often λ is largest at the answer's bucket, a panel for each layer.

    by_variant: for each variant (the share of the answers that the best head of each layer finds, accuracy), from 0 to 1.
    by_position: the share that a rule finds that sees the position alone; accuracy: on which set, such as "test accuracy".
    message: the figure's title.
    """
    layers = next(iter(by_variant.values()))[0].shape[1]
    columns = min(layers, 3)
    rows = -(-layers // columns)
    width = (5.6, 7.4, FULL_WIDTH)[columns - 1]
    figure, axes = new_figure(width, 0.9 + 2.9 * rows, rows, columns, sharex=True, sharey=True)
    hide(axes.flat[layers:])
    colors, markers = colors_of(by_variant), dict(zip(by_variant, "os^Dv" * len(by_variant), strict=False))
    handles: dict[str, Any] = {}
    for layer, axis in enumerate(axes.flat[:layers]):
        for variant, (share, of_seeds) in by_variant.items():
            how = dict(color=colors[variant], alpha=0.65, markersize=5, clip_on=False)
            x, y = 100 * share[:, layer], 100 * of_seeds
            (handles[describe_variant(variant)],) = axis.plot(x, y, markers[variant], **how)
        axis.axvline(100 * by_position, color="0.5", linestyle="--", linewidth=1)
        axis.set_title(f"layer {layer}, best head", fontsize=9)
        axis.set_xlabel("answers at the largest λ (%)")
        axis.xaxis.set_tick_params(labelbottom=True)
        open_frame(axis)
    axes[0, 0].set(xlim=(0, 102), ylim=(0, 102))
    for axis in axes[:, 0]:
        axis.set_ylabel(f"{accuracy} (%)")
    handles["the best rule by position alone"] = Line2D([], [], color="0.5", linestyle="--", linewidth=1)
    legend_below(figure, handles)
    title(figure, message)
    return figure
