"""Figure of sizes: accuracy against how many numbers a mixer keeps of a sequence."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib.figure import Figure

from loglinear_jax.analysis.figures.style import (
    FULL_WIDTH,
    legend_below,
    log_ticks,
    open_frame,
    panel_grid,
    title,
    wrap,
)
from loglinear_jax.analysis.labels import colors_of, describe_variant
from loglinear_jax.analysis.tables.sizes import AtSize
from loglinear_jax.statistics import FEWEST_FOR_INTERVAL

MOST_COLUMNS = 2
MARKERS = "os^Dv<>P"


def draw_by_size(panels: Mapping[str, Mapping[str, Sequence[AtSize]]], shown_as: str) -> Figure:
    """A panel for each task, a line for each variant: the mean over seeds, with its interval of 95 %, against the numbers that
    a layer keeps.

    panels, shown_as: of `tables.accuracies_by_size`.
    """
    variants = list(dict.fromkeys(variant for drawn in panels.values() for variant in drawn))
    figure, axes = panel_grid(len(panels), [6.5] + [FULL_WIDTH] * (MOST_COLUMNS - 1), 1.2, 3.6)
    width = figure.get_figwidth() / axes.shape[1]
    handles: dict[str, Any] = {}
    for axis, (task, drawn) in zip(axes.flat, panels.items(), strict=False):
        for index, (variant, color) in enumerate(colors_of(variants).items()):
            if variant not in drawn:
                continue
            numbers = [at.numbers for at in drawn[variant]]
            means, lows, highs = zip(*(at.at_best[1:] for at in drawn[variant]), strict=True)
            look = dict(color=color, marker=MARKERS[index % len(MARKERS)], markersize=5)
            (handles[describe_variant(variant)],) = axis.plot(numbers, means, linewidth=1.6, **look)
            for at in drawn[variant]:
                if len(at.at_best.shown) < FEWEST_FOR_INTERVAL:
                    axis.plot(at.numbers, at.at_best.mean, markerfacecolor="white", **look)
            axis.vlines(numbers, lows, highs, color=color, linewidth=1.6)
        axis.set_xscale("log")
        axis.set_title(wrap(task, width - 0.9, 9), fontsize=9)
        axis.set_xlabel("numbers that a layer keeps of a sequence")
        axis.set_ylim(-2, 102)
        axis.xaxis.set_tick_params(labelbottom=True)
        axis.grid(color="0.92", linewidth=0.8)
        axis.set_axisbelow(True)
        open_frame(axis)
    log_ticks(axes[0, 0].xaxis)
    for axis in axes[:, 0]:
        axis.set_ylabel(f"{shown_as} (%)")
    legend_below(figure, handles)
    counts = [len(at.at_best.shown) for drawn in panels.values() for sizes in drawn.values() for at in sizes]
    interval = " with its 95 % interval" if max(counts) >= FEWEST_FOR_INTERVAL else ""
    hollow = f" (hollow: fewer than {FEWEST_FOR_INTERVAL} seeds)" if min(counts) < FEWEST_FOR_INTERVAL else ""
    title(figure, f"Accuracy against what a layer keeps; mean over seeds{interval}{hollow}")
    return figure
