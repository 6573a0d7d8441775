"""What is λ? Over the tokens of a sequence, its mean by head and level, and what it has learned apart from its input."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import ClassVar

import numpy as np
from jaxtyping import Bool, Float
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from loglinear_jax.analysis import style
from loglinear_jax.analysis.dependence import dependence_of
from loglinear_jax.analysis.experiments import describe_run
from loglinear_jax.analysis.lam_values import static_lam
from loglinear_jax.analysis.section import Section
from loglinear_jax.fenwick import occupied_levels
from loglinear_jax.lam import lam_traits
from loglinear_jax.runs.loading import Run, TrainedVariant

MANY_ROWS = 12  # layers · heads from which each variant has a figure of its own


@dataclasses.dataclass(frozen=True)
class Panel:
    """One heatmap under a title. values: [rows, columns]; by head [layers, heads, levels]. used: cells that have no effect are
    drawn faded. layers: their numbers, if they are not all."""

    values: Float[np.ndarray, "*shape"]
    title: str
    used: Bool[np.ndarray, "*shape"] | None = None
    marks: Mapping[str, int] = dataclasses.field(default_factory=dict)
    layers: Sequence[int] | None = None


def draw_lam_over_tokens(panels: Sequence[Sequence[Panel]], message: str) -> Figure:
    """Heatmaps of λ, levels × positions, in a grid of panels, at most three beside each other; each panel has its own colour
    scale. message: the figure's title.

    Where a level's bucket is empty λ has no effect: those cells are faded. Marks are red dashed lines.
    """
    panels = _at_most(3, panels)
    columns = max(map(len, panels))
    levels = max(panel.values.shape[0] for row in panels for panel in row)
    height = len(panels) * (1.5 + 0.13 * levels) + 0.7
    figure, axes = style.new_figure(style.FULL_WIDTH, height, len(panels), columns)
    for row_axes, row in zip(axes, panels, strict=True):
        style.hide(row_axes[len(row) :])
        for axis, panel in zip(row_axes, row, strict=False):
            _draw_over_tokens(axis, panel, figure.get_figwidth() / columns - 0.5)
    style.title(figure, f"{message}\ncolour: λ (faded where the level's bucket is empty, so that λ has no effect)")
    return figure


def _draw_over_tokens(axis: Axes, panel: Panel, width: float) -> None:
    levels, length = panel.values.shape
    used = np.ones_like(panel.values, bool) if panel.used is None else panel.used
    extent = (-0.5, length - 0.5, -0.5, levels - 0.5)
    how = dict(origin="lower", extent=extent, interpolation="nearest", alpha=np.where(used, 1.0, 0.22))
    _heatmap(axis, panel.values, used, pad=0.01, aspect=12, label="λ", **how)
    for number, (name, position) in enumerate(sorted(panel.marks.items(), key=lambda mark: mark[1])):
        axis.axvline(position - 0.5, color=style.MARK, linestyle="--", linewidth=1.4)
        left = position > 0.5 * length  # of its line, where the end is near on the right
        at = dict(
            xycoords=("data", "axes fraction"), textcoords="offset points", fontsize=7, color=style.MARK, va="bottom"
        )
        at |= dict(xytext=(-2 if left else 2, 2 + 9 * (number % 2)), ha="right" if left else "left")
        axis.annotate(f"{name} →" if left else f"← {name}", (position - 0.5, 1.0), **at)
    axis.set_title(style.wrap(panel.title, width, 9), fontsize=9, pad=6 + 9 * min(len(panel.marks), 2))
    axis.set(xlabel="position (token)", ylabel="level")
    axis.xaxis.get_major_locator().set_params(nbins=6, integer=True)
    axis.set_yticks(range(0, levels, 1 if levels <= 8 else 2))
    axis.tick_params(labelsize=8)


def _heatmap(axis: Axes, values: np.ndarray, shown: np.ndarray, pad: float, aspect: int, label: str = "", **how):
    """An image with its bar. shown: the values that the colours span, which do not show the last bits of a constant λ."""
    found = values[shown] if shown.any() else np.array([0.0, 1.0])
    low, high = float(found.min()), float(found.max())
    smallest = 0.02 * max(abs(low), abs(high), 1e-6)
    if high - low < smallest:
        low, high = (low + high - smallest) / 2, (low + high + smallest) / 2
    image = axis.imshow(values, cmap="viridis", aspect="auto", vmin=low, vmax=high, **how)
    bar = axis.figure.colorbar(image, ax=axis, pad=pad, aspect=aspect, label=label)
    bar.solids.set_alpha(1)
    bar.ax.tick_params(labelsize=8)
    bar.ax.yaxis.get_major_locator().set_params(nbins=4)
    return image


def draw_lam_by_head(panels: Sequence[Sequence[Panel]], message: str) -> Figure:
    """Heatmaps of (layers · heads) × levels with the numbers in the cells, a line between layers; the panels' values are
    [layers, heads, levels]. Levels of which no panel has a value are left out. message: the figure's title."""
    levels = max(1 + np.flatnonzero(np.isfinite(p.values).any((0, 1)))[-1:].sum() for row in panels for p in row)
    names_width, bar_width = 0.9, 0.65  # inches
    wanted = max(0.27 * levels, 1.9) + bar_width
    panels = _at_most(int(np.clip((style.FULL_WIDTH - names_width) // wanted, 1, 3)), panels)
    columns = max(map(len, panels))
    width = min(max(wanted * columns + names_width, 5.5), style.FULL_WIDTH)
    heights = [0.3 * max(p.values.shape[0] * p.values.shape[1] for p in row) + 1.3 for row in panels]
    grid = {"height_ratios": heights}
    figure, axes = style.new_figure(width, sum(heights) + 0.7, len(panels), columns, gridspec_kw=grid)
    numbers = ((width - names_width) / columns - bar_width) / levels > 0.24  # inches a cell: room for them
    for row_axes, row in zip(axes, panels, strict=True):
        style.hide(row_axes[len(row) :])
        for axis, panel in zip(row_axes, row, strict=False):
            _draw_by_head(axis, panel, levels, numbers, axis is row_axes[0])
            axis.set_title(style.wrap(panel.title, (width - names_width) / columns - 0.2, 9), fontsize=9)
    style.title(figure, message)
    return figure


def _draw_by_head(axis: Axes, panel: Panel, levels: int, numbers: bool, names: bool) -> None:
    """numbers: in the cells. names: of layers and heads, at the left."""
    layers, heads, _ = panel.values.shape
    values = panel.values[..., :levels].reshape(layers * heads, -1)
    image = _heatmap(axis, values, np.isfinite(values), pad=0.01, aspect=14)
    for (i, j), value in np.ndenumerate(values):
        if numbers and np.isfinite(value):
            color = "w" if style.is_dark(image.to_rgba(value)) else "k"
            axis.text(j, i, short(float(value)), ha="center", va="center", fontsize=7, color=color)
    rows = [f"layer {layer} head {head}" for layer in panel.layers or range(layers) for head in range(heads)]
    axis.set_yticks(range(layers * heads), rows if names else [""] * len(rows))
    for layer in range(1, layers):
        axis.axhline(layer * heads - 0.5, color="w", linewidth=3)
    axis.set_xticks(range(0, values.shape[1], 1 if numbers else 4))
    axis.tick_params(labelsize=8)
    axis.set_xlabel("level", fontsize=9)


def short(value: float) -> str:
    """λ in a cell."""
    return f"{value:.2f}" if abs(value) < 10 else f"{value:.3g}"


def _at_most(columns: int, panels: Sequence[Sequence[Panel]]) -> list[Sequence[Panel]]:
    """The same rows, those that are too long broken."""
    return [row[start : start + columns] for row in panels for start in range(0, len(row), columns)]


class Heatmaps(Section):
    """One kind of figure of a few seeds of every variant with λ. WHAT: is shown. STEM: of its files. NOTE: below it."""

    READS_CHECKPOINTS = True
    WHAT: ClassVar[str]
    STEM: ClassVar[str]
    NOTE: ClassVar[str] = ""
    draw = staticmethod(draw_lam_by_head)

    def panels(self, trained: TrainedVariant, layers: list[int]) -> list[Panel]:
        """One for each seed to draw; none if the variant has no such thing."""
        raise NotImplementedError

    def find(self, run: Run, trained: TrainedVariant) -> list[Panel] | None:
        layers = self.layers(run, trained, "has_lam", "λ")
        return (self.panels(trained, layers) or None) if layers else None

    def show_run(self, run: Run, found: dict[str, list[Panel]]) -> None:
        rows = list(found.values())
        by_head = [np.prod(panel.values.shape[:2]) for row in rows for panel in row if panel.values.ndim == 3]
        large = max(by_head, default=0) > MANY_ROWS
        for index, some in enumerate([[row] for row in rows] if large else [rows], 1):
            figure = self.draw(some, f"{style.sentence(self.WHAT)}; {describe_run(run)}")
            shown_as = self.WHAT + (f", {index} of {len(rows)}" if large else "")
            self.add(figure, self.STEM + (f"-{index}" if large else ""), run, shown_as, note=self.NOTE)

    def titled(self, trained: TrainedVariant, seed: int) -> str:
        return f"{style.describe_variant(trained.variant)}; {self.context.describe_seed(trained, seed)}"


class OverTokens(Heatmaps):
    """λ [levels, positions] of one example at the chosen layer and head."""

    NAME, TITLE = "lam", "λ over tokens"
    WHAT, STEM = "λ over the tokens of one sequence", "lam-tokens"
    draw = staticmethod(draw_lam_over_tokens)

    def panels(self, trained: TrainedVariant, layers: list[int]) -> list[Panel]:
        context, panels = self.context, []
        layer, head = context.layer_and_head(trained, layers)
        for seed in context.drawn_seeds(trained):
            lam = context.mixer_values(trained, seed)[layer]["lam_value"][context.choices.example, :, head]
            used = occupied_levels(np.arange(lam.shape[0]), lam.shape[1]).T
            name = f"{self.titled(trained, seed)}; layer {layer}, head {head}"
            panels.append(Panel(lam.T, name, used, trained.task.marks()))
        return panels


class Means(Heatmaps):
    """λ by layer, head and level, on average over tokens."""

    NAME, TITLE = "lam", "λ by head and level"
    WHAT, STEM = "mean of λ where the level is used", "lam-mean"

    def panels(self, trained: TrainedVariant, layers: list[int]) -> list[Panel]:
        found = dependence_of(self.context, trained, layers, self.context.drawn_seeds(trained))
        return [Panel(of["mean"], self.titled(trained, seed), layers=layers) for seed, of in found.items()]


class Static(Heatmaps):
    """What λ has learned apart from its input."""

    NAME, TITLE = "lam", "λ by head and level"
    WHAT, STEM = "static part of λ", "lam-static"
    NOTE = (
        "For linear (the paper's baseline): the weights Λ, as the paper's figures show; otherwise λ where its input is 0. A "
        "content-aware λ has no such part."
    )

    def panels(self, trained: TrainedVariant, layers: list[int]) -> list[Panel]:
        mixers, panels = trained.model.settings.mixers, []
        if lam_traits(mixers[layers[0] % len(mixers)].lam).needs_scores:
            return []
        for seed in self.context.drawn_seeds(trained):
            values, what = static_lam(trained, seed, self.context.choices.which)
            panels.append(Panel(values, f"{what}\n{self.titled(trained, seed)}", layers=layers))
        return panels
