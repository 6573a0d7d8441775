"""Figures of answers: the Fenwick levels that hold those of tasks, and how often λ finds them."""

from __future__ import annotations

from collections.abc import Mapping

import matplotlib as mpl
import numpy as np
from jaxtyping import Float
from matplotlib.figure import Figure

from loglinear_jax.analysis.figures.style import (
    FULL_WIDTH,
    SeedPanel,
    draw_seeds,
    legend_below,
    new_figure,
    open_frame,
    title,
    wrap,
)

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
    panels = [
        SeedPanel(
            f"layer {layer}, best head",
            100 * by_position,
            {variant: (100 * share[:, layer], of_seeds) for variant, (share, of_seeds) in by_variant.items()},
        )
        for layer in range(layers)
    ]
    line = "the best rule by position alone"
    figure, axis = draw_seeds(panels, 2.9, "answers at the largest λ (%)", f"{accuracy} (%)", line, message)
    axis.set_xlim(0, 102)
    return figure
