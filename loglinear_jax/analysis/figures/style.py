"""What all figures share: their width, wrapped titles, legends and ticks that fit, files."""

from __future__ import annotations

import dataclasses
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
from jaxtyping import Float
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FixedLocator, NullFormatter, NullLocator

from loglinear_jax.analysis.labels import colors_of, describe_variant

MARK = "#D4002A"
DOTS_PER_INCH = 150
FULL_WIDTH = 900 / 96  # inches: a column of 900 CSS pixels, of which an inch has 96
CHARACTER = 0.54  # mean width of a character as a share of the font's size

SEED_WIDTHS = (5.6, 7.4, FULL_WIDTH)  # of figures by `draw_seeds`, by their columns


@dataclasses.dataclass(frozen=True)
class SeedPanel:
    """One panel of `draw_seeds`. line: where a vertical line stands. by_variant: (what is on the x axis, accuracy from 0 to 1)
    of the seeds."""

    title: str
    line: float
    by_variant: Mapping[str, tuple[Float[np.ndarray, " S"], Float[np.ndarray, " S"]]]


def new_figure(
    width: float, height: float, rows: int = 1, columns: int = 1, **kwargs: Any
) -> tuple[Figure, np.ndarray]:
    """A figure in inches, no wider than FULL_WIDTH, and its axes [rows, columns]."""
    figure = Figure(figsize=(min(width, FULL_WIDTH), height), layout="constrained")
    return figure, figure.subplots(rows, columns, squeeze=False, **kwargs)


