"""Figure of learning rates: a task's score against the rate."""

from __future__ import annotations

import numpy as np
from matplotlib.figure import Figure

from loglinear_jax.analysis.figures.style import handles_of, legend_below, log_ticks, new_figure, open_frame, title
from loglinear_jax.analysis.labels import colors_of, describe_run, describe_variant
from loglinear_jax.analysis.tables.rates import GOOD, by_rate, chance_of, windows_of_rates
from loglinear_jax.runs.loading import Run
from loglinear_jax.statistics import FEWEST_FOR_INTERVAL, mean_interval

LINES = ("-", "--", ":", "-.")  # of weight decays


def draw_rates(run: Run) -> Figure | None:
    """The mean over seeds against the learning rate, with its interval of 95 %, a line for each variant and weight decay; None
    if a run has one rate alone."""
    variants = by_rate(run)
    if not variants:
        return None
    figure, ((axis,),) = new_figure(7.6, 4.2)
    decays = sorted({at.weight_decay for group in variants.values() for at in group})
    for variant, color in colors_of(variants).items():
        for line, decay in enumerate(decays):
            group = [at for at in variants[variant] if at.weight_decay == decay]
            if not group:
                continue
            means, lows, highs = np.array([mean_interval(at.outcome.shown) for at in group]).T
            label = describe_variant(variant) + (f", weight decay {decay:g}" if len(decays) > 1 else "")
            rates = [at.learning_rate for at in group]
            axis.plot(rates, means, LINES[line % len(LINES)], marker="o", color=color, linewidth=2, label=label)
            axis.fill_between(rates, lows, highs, color=color, alpha=0.15, linewidth=0)
    score, seeds = run.task.score, len(next(iter(variants.values()))[0].outcome.seeds)
    axis.set_xscale("log")
    shown_as = next(iter(variants.values()))[0].outcome.shown_as
    axis.set(xlabel="learning rate", ylabel=shown_as + (f" ({score.unit})" if score.unit else ""))
    if score.metric == "loss":
        axis.set_yscale("log")
        log_ticks(axis.yaxis)
    else:
        axis.set_ylim(0, 102)
    log_ticks(axis.xaxis)
    legend_below(figure, handles_of(axis))
    chance = chance_of(score, variants)
    windows = [window for group in variants.values() for window in windows_of_rates(score, group, chance)]
    message = "Every variant at every learning rate"
    if windows:
        counts, tried = sorted(len(window.rates) for window in windows), max(window.tried for window in windows)
        some = f"{counts[0]}" if counts[0] == counts[-1] else f"{counts[0]} to {counts[-1]}"
        message = f"{some} of {tried} rates come within {100 * GOOD:.0f} % of a variant's best"
    shaded = ", shaded: 95 % interval" if seeds >= FEWEST_FOR_INTERVAL else ""
    title(
        figure,
        f"{message}\n{describe_run(run)}; mean of {seeds} seed{'s' * (seeds > 1)}{shaded}",
    )
    open_frame(axis)
    return figure
