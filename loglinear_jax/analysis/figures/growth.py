"""Figures against the length of sequences: scores of trained models, training time and decoding memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from jaxtyping import Float
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from loglinear_jax.analysis.figures.style import (
    MARK,
    handles_of,
    legend_below,
    log_ticks,
    new_figure,
    open_frame,
    title,
)
from loglinear_jax.analysis.labels import colors_of, describe_variant
from loglinear_jax.statistics import mean_interval
from loglinear_jax.tasks import Score

MOST_LINES = 100  # of seeds in a figure


def draw_scores_by_length(
    by_variant: Mapping[str, tuple[Sequence[int], Float[np.ndarray, "S N"]]], trained: int, score: Score, subject: str
) -> Figure:
    """The score against the length of the evaluated sequences: means thick; seeds thin, or where they are more than MOST_LINES
    the means' 95 % intervals shaded.

    by_variant: (lengths [N], shown values of the score [S, N] of the seeds), by the variant; after a comma what is changed in
    it, which is dashed. trained: the length of the training sequences. subject: what they were trained on.
    """
    figure, ((axis,),) = new_figure(7.6, 4.2)
    colors = colors_of(dict.fromkeys(_unchanged(variant) for variant in by_variant))
    many = sum(len(values) for _, values in by_variant.values()) > MOST_LINES
    for variant, (lengths, values) in by_variant.items():
        color, dashed = colors[_unchanged(variant)], variant != _unchanged(variant)
        if many:
            _, low, high = np.transpose([mean_interval(column) for column in values.T])
            axis.fill_between(lengths, low, high, color=color, alpha=0.2, linewidth=0)
        else:
            axis.plot(lengths, values.T, color=color, alpha=max(0.15, 0.5 / len(values) ** 0.5), linewidth=0.8)
        axis.plot(
            lengths, values.mean(0), color=color, linewidth=2.4, marker="o", label=describe_variant(variant),
            linestyle="--" if dashed else "-", markerfacecolor="white" if dashed else color,
        )  # fmt: skip
    axis.axvline(trained, color=MARK, linestyle="--", linewidth=1.2)
    axis.annotate(
        "trained", (trained, 0.02), xycoords=("data", "axes fraction"), xytext=(3, 0), textcoords="offset points",
        color=MARK,
    )  # fmt: skip
    _length_axis(axis, [n for lengths, _ in by_variant.values() for n in lengths])
    unit = f" ({score.unit})" if score.unit else ""
    axis.set(xlabel="length of the evaluated sequences (tokens)", ylabel=score.name + unit)
    if score.unit == "%":
        axis.set_ylim(0, 102)
    legend_below(figure, handles_of(axis))
    title(figure, f"{_two_best(by_variant, trained, score)}\ntrained on {subject}")
    open_frame(axis)
    return figure


def _unchanged(variant: str) -> str:
    """Without what is changed in it: of "fixed, higher levels as 7" "fixed"."""
    return variant.partition(", ")[0]


def _two_best(by_variant: Mapping[str, tuple[Sequence[int], np.ndarray]], trained: int, score: Score) -> str:
    """Where all can be compared: at the longest length that every variant has."""
    longest = min(max(lengths) for lengths, _ in by_variant.values())
    at_longest = {variant: values[:, list(lengths).index(longest)] for variant, (lengths, values) in by_variant.items()}
    worst = -np.inf if score.higher_is_better else np.inf
    means = {variant: float(np.nan_to_num(values.mean(), nan=worst)) for variant, values in at_longest.items()}
    best = sorted(means, key=means.get, reverse=score.higher_is_better)[:2]
    shown = ", then ".join(
        f"{describe_variant(variant).removeprefix('λ: ')} ({score.text(means[variant])})" for variant in best
    )
    return f"Best {score.name} at {longest:,} tokens, {longest // trained} times the trained length: {shown}"


def draw_complexity(measured: Mapping[str, Mapping[str, np.ndarray]], message: str) -> Figure:
    """Training time and decoding memory against T, log-log. measured: variant -> "length", "ms", "bytes". message: the
    figure's title."""
    figure, (axes,) = new_figure(9.3, 4.0, 1, 2)
    panels = (("ms", "training step (ms)", 1), ("bytes", "decoding memory of a sequence (KiB)", 1024))
    for axis, (name, label, unit) in zip(axes, panels, strict=True):
        for (variant, color), marker in zip(colors_of(measured).items(), "osD^vP" * 9, strict=False):
            found = measured[variant]
            values = np.asarray(found[name]) / unit
            axis.plot(
                found["length"], values, marker=marker, color=color, label=describe_variant(variant), linewidth=1.8
            )
        _length_axis(axis, [int(n) for found in measured.values() for n in found["length"]])
        axis.set_yscale("log")
        log_ticks(axis.yaxis)
        axis.set(xlabel="T (tokens)", ylabel=label)
        axis.grid(alpha=0.3)
        open_frame(axis)
    legend_below(figure, handles_of(axes[0]))
    title(figure, message)
    return figure


def _length_axis(axis: Axes, lengths: Sequence[int]) -> None:
    lengths = sorted(set(lengths))
    axis.set_xscale("log", base=2)
    axis.set_xticks(lengths, [f"{n // 1024}k" if n >= 1024 and n % 1024 == 0 else str(n) for n in lengths])
    axis.minorticks_off()
