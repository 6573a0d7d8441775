"""What all figures share: one colour, marker and name for each mixer and λ; what fits; files."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import LogLocator, NullLocator

from loglinear_jax.components import split_outside
from loglinear_jax.mixers import parse_pattern


class Look(NamedTuple):
    """How a variant is drawn."""

    color: str
    marker: str


# Okabe and Ito's colours and two of Paul Tol's, safe for the colour-blind.
LAM_LOOKS = {
    "fixed": Look("#56B4E9", "o"),
    "linear": Look("#0072B2", "s"),
    "mlp_softmax": Look("#E69F00", "^"),
    "mlp_softplus": Look("#D55E00", "D"),
    "rope": Look("#009E73", "v"),
    "content": Look("#882255", "P"),
    "content_mlp": Look("#999933", "X"),
}
# Mixers without λ, with their names.
MIXERS = {
    "gated_linear": ("gated linear attention (single state)", Look("#CC79A7", "h")),
    "softmax": ("softmax attention", Look("#000000", "*")),
    "gated_delta": ("Gated DeltaNet", Look("#117733", "<")),
    "delta": ("DeltaNet", Look("#332288", ">")),
}
DELTA, DELTA_NAME = "log_linear_delta", "log-linear Gated DeltaNet"
# For variants that differ in other settings; none is the look of a mixer or a λ.
OTHER_LOOKS = [
    Look(color, marker)
    for marker in "dp"
    for color in ("#44AA99", "#DDCC77", "#CC6677", "#AA4499", "#661100", "#6699CC", "#888888", "#88CCEE")
]
MARK = "#D4002A"
DOTS_PER_INCH = 150
FULL_WIDTH = 900 / 96  # inches: a column of 900 CSS pixels, of which an inch has 96
CHARACTER = 0.54  # mean width of a character as a share of the font's size


def describe_variant(variant: str) -> str:
    """Returns the display name of a variant, for titles and legends."""
    mixer, settings = _mixer_and_settings(variant)
    if mixer is None:
        return variant if len(split_outside(variant, "=")) > 1 else f"λ: {variant}"
    name = DELTA_NAME if mixer == DELTA else MIXERS[mixer][0] if mixer in MIXERS else f"mixer={mixer}"
    return ", ".join([name, *(part.replace("lam=", "λ: ") for part in settings)])


def looks_of(variants: Iterable[str]) -> dict[str, Look]:
    """Choose the look of each variant: that of its mixer and λ, the same in every figure.

    A variant that differs in other settings gets the next look that no mixer and no λ has.
    """
    looks, others = {}, iter(OTHER_LOOKS * 9)
    for variant in dict.fromkeys(variants):
        mixer, settings = _mixer_and_settings(variant)
        lam = next((part.removeprefix("lam=") for part in settings), variant)
        if mixer in MIXERS and not settings:
            looks[variant] = MIXERS[mixer][1]
        elif lam in LAM_LOOKS and mixer is None:
            looks[variant] = LAM_LOOKS[lam]
        elif lam in LAM_LOOKS and mixer == DELTA and len(settings) == 1:
            darker = 0.55 * np.array(mpl.colors.to_rgb(LAM_LOOKS[lam].color))
            looks[variant] = Look(mpl.colors.to_hex(darker), LAM_LOOKS[lam].marker)
        else:
            looks[variant] = next(others)
    return looks


def _mixer_and_settings(variant: str) -> tuple[str | None, list[str]]:
    """Of "mixer=delta+beta_max=2" the mixer and the other settings; without a mixer None and nothing."""
    first, *settings = split_outside(variant, "+")
    if not first.startswith("mixer="):
        return None, []
    return ",".join(parse_pattern(first.removeprefix("mixer="))), settings


def is_dark(color: Sequence[float]) -> bool:
    """Tells whether white text can be read on a colour (red, green, blue, ...)."""
    return bool(np.dot(color[:3], (0.3, 0.59, 0.11)) < 0.5)


def sentence(text: str) -> str:
    """Capitalises the first letter; λ stays λ, as Λ is another quantity."""
    return text[:1].upper() + text[1:] if text[:1].isascii() else text


def new_figure(
    width: float, height: float, rows: int = 1, columns: int = 1, **kwargs: Any
) -> tuple[Figure, np.ndarray]:
    """Makes a figure, in inches and no wider than FULL_WIDTH, and its axes [rows, columns]."""
    figure = Figure(figsize=(min(width, FULL_WIDTH), height), layout="constrained")
    return figure, figure.subplots(rows, columns, squeeze=False, **kwargs)


def panel_grid(number: int, widths: Sequence[float], around: float, row: float) -> tuple[Figure, np.ndarray]:
    """Make a figure of panels on the same scales, and its axes [rows, columns]; places without a panel are hidden.

    Args:
        number: of panels.
        widths: of the figure with one column, two and so on, in inches; the last is for the most columns that there may
            be.
        around: the height of what is above and below the panels.
        row: the height of a row of panels.
    """
    rows = -(-number // len(widths))
    columns = -(-number // rows)
    figure, axes = new_figure(widths[columns - 1], around + row * rows, rows, columns, sharex=True, sharey=True)
    hide(axes.flat[number:])
    return figure, axes


def open_frame(axis: Axes) -> None:
    """Removes the upper and right edge of a panel."""
    axis.spines[["top", "right"]].set_visible(False)


def hide(axes: Iterable[Axes]) -> None:
    """Hides panels that are not used."""
    for axis in axes:
        axis.set_axis_off()


def label_panel(axis: Axes, title: str, x: str, size: int = 9) -> None:
    """Sets the title and x label of a panel, broken so that they fit, with numbers at every panel's ticks."""
    grid = axis.get_subplotspec().get_gridspec()
    width = axis.figure.get_figwidth() / grid.ncols
    axis.set_title(wrap(title, width - 0.9 if size < 10 else width - 0.4, size), fontsize=size)
    axis.set_xlabel(wrap(x, width - 0.5, 10))
    axis.xaxis.set_tick_params(labelbottom=True)


