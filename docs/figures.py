"""Draws the figures of README.md and docs/ from recorded runs, the tables of performance.md and the Fenwick tree's arithmetic.

python -m docs.figures
"""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import to_rgb
from matplotlib.patches import Rectangle

from loglinear_jax.analysis import style
from loglinear_jax.fenwick import fenwick_level
from loglinear_jax.statistics import mean_interval
from results.figures import BY_WIDTH, accuracies_by_length, outcomes, percent, state_size

DOCS = Path(__file__).parent
ONE_STATE = ("mixer=gated_linear", "mixer=delta")
LEVEL_COLORS = ["#BBBBBB", "#882255", "#0072B2", "#009E73", "#E69F00"]
PEERS = {  # rows of docs/reference/performance.md, with a label and a look
    "log-linear, kernels for Hopper": ("log-linear, ours", style.OTHER_LOOKS[0]),
    "log-linear, flash-linear-attention": ("log-linear, flash-linear-attention", style.OTHER_LOOKS[4]),
    "one state, jax-linear-attention": ("single state, jax-linear-attention", style.MIXERS["gated_linear"][1]),
    "softmax, cuDNN FlashAttention": ("softmax, cuDNN FlashAttention", style.MIXERS["softmax"][1]),
}


def name(axis: Axes, text: str, place: tuple[float, float], color: str, **how: str) -> None:
    """A curve's name in its colour, darker so that it can be read."""
    axis.annotate(text, place, color=0.75 * np.array(to_rgb(color)), fontsize=9, **how)


def accuracy_by_size(axis: Axes) -> None:
    """Test accuracy against recurrent state size, interleaved MQAR with 24 pairs, 64 seeds at one learning rate."""
    labels = {
        "mixer=delta": ("DeltaNet\n(single state)", 98), "mixer=gated_linear": ("gated linear\n(single state)", 76),
        "content": ("content", 44), "mlp_softmax": ("mlp_softmax", 35), "fixed": ("fixed", 26),
    }  # fmt: skip
    looks = style.looks_of(labels)
    for variant, (text, height) in labels.items():
        points = [
            (state_size(variant, width, 128), *mean_interval(percent(outcomes(runs)[variant])))
            for width, runs in BY_WIDTH.items()
        ]
        style.draw_line(axis, *np.transpose(points), bars=True, **looks[variant]._asdict())
        name(axis, text, (9 if variant in ONE_STATE else 1000, height), looks[variant].color, va="top")
    axis.annotate("(state per level)", (1000, 17), color="0.3", fontsize=9, va="top")
    axis.set_xscale("log")
    axis.set(
        xlabel="recurrent state size (numbers per head)", ylabel="test accuracy (%)", xlim=(8, 14000), ylim=(0, 103)
    )
    axis.set_title("With less memory, one wider state\nbeats a state for each level", fontsize=10)
    axis.grid(color="0.92")
    style.log_ticks(axis.xaxis)


def accuracy_by_length(axis: Axes) -> None:
    """Accuracy on longer sequences after training at 128 tokens, the same task."""
    heights = {"content": 65, "fixed": 38, "mlp_softmax": 26, "mlp_softplus": 12}
    looks = style.looks_of(heights)
    for variant, of_lengths in accuracies_by_length().items():
        lam, _, copied = variant.partition(", ")  # copied: untrained levels have the λ of the highest trained one
        if lam in looks:
            at = {length: np.mean(values) for length, values in of_lengths.items() if length >= 128}
            dashed = {"linestyle": "--", "markerfacecolor": "white"} if copied else {}
            style.draw_line(axis, list(at), list(at.values()), **looks[lam]._asdict(), **dashed)
    for variant, height in heights.items():
        name(axis, variant, (1120, height), looks[variant].color, va="center")
    axis.annotate("dashed: untrained levels\nuse the highest trained λ", (128, 3), fontsize=8, color="0.3")
    style.length_axis(axis, at)
    axis.set(xlabel="tested length (tokens; trained at 128)", xlim=(115, 3200), ylim=(0, 103))
    axis.set_title("Content-aware λ keeps more\non longer sequences", fontsize=10)
    axis.grid(color="0.92")


def measured(row: str, backward: bool = True, table: int | None = None) -> dict[int, float]:
    """What performance.md has in rows with this text, by T up to 32,768: in one of its tables, or else the first time of a
    call (ms) that the tables of the first shape have."""
    page = (DOCS / "reference" / "performance.md").read_text(encoding="utf-8")
    if row not in page:
        raise ValueError(f"performance.md has no row with {row!r}")
    tables = re.findall(r"(?:^\|.*\n)+", page, re.MULTILINE)
    of_first_shape = [text for text in tables if "| growth" in text or "T=65536" in text]
    found: dict[int, float] = {}
    for head, _, *rows in (text.strip().split("\n") for text in (of_first_shape if table is None else [tables[table]])):
        for line in (line for line in rows if row in line):
            for title, cell in zip(head.split("|"), line.split("|"), strict=True):
                if (length := re.fullmatch(r" *T=([\d,]+) *", title)) and "/" in cell:
                    found.setdefault(int(length[1].replace(",", "")), float(cell.split("/")[backward]))
    return dict(sorted((length, value) for length, value in found.items() if length <= 32768))