def panel_grid(number: int, widths: Sequence[float], around: float, row: float) -> tuple[Figure, np.ndarray]:
    """A figure of so many panels on the same scales, and its axes [rows, columns], the rows as full as can be; places that no
    panel stands in are hidden.

    widths: of the figure with one column, two and so on, in inches; the last is for the most columns that there may be. around:
    the height of what is above and below the panels; row: of a row of them.
    """
    rows = -(-number // len(widths))
    columns = -(-number // rows)
    figure, axes = new_figure(widths[columns - 1], around + row * rows, rows, columns, sharex=True, sharey=True)
    hide(axes.flat[number:])
    return figure, axes


def draw_seeds(panels: Sequence[SeedPanel], row: float, x: str, y: str, line: str, message: str) -> tuple[Figure, Axes]:
    """Every seed's accuracy against something else, and one of the axes, which share their scales.

    row: the height of a row of panels in inches. x, y: what is on the axes. line: what the panels' lines are. message: the
    figure's title.
    """
    figure, axes = panel_grid(len(panels), SEED_WIDTHS, 0.9, row)
    width = figure.get_figwidth() / axes.shape[1]
    variants = list(dict.fromkeys(variant for panel in panels for variant in panel.by_variant))
    colors, markers = colors_of(variants), dict(zip(variants, "os^Dv" * len(variants), strict=False))
    handles: dict[str, Any] = {}
    for axis, panel in zip(axes.flat, panels, strict=False):
        for variant, (values, accuracy) in panel.by_variant.items():
            how = dict(color=colors[variant], alpha=0.65, markersize=5, clip_on=False)
            (handles[describe_variant(variant)],) = axis.plot(values, 100 * accuracy, markers[variant], **how)
        axis.axvline(panel.line, color="0.5", linestyle="--", linewidth=1)
        axis.set_title(wrap(panel.title, width - 0.9, 9), fontsize=9)
        axis.set_xlabel(wrap(x, width - 0.5, 10))
        axis.xaxis.set_tick_params(labelbottom=True)
        open_frame(axis)
    axes[0, 0].set_ylim(0, 102)
    for axis in axes[:, 0]:
        axis.set_ylabel(y)
    handles[line] = Line2D([], [], color="0.5", linestyle="--", linewidth=1)
    legend_below(figure, handles)
    title(figure, message)
    return figure, axes[0, 0]


def save(figure: Figure, stem: Path) -> list[Path]:
    """Writes stem.png and stem.svg."""
    png, svg = (stem.with_suffix(suffix) for suffix in (".png", ".svg"))
    # Not by Figure.savefig, which draws twice for each file: half of a report's time is drawing.
    figure.set_dpi(DOTS_PER_INCH)
    FigureCanvasAgg(figure).print_png(png)
    figure.set_layout_engine("none")  # the layout is found
    with mpl.rc_context({"svg.hashsalt": "loglinear_jax"}):
        FigureCanvasSVG(figure).print_svg(svg, metadata={"Date": None})
    return [png, svg]


def open_frame(axis: Axes) -> None:
    axis.spines[["top", "right"]].set_visible(False)


def percent_panel(axis: Axes, name: str, width: float, size: int, rows: tuple[float, float], label: str) -> None:
    """A panel whose rows, from the lowest to the highest place, have values from 0 to 100 %; its name is wrapped to `width`."""
    axis.set(xlim=(0, 100), ylim=rows, xlabel=f"{label} (%)")
    axis.set_title(wrap(name, width, size), fontsize=size)
    axis.xaxis.set_tick_params(labelbottom=True)
    axis.grid(axis="x", color="0.9", linewidth=0.8)
    axis.set_axisbelow(True)
    open_frame(axis)


def hide(axes: np.ndarray) -> None:
    """Places of a grid that nothing stands in."""
    for axis in axes:
        axis.set_axis_off()


def wrap(text: str, width: float, size: int) -> str:
    """Each line of a text broken so that it fits into `width` inches in a font of that size, in points."""
    characters = max(int(width * 72 / (CHARACTER * size)), 12)
    text = text.replace(" %", "\N{NO-BREAK SPACE}%").replace("λ: ", "λ:\N{NO-BREAK SPACE}")
    text = text.replace("$", r"\$")  # between two, Matplotlib would read mathematics
    return "\n".join(textwrap.fill(line, characters) for line in text.split("\n"))


def title(figure: Figure, text: str, size: int = 11) -> None:
    """Over the whole figure."""
    figure.suptitle(wrap(text, figure.get_figwidth() - 0.3, size), fontsize=size)


def legend_below(figure: Figure, handles: Mapping[str, Any], size: int = 9) -> None:
    """Under the whole figure, which grows by it, in as many columns as fit; handles: by label."""
    width = figure.get_figwidth() - 0.4
    labels = [wrap(label, width - 0.6, size) for label in handles]
    longest = max((len(line) for label in labels for line in label.split("\n")), default=1)
    column = (longest * CHARACTER + 4.5) * size / 72
    columns = max(1, min(len(labels), int(width / column)))
    lines = -(-len(labels) // columns) + sum(label.count("\n") for label in labels)
    figure.set_figheight(figure.get_figheight() + (1.35 * lines + 1) * size / 72)
    figure.legend(
        list(handles.values()), labels, loc="outside lower center", ncols=columns, frameon=False, fontsize=size
    )


def handles_of(axis: Axes) -> dict[str, Any]:
    """By label, what an axis has drawn with one."""
    handles, labels = axis.get_legend_handles_labels()
    return dict(zip(labels, handles, strict=True))


def log_ticks(axis: Axis, most: int = 6) -> None:
    """A logarithmic axis with a few round numbers, also where it covers a part of a decade, or many. Call it when everything is
    drawn."""
    low, high = sorted(axis.get_view_interval())
    axis.set_major_locator(FixedLocator(_round_numbers(low, high, most)))
    axis.set_minor_locator(NullLocator())
    axis.set_major_formatter(lambda value, _: f"{value:,.6g}")
    axis.set_minor_formatter(NullFormatter())


def _round_numbers(low: float, high: float, most: int) -> list[float]:
    decades = 10.0 ** np.arange(np.floor(np.log10(low)), np.ceil(np.log10(high)) + 1)
    found = np.array([])
    for within in ([1], [1, 3], [1, 2, 5], range(1, 10), np.arange(10, 100) / 10):
        finer = np.outer(decades, list(within)).ravel()
        finer = finer[(finer >= low) & (finer <= high)]
        if len(finer) > most:
            break
        found = finer
    if len(found) < 2:  # too many of the finest, or none: every few of them
        found = finer
    return sorted(found[:: -(-len(found) // most)]) if len(found) else [low, high]