def draw_line(
    axis: Axes, x: Any, values: Any, low: Any = None, high: Any = None, bars: bool = False, **how: Any
) -> Line2D:
    """Draws values against x, with their intervals shaded, or as bars."""
    (line,) = axis.plot(x, values, **({"linewidth": 1.8, "markersize": 5} | how))
    if low is not None and bars:
        axis.vlines(x, low, high, color=line.get_color(), linewidth=1.6)
    elif low is not None:
        axis.fill_between(x, low, high, color=line.get_color(), alpha=0.15, linewidth=0)
    return line


def finish(figure: Figure, message: str, handles: Mapping[str, Any] | None = None) -> None:
    """Ends a figure of curves or bars: open frames, a title over it, and a legend below it, with handles by label."""
    for axis in figure.axes:
        open_frame(axis)
    if handles:
        legend_below(figure, handles)
    title(figure, message)


def wrap(text: str, width: float, size: int) -> str:
    """Breaks each line of a text so that it fits into `width` inches in a font of `size` points."""
    characters = max(int(width * 72 / (CHARACTER * size)), 12)
    text = text.replace(" %", "\N{NO-BREAK SPACE}%").replace("λ: ", "λ:\N{NO-BREAK SPACE}")
    return "\n".join(textwrap.fill(line, characters) for line in literal(text).split("\n"))


def literal(text: str) -> str:
    """A text that Matplotlib shows as it is: between two $ it would read mathematics."""
    return text.replace("$", r"\$")


def title(figure: Figure, text: str) -> None:
    """Sets the title of a figure, broken so that it fits."""
    figure.suptitle(wrap(text, figure.get_figwidth() - 0.3, 11), fontsize=11)


def legend_below(figure: Figure, handles: Mapping[str, Any]) -> None:
    """Adds a legend under the whole figure, which grows by it, in as many columns as fit; handles: by label."""
    width, size = figure.get_figwidth() - 0.4, 9
    labels = [wrap(label, width - 0.6, size) for label in handles]
    longest = max((len(line) for label in labels for line in label.split("\n")), default=1)
    columns = max(1, min(len(labels), int(width / ((longest * CHARACTER + 4.5) * size / 72))))
    lines = -(-len(labels) // columns) + sum(label.count("\n") for label in labels)
    figure.set_figheight(figure.get_figheight() + (1.35 * lines + 1) * size / 72)
    how = dict(loc="outside lower center", ncols=columns, frameon=False, fontsize=size)
    figure.legend(list(handles.values()), labels, **how)


def log_ticks(axis: Axis) -> None:
    """Ticks a logarithmic axis at round numbers, also within a decade. Call it when everything is drawn."""
    low, high = sorted(axis.get_view_interval())
    axis.set_major_locator(LogLocator(subs=(1, 2, 5) if high < 30 * low else (1,)))
    axis.set_minor_locator(NullLocator())
    axis.set_major_formatter(lambda value, _: f"{value:,.6g}")


def length_axis(axis: Axes, lengths: Iterable[int]) -> None:
    """Makes an axis of lengths: logarithmic, with a tick at each."""
    lengths = sorted(set(lengths))
    axis.set_xscale("log", base=2)
    axis.set_xticks(lengths, [f"{n // 1024}k" if n >= 1024 and n % 1024 == 0 else str(n) for n in lengths])
    axis.minorticks_off()


def save_png(figure: Figure, stem: Path) -> Path:
    """Writes stem.png; returns its path."""
    # Not by Figure.savefig, which draws twice for each file: half of a report's time is drawing.
    figure.set_dpi(DOTS_PER_INCH)
    FigureCanvasAgg(figure).print_png(png := stem.with_suffix(".png"))
    return png


def save(figure: Figure, stem: Path) -> list[Path]:
    """Writes stem.png and stem.svg; returns their paths."""
    png, svg = save_png(figure, stem), stem.with_suffix(".svg")
    figure.set_layout_engine("none")  # the layout is found
    with mpl.rc_context({"svg.hashsalt": "loglinear_jax"}):
        FigureCanvasSVG(figure).print_svg(svg, metadata={"Date": None})
    return [png, svg]