def time_by_length(axis: Axes) -> None:
    """Time of one call, forward and backward, on one H200."""
    places = [(9500, 0.42), (2050, 22), (2500, 0.13), (4700, 80)]
    for (row, (label, look)), place in zip(PEERS.items(), places, strict=True):
        at = measured(row)
        style.draw_line(axis, list(at), list(at.values()), **look._asdict())
        name(axis, label.replace(", ", ",\n").replace("DNN ", "DNN\n"), place, look.color)
    axis.set_yscale("log")
    style.length_axis(axis, (2048, 8192, 32768))
    axis.set(xlabel="T (tokens)", ylabel="ms, forward + backward", ylim=(0.1, 300))
    axis.set_title("Time grows almost linearly,\nas a single state's does", fontsize=10)
    axis.grid(color="0.92")
    style.log_ticks(axis.yaxis)


def performance() -> None:
    """Time and memory of one call, from the first two tables of performance.md."""
    triton = {"log-linear, Triton kernels": ("log-linear, our Triton kernels", style.OTHER_LOOKS[5])}
    bound = {"lower bound": ("inputs read and outputs written once", style.Look("0.6", ""))}
    panels = {
        "forward (ms)": (False, 0), "forward + backward (ms)": (True, 0), "memory, forward + backward (MiB)": (True, 1),
    }  # fmt: skip
    figure, axes = style.new_figure(style.FULL_WIDTH, 3.4, 1, 3)
    handles = {}
    for axis, (title, which) in zip(axes.flat, panels.items(), strict=True):
        for row, (label, look) in (PEERS | triton | bound).items():
            at = measured(row, *which)
            line = style.draw_line(axis, list(at), list(at.values()), **look._asdict())
            handles.setdefault(label, line)
        axis.set_yscale("log")
        style.length_axis(axis, (2048, 8192, 32768))
        style.label_panel(axis, title, "T (tokens)", 10)
        axis.grid(color="0.92")
        style.log_ticks(axis.yaxis)
    message = "From 8k to 32k tokens log-linear attention takes 4 times as long, softmax attention 15 times"
    style.finish(figure, message, handles)
    style.save_png(figure, DOCS / "reference/language")


def overview() -> None:
    figure, axes = style.new_figure(style.FULL_WIDTH, 3.6, 1, 3)
    for axis, draw in zip(axes.flat, (accuracy_by_size, accuracy_by_length, time_by_length), strict=True):
        draw(axis)
        style.open_frame(axis)
    style.save_png(figure, DOCS / "overview")


def buckets() -> None:
    """The buckets of the past for t = 0 … 15, a row for each t."""
    figure, ((axis,),) = style.new_figure(8.4, 5.4)
    for t in range(16):
        levels = fenwick_level(np.full(t + 1, t), np.arange(t + 1))
        for level in np.unique(levels):
            (inside,) = np.nonzero(levels == level)
            first, number = inside[0], len(inside)
            axis.add_patch(Rectangle((first + 0.05, t + 0.1), number - 0.1, 0.8, facecolor=LEVEL_COLORS[level]))
            text = dict(ha="center", va="center", fontsize=9, color="black" if level in (0, 4) else "white")
            axis.text(first + number / 2, t + 0.5, f"{level}", **text)
        axis.text(17.6, t + 0.5, f"{t:04b}", ha="center", va="center", family="monospace", fontsize=10)
    axis.text(17.6, -0.35, "t in binary", ha="center", fontsize=9)
    axis.set(xlim=(0, 18.6), ylim=(16, 0), xlabel="past token s", ylabel="current token t")
    axis.set_xticks(np.arange(16) + 0.5, range(16))
    axis.set_yticks(np.arange(16) + 0.5, range(16))
    axis.tick_params(length=0)
    axis.spines[:].set_visible(False)
    style.title(figure, "Each 1 in the binary digits of t is a bucket of the past (the numbers are levels)")
    style.save_png(figure, DOCS / "explanation/buckets")


def mask() -> None:
    """The mask of levels, and the same with λ and decay."""
    t, s = np.indices((16, 16))
    seen = s <= t
    level = np.where(seen, fenwick_level(np.maximum(t, s), np.minimum(t, s)), -1)
    lam = np.array([1.0, 0.25, 0.6, 0.9, 0.35])  # an example
    weight = np.where(seen, lam[level] * np.exp(-0.06 * (t - s)), np.nan)
    figure, axes = style.new_figure(8.4, 4.2, 1, 3, gridspec_kw={"width_ratios": [1, 1, 0.28]})
    for row, column in zip(*np.nonzero(seen), strict=True):
        color = LEVEL_COLORS[level[row, column]]
        axes[0, 0].add_patch(Rectangle((column + 0.04, row + 0.04), 0.92, 0.92, facecolor=color))
    axes[0, 1].imshow(weight, extent=(0, 16, 16, 0), cmap="Greys", vmin=0, vmax=1)
    for axis, title in zip(
        axes.flat, ("the level of token s, seen from token t", "λ of that level × decay"), strict=False
    ):
        axis.set(xlim=(0, 16), ylim=(16, 0), aspect="equal", xlabel="past token s")
        axis.set_title(title, fontsize=10)
        axis.set_xticks(np.arange(0, 16, 5) + 0.5, range(0, 16, 5))
        axis.set_yticks(np.arange(0, 16, 5) + 0.5, range(0, 16, 5))
    axes[0, 0].set_ylabel("current token t")
    key = axes[0, 2]
    for index, color in enumerate(LEVEL_COLORS):
        key.add_patch(Rectangle((0, index), 0.8, 0.8, facecolor=color))
        key.text(1.0, index + 0.4, f"level {index}\nλ = {lam[index]:g}", va="center", fontsize=9)
    key.set(xlim=(0, 3), ylim=(5.2, -0.6))
    key.set_axis_off()
    style.title(figure, "The attention's mask: one weight for each level, times the decay")
    style.save_png(figure, DOCS / "explanation/mask")


if __name__ == "__main__":
    overview()
    buckets()
    mask()
    performance()
