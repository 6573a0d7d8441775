"""How do seeds learn? Validation against step, and when seeds converge."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from jaxtyping import Float
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from loglinear_jax.analysis import style
from loglinear_jax.analysis.best_rates import DASHES, without_rates
from loglinear_jax.analysis.experiments import describe_run
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
    swept = [name for name, at_rates in variants.items() if len(at_rates) > 1]
    looks = style.looks_of(variants)
    of_rates = _looks_of_rates([at for name in swept for at in variants[name].values()])
    figure, axes = style.panel_grid(len(variants), WIDTHS, 0.8, 2.7)
    width = figure.get_figwidth() / axes.shape[1]
    for axis, (name, at_rates) in zip(axes.flat, variants.items(), strict=False):
        if name in swept:
            best = _draw_rates_of(axis, run, at_rates, of_rates)
        else:
            best = _draw_every_seed(axis, run, next(iter(at_rates)), looks[name].color, seeds > 2)
        label = _breakable(style.describe_variant(name))
        axis.set_title(style.wrap(f"{label}\n{best}", width - 0.4, 10), fontsize=10)
        axis.set_xlabel("training step")
        axis.xaxis.set_tick_params(labelbottom=True)
        axis.xaxis.get_major_locator().set_params(nbins=5)
        for threshold in score.thresholds[-1:]:
            axis.axhline(100 * threshold, color="0.6", linewidth=0.8, linestyle=":")
        style.open_frame(axis)
    if score.metric == "loss":
        axes[0, 0].set_yscale("log")
        style.log_ticks(axes[0, 0].yaxis)
    else:
        axes[0, 0].set_ylim(0, 102)
    for axis in axes[:, 0]:
        axis.set_ylabel(score.label)
    if swept:
        several_decays = len({decay for _, decay in of_rates}) > 1
        handles = {
            f"rate {rate:g}" + (f", decay {decay:g}" if several_decays else ""): Line2D([], [], **look)
            for (rate, decay), look in of_rates.items()
        }
        style.legend_below(figure, handles)
    explained = "coloured: every seed; black: median of the seeds; dashed: quartiles" if seeds > 2 else ""
    if swept:
        others = f"; else {explained}" if explained and len(swept) < len(variants) else ""
        explained = f"{'median of the seeds' if seeds > 1 else 'the seed'} at each rate{others}"
    style.title(figure, f"{describe_run(run)}; {seeds} seed{'s' * (seeds > 1)}\n{explained}".strip())
    return figure


def _draw_every_seed(axis: Axes, run: Run, variant: str, color: str, several: bool) -> str:
    """Every seed of a variant and, of several, the median and quartiles; returns how good they get, in words."""
    metrics, score = run.metrics(variant), run.task.score
    values = score.of(metrics["val_loss"], metrics["val_accuracy"])
    steps, finite = _finite(metrics["step"], values)
    if len(steps):
        alpha, line = max(0.2, values.shape[1] ** -0.4), 0.8 if several else 2
        axis.plot(steps, finite, color=color, alpha=alpha, linewidth=line)
        if several:
            low, median, high = np.nanpercentile(finite, (25, 50, 75), axis=1)
            axis.plot(steps, np.stack([low, high], 1), color="0.15", linewidth=1.3, linestyle=(0, (4, 2)))
            axis.plot(steps, median, color="0.15", linewidth=2.4)
    return _best_seeds(score, _best_in_run(run, variant, values))


def _draw_rates_of(
    axis: Axes,
    run: Run,
    at_rates: Mapping[str, tuple[float, float]],
    looks: Mapping[tuple[float, float], Mapping[str, Any]],
) -> str:
    """The median over seeds at each learning rate and weight decay; returns at how many of them most seeds converge, or the
    best median."""
    score, medians = run.task.score, []
    for variant, at in at_rates.items():
        metrics = run.metrics(variant)
        values = score.of(metrics["val_loss"], metrics["val_accuracy"])
        steps, finite = _finite(metrics["step"], values)
        if len(steps):
            axis.plot(steps, np.nanmedian(finite, axis=1), **looks[at])
        best = _best_in_run(run, variant, values)
        medians.append(np.nan if np.isnan(best).all() else np.nanmedian(best))
    if np.isnan(medians).all():
        return "no finite evaluation"
    if not score.thresholds:
        best = np.nanmax(medians) if score.higher_is_better else np.nanmin(medians)
        return f"best median {score.name}: {score.text(best)}"
    threshold = 100 * score.thresholds[0]
    return f"median reaches {threshold:.0f} % at {(np.array(medians) >= threshold).sum()} of {len(medians)} rates"


def _finite(
    steps: Float[np.ndarray, " evaluations"], values: Float[np.ndarray, "evaluations seeds"]
) -> tuple[Float[np.ndarray, " some"], Float[np.ndarray, "some seeds"]]:
    """Of the evaluations at which a seed has a finite value, steps and values, nan where a seed has none."""
    there = np.isfinite(values)
    return steps[there.any(1)], np.where(there, values, np.nan)[there.any(1)]


def _best_in_run(run: Run, variant: str, values: Float[np.ndarray, "evaluations seeds"]) -> Float[np.ndarray, " seeds"]:
    return run.outcomes[variant].best if variant in run.outcomes else _best_of(run.task.score, values)


def _looks_of_rates(rates: Sequence[tuple[float, float]]) -> dict[tuple[float, float], dict[str, Any]]:
    """By learning rate and weight decay, from the lowest decay and rate on, how its line looks: a colour for each rate, dark
    for low ones, and a dash for each decay."""
    values, decays = (sorted(set(of)) for of in (zip(*rates, strict=True) if rates else ((), ())))
    colors = colormaps["viridis"](np.linspace(0, 0.9, len(values)))
    return {
        (rate, decay): dict(
            color=colors[values.index(rate)], linestyle=DASHES[decays.index(decay) % len(DASHES)], linewidth=1.3
        )
        for rate, decay in sorted(set(rates), key=lambda at: at[::-1])
    }


def _breakable(name: str) -> str:
    """A variant's name without the "train." before some settings, which can be broken between any two of them."""
    return name.replace("train.", "").replace("+", " + ")


