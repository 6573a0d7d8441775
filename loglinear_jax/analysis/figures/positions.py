"""Figures against the position in a text."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from matplotlib.figure import Figure

from loglinear_jax.analysis.figures.style import log_ticks, new_figure, open_frame, title
from loglinear_jax.evaluate import Span


def draw_perplexity_by_position(spans: Sequence[Span], subject: str) -> Figure:
    """Perplexity of each span of positions at its middle on the logarithmic axis, with its interval. subject: in the title."""
    figure, ((axis,),) = new_figure(7.6, 4.2)
    middles = [(span.first * span.last) ** 0.5 for span in spans]
    low, high = ([getattr(span, name) for span in spans] for name in ("low", "high"))
    axis.fill_between(middles, low, high, alpha=0.2, linewidth=0)
    axis.plot(middles, [span.perplexity for span in spans], marker="o", linewidth=2)
    axis.set(xlabel="position (tokens)", ylabel="perplexity", xscale="log", yscale="log")
    for direction in (axis.xaxis, axis.yaxis):
        log_ticks(direction)
    open_frame(axis)
    shown = " Shaded: 95 % interval over windows." if np.isfinite(low).any() else ""
    title(figure, f"Perplexity by position: {subject}.{shown}")
    return figure
