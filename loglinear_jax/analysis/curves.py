"""How do seeds learn? Validation against step, and when seeds converge."""

from __future__ import annotations

import os
from collections.abc import Collection, Sequence
from typing import Any

import numpy as np
from jaxtyping import Float
from matplotlib import colormaps
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from loglinear_jax.analysis import style
from loglinear_jax.analysis.paper import describe_run
from loglinear_jax.analysis.rates import DASHES, without_rates
from loglinear_jax.analysis.section import Context, Section
from loglinear_jax.config import some_of
from loglinear_jax.runs.loading import Run, read_run
from loglinear_jax.tasks import SOLVED_ACCURACY, Score

WIDTHS = tuple(style.FULL_WIDTH / 3 * n + 1.6 * (n == 1) for n in (1, 2, 3))  # of learning curves, by their columns


def draw_learning_curves(workdir: str | os.PathLike | Run) -> Figure:
    """The task's score in validation against step, for each variant of a run: every seed thin, the median and quartiles of
    the seeds in black; of a variant with several learning rates or weight decays the median of each."""
    run = workdir if isinstance(workdir, Run) else read_run(workdir)
    score, seeds = run.task.score, run.config.train.num_seeds
    variants = without_rates(run.config, run.variants)
    swept = {name: at_rates for name, at_rates in variants.items() if len(at_rates) > 1}
    of_rates, handles = _looks_of_rates({at for at_rates in swept.values() for at in at_rates.values()})
    figure, axes = style.panel_grid(len(variants), WIDTHS, 0.8, 2.7)
    for axis, (name, look) in zip(axes.flat, style.looks_of(variants).items(), strict=False):
        bests = []
        for variant, at in variants[name].items():
            steps, values, best = _validation(run, variant)
            bests.append(best)
            if len(steps) and name in swept:
                axis.plot(steps, np.nanmedian(values, axis=1), **of_rates[at])
            elif len(steps):
                alpha, width = max(0.2, seeds**-0.4), 0.8 if seeds > 2 else 2
                axis.plot(steps, values, color=look.color, alpha=alpha, linewidth=width)
                if seeds > 2:
                    low, median, high = np.nanpercentile(values, (25, 50, 75), axis=1)
                    axis.plot(steps, np.stack([low, high], 1), color="0.15", linewidth=1.3, linestyle=(0, (4, 2)))
                    axis.plot(steps, median, color="0.15", linewidth=2.4)
        found = _of_rates(score, bests) if name in swept else _of_seeds(score, *bests)
        style.label_panel(axis, f"{_breakable(name)}\n{found}", "training step", 10)
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
    if swept:
        others = f"; else {explained}" if explained and len(swept) < len(variants) else ""
        explained = f"{'median of the seeds' if seeds > 1 else 'the seed'} at each rate{others}"
    message = f"{describe_run(run)}; {seeds} seed{'s' * (seeds > 1)}\n{explained}".strip()
    style.finish(figure, message, handles)
    return figure


def _validation(run: Run, variant: str) -> tuple[np.ndarray, np.ndarray, Float[np.ndarray, " seeds"]]:
    """(Steps of the evaluations at which a seed has a finite value, the values there, nan where a seed has none, the best of
    each seed)."""
    metrics, score = run.metrics(variant), run.task.score
    values = score.of(metrics["val_loss"], metrics["val_accuracy"])
    there = np.isfinite(values)
    worst = -np.inf if score.higher_is_better else np.inf
    best = (np.max if score.higher_is_better else np.min)(np.where(there, values, worst), axis=0, initial=worst)
    best = run.outcomes[variant].best if variant in run.outcomes else np.where(np.isinf(best), np.nan, best)
    some = there.any(1)
    return metrics["step"][some], np.where(there, values, np.nan)[some], best


def _of_seeds(score: Score, best: Float[np.ndarray, " seeds"]) -> str:
    """How good the seeds get, in words."""
    found = best[np.isfinite(best)]
    if not len(found):
        return "no finite evaluation"
    if score.thresholds:
        threshold = 100 * score.thresholds[0]
        return f"{(best >= threshold).sum()} of {len(best)} seeds reach {threshold:.0f} %"
    of_some = f" ({len(found)} of {len(best)} seeds)" if len(found) < len(best) else ""
    return f"best {score.name}: {score.text(found.max() if score.higher_is_better else found.min())}{of_some}"


