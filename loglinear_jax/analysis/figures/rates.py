"""Figure of learning rates: a task's score, and how many seeds converge, against the rate."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FixedLocator, NullFormatter

from loglinear_jax.analysis.figures.style import FULL_WIDTH, legend_below, log_ticks, new_figure, open_frame, title
from loglinear_jax.analysis.labels import colors_of, describe_run, describe_variant
from loglinear_jax.analysis.tables.rates import GOOD, AtRate, by_rate, chance_of, windows_of_rates
from loglinear_jax.runs.cells import finite
from loglinear_jax.runs.loading import Run
from loglinear_jax.runs.outcome import VariantOutcome
from loglinear_jax.statistics import FEWEST_FOR_INTERVAL, mean_interval
from loglinear_jax.tasks import CONVERGED_ACCURACY, Score

# Of weight decays.
LINES = ("-", "--", ":", "-.")
MARKERS = "osD^"


def draw_rates(run: Run) -> Figure | None:
    """The mean over seeds against the learning rate, with its interval of 95 %, a line for each variant and weight decay, and
    beside it the share of seeds that converge, where that counts; None if a run has one rate alone, or no finite score."""
    variants = by_rate(run)
    every = [at.outcome.shown for group in variants.values() for at in group]
    if not any(len(finite(shown)) for shown in every):
        return None
    score, first = run.task.score, next(iter(variants.values()))[0].outcome
    panels = [
        (
            first.shown_as + (f" ({score.unit})" if score.unit else ""),
            lambda outcome: mean_interval(finite(outcome.shown)),
        )
    ]
    if score.thresholds:
        panels.append((f"seeds at ≥ {100 * CONVERGED_ACCURACY:.0f} % (%)", _percent_converged))
    figure, (axes,) = new_figure(7.6 if len(panels) == 1 else FULL_WIDTH, 4.0, 1, len(panels))
    decays = sorted({at.weight_decay for group in variants.values() for at in group})
    colors = colors_of(variants)
    for axis, (label, of_outcome) in zip(axes, panels, strict=True):
        for variant, color in colors.items():
            for line, decay in enumerate(decays):
                group = [at for at in variants[variant] if at.weight_decay == decay]
                _draw_line(axis, group, of_outcome, color, **_look(line))
        axis.set_xscale("log")
        axis.set(xlabel="learning rate", ylabel=label)
        _ticks_at(axis, sorted({at.learning_rate for group in variants.values() for at in group}), len(panels))
        open_frame(axis)
    if score.metric == "loss":
        axes[0].set_yscale("log")
        log_ticks(axes[0].yaxis)
    else:
        for axis in axes:
            axis.set_ylim(-2, 102)
    legend_below(figure, _legend(colors, decays))
    seeds = len(first.seeds)
    shaded = ", shaded: 95 % interval of the mean" if seeds >= FEWEST_FOR_INTERVAL else ""
    lacking = sum(len(shown) - len(finite(shown)) for shown in every)
    left_out = f", without {lacking} that have no finite {score.name}" if lacking else ""
    counted = f"{seeds} seed{'s' * (seeds > 1)} at each rate{left_out}"
    title(figure, f"{_message(score, variants)}\n{describe_run(run)}; {counted}{shaded}")
    return figure


def _draw_line(
    axis: Axes,
    group: Sequence[AtRate],
    of_outcome: Callable[[VariantOutcome], tuple[float, float, float]],
    color: str,
    **look: Any,
) -> None:
    """A number of the outcome, and its interval, against the rate."""
    if group:
        rates = [at.learning_rate for at in group]
        numbers, lows, highs = np.array([of_outcome(at.outcome) for at in group]).T
        axis.plot(rates, numbers, color=color, linewidth=1.8, **look)
        axis.fill_between(rates, lows, highs, color=color, alpha=0.12, linewidth=0)


def _percent_converged(outcome: VariantOutcome) -> tuple[float, float, float]:
    """Without its interval, which is wide: those of several variants would hide each other. It is in the table."""
    return 100 * outcome.share_converged, np.nan, np.nan


def _look(decay: int) -> dict[str, Any]:
    return dict(linestyle=LINES[decay % len(LINES)], marker=MARKERS[decay % len(MARKERS)], markersize=5)


def _ticks_at(axis: Axes, rates: Sequence[float], panels: int) -> None:
    """Ticks at the rates that were tried, and numbers at all of them, or at as many as there is room for."""
    most = 12 // panels
    shown = rates[:: -(-len(rates) // most)]
    axis.xaxis.set_major_locator(FixedLocator(shown))
    axis.xaxis.set_minor_locator(FixedLocator([rate for rate in rates if rate not in shown]))
    axis.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axis.xaxis.set_minor_formatter(NullFormatter())
    for label in axis.get_xticklabels():
        label.set(rotation=45, ha="right", rotation_mode="anchor", fontsize=9)


def _legend(colors: Mapping[str, str], decays: Sequence[float]) -> dict[str, Line2D]:
    """A colour for each variant and, of several weight decays, a line in grey for each."""
    several = len(decays) > 1
    how = {} if several else dict(marker="o", markersize=5)
    handles = {
        describe_variant(variant): Line2D([], [], color=color, linewidth=2.4, **how)
        for variant, color in colors.items()
    }
    if several:
        for line, decay in enumerate(decays):
            handles[f"weight decay {decay:g}"] = Line2D([], [], color="0.35", linewidth=1.8, **_look(line))
    return handles


def _message(score: Score, variants: Mapping[str, Sequence[AtRate]]) -> str:
    chance = chance_of(score, variants)
    windows = [window for group in variants.values() for window in windows_of_rates(score, group, chance)]
    if not windows:
        return "Every variant at every learning rate"
    counts, tried = sorted(len(window.rates) for window in windows), max(window.tried for window in windows)
    some = f"{counts[0]}" if counts[0] == counts[-1] else f"{counts[0]} to {counts[-1]}"
    return f"{some} of {tried} rates come within {100 * GOOD:.0f} % of a variant's best"
