"""Figure of several tasks: every variant's accuracy in each of them."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from matplotlib.figure import Figure

from loglinear_jax.analysis.figures.style import FULL_WIDTH, panel_grid, percent_panel, title, wrap
from loglinear_jax.analysis.labels import colors_of, describe_variant
from loglinear_jax.analysis.tables.rates import AtBest
from loglinear_jax.statistics import FEWEST_FOR_INTERVAL

MOST_COLUMNS = 5


def draw_by_task(panels: Mapping[str, Mapping[str, AtBest]], shown_as: str) -> Figure:
    """A panel for each task, a row for each variant: a stroke for each seed, and the mean over seeds with its interval of 95 %.

    panels: by the task's name and the variant, accuracies in %. shown_as: what that is, such as "test accuracy".
    """
    variants = list(dict.fromkeys(variant for drawn in panels.values() for variant in drawn))
    names = [wrap(describe_variant(variant), 2.0, 9) for variant in variants]
    row_height = max(0.3, 0.17 * max(name.count("\n") + 1 for name in names))
    figure, axes = panel_grid(len(panels), [FULL_WIDTH] * MOST_COLUMNS, 0.7, 0.75 + row_height * len(variants))
    for axis, (task, drawn) in zip(axes.flat, panels.items(), strict=False):
        for variant, color in colors_of(variants).items():
            if variant not in drawn:
                continue
            (values, mean, low, high), y = drawn[variant], variants.index(variant)
            axis.plot(values, np.full(len(values), y), "|", color=color, alpha=0.35, markersize=9)
            axis.hlines(y, low, high, color="0.15", linewidth=1.6)
            axis.plot([mean], [y], "o", color=color, markeredgecolor="0.15", markersize=7, clip_on=False)
        percent_panel(axis, task, 1.3, 8, (len(variants) - 0.5, -0.5), shown_as)
    for axis in axes[:, 0]:
        axis.set_yticks(range(len(variants)), names, fontsize=9)
    counts = {len(at_best.shown) for drawn in panels.values() for at_best in drawn.values()}
    seeds = (
        f"{min(counts)} to {max(counts)} seeds" if len(counts) > 1 else f"{max(counts)} seed{'s' * (max(counts) > 1)}"
    )
    interval = " with its 95 % interval" if max(counts) >= FEWEST_FOR_INTERVAL else ""
    title(figure, f"{seeds} each (strokes), and their mean{interval}" if max(counts) > 1 else f"{seeds} each")
    return figure