def _best_of(score: Score, values: Float[np.ndarray, "evaluations seeds"]) -> Float[np.ndarray, " seeds"]:
    """Each seed's best; nan where there is none."""
    worst = -np.inf if score.higher_is_better else np.inf
    finite = np.where(np.isfinite(values), values, worst)
    best = (np.max if score.higher_is_better else np.min)(finite, axis=0, initial=worst)
    return np.where(np.isinf(best), np.nan, best)


def _best_seeds(score: Score, best: Float[np.ndarray, " seeds"]) -> str:
    """ "2 of 4 seeds reach 90 %", or "best perplexity: 71.5"; of seeds of which some have none "(2 of 3 seeds)"."""
    found = best[np.isfinite(best)]
    if not len(found):
        return "no finite evaluation"
    if not score.thresholds:
        of_some = f" ({len(found)} of {len(best)} seeds)" if len(found) < len(best) else ""
        return f"best {score.name}: {score.text(found.max() if score.higher_is_better else found.min())}{of_some}"
    reached = (best >= 100 * score.thresholds[0]).sum()
    return f"{reached} of {len(best)} seeds reach {100 * score.thresholds[0]:.0f} %"


def draw_convergence(run: Run) -> Figure | None:
    """Share of the seeds that have reached 99 % validation accuracy by each step: the distribution of the convergence step.

    None if the score of its task has no thresholds, or no seed reached it.
    """
    if not run.task.score.thresholds or not any(outcome.num_solved for outcome in run.outcomes.values()):
        return None
    figure, ((axis,),) = style.new_figure(7.6, 4.0)
    last = 1.04 * max(outcome.last_step for outcome in run.outcomes.values())
    for variant, (color, marker) in style.looks_of(run.outcomes).items():
        steps = run.outcomes[variant].solved_step
        reached = np.sort([step for step in steps if step is not None])
        share = 100 * np.arange(len(reached) + 1) / len(steps)
        label = f"{_breakable(style.describe_variant(variant))} ({len(reached)} of {len(steps)})"
        how = dict(where="post", color=color, marker=marker, markevery=[-1], linewidth=2.2, label=label)
        axis.step([0, *reached, last], [*share, share[-1]], **how)
    axis.set(xlabel="training step", ylabel="seeds at ≥ 99 % validation accuracy (%)", ylim=(-2, 102), xlim=(0, last))
    style.legend_below(figure, style.handles_of(axis))
    style.title(figure, f"{_most_solved(run)}\n{describe_run(run)}")
    style.open_frame(axis)
    return figure


def _most_solved(run: Run) -> str:
    solved = {variant: outcome.num_solved for variant, outcome in run.outcomes.items()}
    most = max(solved.values())
    first = [style.describe_variant(variant) for variant, count in solved.items() if count == most]
    if len(first) == len(solved) > 1:
        return f"{most} seeds reach 99 % with every variant"
    seeds = max(len(outcome.seeds) for outcome in run.outcomes.values())
    return f"Most seeds reach 99 % with {' and '.join(first)}: {most} of {seeds}"


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
            self.context.report.problems.append(
                f"{run.workdir}: no learning curves: metrics.jsonl is empty or not here"
            )
        self.add(figure, "convergence", run, "when seeds converge")

    def show_all(self) -> None:
        if self.unsolved:
            of_some = f" of {some_of(self.unsolved)}" if len(self.unsolved) < len(self.context.runs) else ""
            self.part.notes.append(
                f"When seeds converge: not drawn, as no seed{of_some} reaches {100 * SOLVED_ACCURACY:.0f} %."
            )
