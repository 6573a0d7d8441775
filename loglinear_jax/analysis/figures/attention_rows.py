"""The figure of what a head draws on: rows of its attention matrix."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib.figure import Figure

from loglinear_jax.analysis.attention_rows import AttentionRow
from loglinear_jax.analysis.figures.lam import short
from loglinear_jax.analysis.figures.style import FULL_WIDTH, MARK, new_figure, open_frame, title, wrap


def draw_attention_rows(
    rows: Sequence[tuple[AttentionRow, str, Sequence[int] | np.ndarray]],
    marks: Mapping[str, int],
    length: int,
    message: str,
) -> Figure:
    """Rows of attention by source token, their Fenwick buckets shaded, and beside each the sum of |weight| in every bucket,
    with the bucket's λ.

    rows: (row, its title, positions of sources to point out). message: the figure's title.
    """
    grid = {"width_ratios": (3.2, 1)}
    levels = max(len(np.unique(row.level)) for row, *_ in rows)
    each = max(2.5, 0.9 + 0.16 * levels)
    figure, axes = new_figure(FULL_WIDTH, 0.8 + each * len(rows), len(rows), 2, gridspec_kw=grid)
    for (axis, sums), (row, name, pointed) in zip(axes, rows, strict=True):
        sources = np.arange(len(row.weight))
        starts = [0, *(1 + np.flatnonzero(np.diff(row.level)))]
        stops = [*starts[1:], len(sources)]
        axis.vlines(sources, 0, row.weight, color="#0072B2", linewidth=max(1.0, min(4.0, 250 / length)))
        axis.axhline(0, color="0.3", linewidth=0.8)
        for number, (start, stop) in enumerate(zip(starts, stops, strict=True)):
            axis.axvspan(start - 0.5, stop - 0.5, color="#E69F00" if number % 2 else "#999999", alpha=0.16, linewidth=0)
            if stop - start > 0.09 * length:
                axis.annotate(
                    f"level {row.level[start]}", ((start + stop - 1) / 2, 1.0), xycoords=("data", "axes fraction"),
                    xytext=(0, -2), textcoords="offset points", ha="center", va="top", fontsize=8,
                )  # fmt: skip
        for source in pointed:
            axis.plot(source, row.weight[source], "D", markersize=7, markerfacecolor="none", markeredgecolor=MARK)
        for position in marks.values():
            axis.axvline(position - 0.5, color=MARK, linestyle="--", linewidth=1.0)
        axis.plot(row.position, 0, "v", color="k", markersize=7, clip_on=False)
        axis.margins(y=0.14)
        axis.set_xlim(-1, length)
        axis.set_title(wrap(name, 6.2, 9), fontsize=9)
        axis.set(xlabel="source position (token)", ylabel="weight of its value")
        open_frame(axis)

        levels = row.level[starts]
        total = [np.abs(row.weight[start:stop]).sum() for start, stop in zip(starts, stops, strict=True)]
        sums.barh(range(len(levels)), total, color="#0072B2")
        for at, (level, value) in enumerate(zip(levels, total, strict=True)):
            sums.annotate(
                f"λ {short(float(row.lam[level]))}",
                (value, at),
                xytext=(3, 0),
                textcoords="offset points",
                va="center",
                fontsize=8,
            )
        sums.set_yticks(range(len(levels)), [f"level {level}" for level in levels], fontsize=8)
        sums.margins(x=0.45)
        sums.xaxis.get_major_locator().set_params(nbins=3)
        sums.set_xlabel("Σ |weight| in the bucket")
        open_frame(sums)
    title(figure, message)
    return figure