def _of_rates(score: Score, bests: Sequence[Float[np.ndarray, " seeds"]]) -> str:
    """At how many of the rates most seeds converge, or the best median."""
    medians = np.array([np.nan if np.isnan(best).all() else np.nanmedian(best) for best in bests])
    if np.isnan(medians).all():
        return "no finite evaluation"
    if score.thresholds:
        threshold = 100 * score.thresholds[0]
        return f"median reaches {threshold:.0f} % at {(medians >= threshold).sum()} of {len(medians)} rates"
    return f"best median {score.name}: {score.text((np.nanmax if score.higher_is_better else np.nanmin)(medians))}"


def _looks_of_rates(every: Collection[tuple[float, float]]) -> tuple[dict[tuple[float, float], Any], dict[str, Line2D]]:
    """(By learning rate and weight decay how its line looks, and the same for the legend): a colour for each rate, a dash for
    each decay."""
    rates, decays = (sorted({at[i] for at in every}) for i in (0, 1))
    colors = dict(zip(rates, colormaps["viridis"](np.linspace(0, 0.9, len(rates))), strict=True))
    looks, handles = {}, {}
    for rate, decay in sorted(every, key=lambda at: at[::-1]):
        dash = DASHES[decays.index(decay) % len(DASHES)]
        looks[rate, decay] = dict(color=colors[rate], linestyle=dash, linewidth=1.3)
        name = f"rate {rate:g}" + (f", decay {decay:g}" if len(decays) > 1 else "")
        handles[name] = Line2D([], [], **looks[rate, decay])
    return looks, handles


def _breakable(variant: str) -> str:
    """A variant's display name without the "train." before some settings, which can be broken between any two of them."""
    return style.describe_variant(variant).replace("train.", "").replace("+", " + ")


def draw_convergence(run: Run) -> Figure | None:
    """Share of the seeds that have reached 99 % validation accuracy by each step: the distribution of the convergence step.

    None if the score of its task has no thresholds, or no seed reached it.
    """
    solved = {variant: outcome.num_solved for variant, outcome in run.outcomes.items()}
    if not run.task.score.thresholds or not any(solved.values()):
        return None
    figure, ((axis,),) = style.new_figure(7.6, 4.0)
    last, handles = 1.04 * max(outcome.last_step for outcome in run.outcomes.values()), {}
    for variant, look in style.looks_of(run.outcomes).items():
        steps = run.outcomes[variant].solved_step
        reached = np.sort([step for step in steps if step is not None])
        share = 100 * np.arange(len(reached) + 1) / len(steps)
        how = dict(where="post", markevery=[-1], linewidth=2.2, **look._asdict())
        (line,) = axis.step([0, *reached, last], [*share, share[-1]], **how)
        handles[f"{_breakable(variant)} ({len(reached)} of {len(steps)})"] = line
    axis.set(xlabel="training step", ylabel="seeds at ≥ 99 % validation accuracy (%)", ylim=(-2, 102), xlim=(0, last))
    most, seeds = max(solved.values()), max(len(outcome.seeds) for outcome in run.outcomes.values())
    first = [style.describe_variant(variant) for variant, count in solved.items() if count == most]
    message = f"Most seeds reach 99 % with {' and '.join(first)}: {most} of {seeds}"
    if len(first) == len(solved) > 1:
        message = f"{most} seeds reach 99 % with every variant"
    style.finish(figure, f"{message}\n{describe_run(run)}", handles)
    return figure


class Curves(Section):
    """Figures from metrics and summaries."""

    NAME = "curves"
    TITLE = "Learning curves"

    def __init__(self, context: Context):
        super().__init__(context)
        self.unsolved: list[str] = []

    def show_run(self, run: Run, found: dict[str, Any]) -> None:
        figure = draw_convergence(run)
        if figure is None and run.outcomes and run.task.score.thresholds:
            self.unsolved.append(describe_run(run))
        if any(len(run.metrics(variant)["step"]) for variant in run.variants):
            self.add(draw_learning_curves(run), "curves", run, "learning curves")
        else:
            problem = f"{run.workdir}: no learning curves: metrics.jsonl is empty or not here"
            self.context.report.problems.append(problem)
        self.add(figure, "convergence", run, "when seeds converge")

    def show_all(self) -> None:
        if self.unsolved:
            of_some = f" of {some_of(self.unsolved)}" if len(self.unsolved) < len(self.context.runs) else ""
            solved = f"{100 * SOLVED_ACCURACY:.0f} %"
            self.part.notes.append(f"When seeds converge: not drawn, as no seed{of_some} reaches {solved}.")
