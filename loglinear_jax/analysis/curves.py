"""How do seeds learn? Validation against step."""

from __future__ import annotations

from typing import Any

import numpy as np
from jaxtyping import Float
from matplotlib import colormaps
from matplotlib.figure import Figure

from loglinear_jax.analysis import style
from loglinear_jax.analysis.paper import describe_run
from loglinear_jax.analysis.rates import DASHES, without_rates
from loglinear_jax.analysis.section import Section
from loglinear_jax.runs.loading import Run

WIDTHS = tuple(style.FULL_WIDTH / 3 * n + 1.6 * (n == 1) for n in (1, 2, 3))  # of learning curves, by their columns


def draw_learning_curves(run: Run) -> Figure:
    """Draw the task's score in validation against the step, in a panel for each variant of a run.

    Every seed is a thin line, the median of the seeds a black one, their quartiles dashed. Of a variant with several learning
    rates or weight decays, only the median at each of them is drawn.

    Args:
        run: whose metrics are read.

    Returns:
        The figure.

    Raises:
        ConfigError: if its metrics can't be read.
    """
    score, seeds = run.task.score, run.config.train.num_seeds
    variants = without_rates(run.config, run.variants)
    every = {at for at_rates in variants.values() if len(at_rates) > 1 for at in at_rates.values()}
    rates, decays = (sorted({at[i] for at in every}) for i in (0, 1))
    colors = dict(zip(rates, colormaps["viridis"](np.linspace(0, 0.9, len(rates))), strict=True))
    figure, axes = style.panel_grid(len(variants), WIDTHS, 0.8, 2.7)
    handles: dict[str, Any] = {}
    for axis, (name, look) in zip(axes.flat, style.looks_of(variants).items(), strict=False):
        medians = []
        for variant, (rate, decay) in variants[name].items():
            steps, values, best = _validation(run, variant)
            medians.append(np.nanmedian(best) if np.isfinite(best).any() else np.nan)
            if not len(steps):
                continue
            low, median, high = np.nanpercentile(values, (25, 50, 75), axis=1)
            if len(variants[name]) > 1:
                label = f"rate {rate:g}" + (f", decay {decay:g}" if len(decays) > 1 else "")
                dash = DASHES[decays.index(decay) % len(DASHES)]
                (handles[label],) = axis.plot(steps, median, color=colors[rate], linestyle=dash, linewidth=1.3)
                continue
            axis.plot(steps, values, color=look.color, alpha=max(0.2, seeds**-0.4), linewidth=0.8 if seeds > 2 else 2)
            if seeds > 2:
                axis.plot(steps, np.stack([low, high], 1), color="0.15", linewidth=1.3, linestyle=(0, (4, 2)))
                axis.plot(steps, median, color="0.15", linewidth=2.4)
        finite = [median for median in medians if np.isfinite(median)]
        found = "no finite evaluation"
        if finite:
            best_of_rates = (max if score.higher_is_better else min)(finite)
            found = f"{'best ' * (len(medians) > 1)}median {score.name}: {score.text(best_of_rates)}"
        if score.thresholds and len(medians) == 1:
            found = (
                f"{(best >= 100 * score.thresholds[0]).sum()} of {seeds} seeds reach {100 * score.thresholds[0]:.0f} %"
            )
        shown = style.describe_variant(name).replace("train.", "").replace("+", " + ")  # may be broken between settings
        style.label_panel(axis, f"{shown}\n{found}", "training step", 10)
        axis.xaxis.get_major_locator().set_params(nbins=5)
        for threshold in score.thresholds[-1:]:
            axis.axhline(100 * threshold, color="0.6", linewidth=0.8, linestyle=":")
    if score.metric == "loss":
        axes[0, 0].set_yscale("log")
        style.log_ticks(axes[0, 0].yaxis)
    else:
        axes[0, 0].set_ylim(0, 102)
    for axis in axes[:, 0]:
        axis.set_ylabel(score.label)
    explained = "coloured: every seed; black: median of the seeds; dashed: quartiles" if seeds > 2 else ""
    if handles:
        others = f"; else {explained}" if explained and min(map(len, variants.values())) == 1 else ""
        explained = f"median of the seeds at each rate{others}"
        handles = dict(sorted(handles.items(), key=lambda item: float(item[0].split()[1].rstrip(","))))
    style.finish(figure, f"{describe_run(run)}; {seeds} seed{'s' * (seeds > 1)}\n{explained}".strip(), handles)
    return figure


def _validation(run: Run, variant: str) -> tuple[np.ndarray, np.ndarray, Float[np.ndarray, " seeds"]]:
    """(Steps at which a seed has a finite value, the values there, nan where a seed has none, the best of each seed)."""
    metrics, score = run.metrics(variant), run.task.score
    values = score.of(metrics["val_loss"], metrics["val_accuracy"])
    there = np.isfinite(values)
    worst = -np.inf if score.higher_is_better else np.inf
    best = (np.max if score.higher_is_better else np.min)(np.where(there, values, worst), axis=0, initial=worst)
    best = run.outcomes[variant].best if variant in run.outcomes else np.where(np.isinf(best), np.nan, best)
    some = there.any(1)
    return metrics["step"][some], np.where(there, values, np.nan)[some], best


class Curves(Section):
    """The learning curves of each run, from its metrics.jsonl."""

    NAME = "curves"
    TITLE = "Learning curves"

    def show_run(self, run: Run, found: dict[str, Any]) -> None:
        if any(len(run.metrics(variant)["step"]) for variant in run.variants):
            self.add(draw_learning_curves(run), "curves", run, "learning curves")
        else:
            self.context.report.problems.append(
                f"{run.workdir}: no learning curves: metrics.jsonl is empty or not here"
            )
