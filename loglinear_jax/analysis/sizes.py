"""What is accuracy worth per number that a mixer keeps? Runs that differ in the size of their states alone."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from matplotlib.figure import Figure

from loglinear_jax.analysis import style
from loglinear_jax.analysis.best_rates import RATES, AtBest, at_best_of_runs, named_rates, without_rates
from loglinear_jax.analysis.cells import with_interval
from loglinear_jax.analysis.experiments import changed_settings
from loglinear_jax.analysis.section import Section
from loglinear_jax.analysis.table import Table
from loglinear_jax.config.building import checked_settings
from loglinear_jax.models import OwnSettings
from loglinear_jax.runs.loading import Run
from loglinear_jax.statistics import FEWEST_FOR_INTERVAL

OF_STATES = {"model.heads", "model.key_groups", "model.key_dim", "model.head_dim"}
_numbers = operator.attrgetter("numbers", "states")
MOST_COLUMNS = 2


class AtSize(NamedTuple):
    """numbers: how many a layer keeps of the task's longest sequence (`MixerSettings.numbers_kept`). states: the size of
    its states in words. at_best: accuracies in %."""

    numbers: int
    states: str
    at_best: AtBest


def accuracies_by_size(runs: Sequence[Run]) -> tuple[dict[str, dict[str, list[AtSize]]], str]:
    """(By task and setting in words, then by variant, its accuracies from small to large states; what they are, such as "test
    accuracy").

    Runs go together that differ in nothing but OF_STATES, and in rates that each of their variants names; a variant that has
    one size is left out. Of one that was run twice with the same size, the run with more seeds, or the first. Rates as in
    `at_best_rates`.
    """
    of_runs, shown_as = at_best_of_runs(runs)
    named_by_all = RATES.intersection(*(named_rates(variant) for run, _ in of_runs for variant in run.outcomes))
    changed = changed_settings([run for run, _ in of_runs], unnamed=OF_STATES | named_by_all)
    found: dict[str, dict[str, dict[str, AtSize]]] = {}  # by name, variant and size
    for (run, of_run), changes in zip(of_runs, changed, strict=True):
        of_task = found.setdefault("; ".join(filter(None, (run.task.describe(), changes))), {})
        at_rates = without_rates(run.config, run.outcomes)
        for variant, at_best in of_run.items():
            model = checked_settings(run.config, next(iter(at_rates[variant]))).model
            if isinstance(model, OwnSettings):
                continue  # nothing says what it keeps
            sizes, states = of_task.setdefault(variant, {}), f"{model.heads} × {model.key_dim} × {model.head_dim}"
            if len(at_best.shown) > (len(sizes[states].at_best.shown) if states in sizes else 0):
                sizes[states] = AtSize(model.numbers_kept(run.task.max_seq_len), states, at_best)
    several = {
        task: {variant: sorted(sizes.values(), key=_numbers) for variant, sizes in variants.items() if len(sizes) > 1}
        for task, variants in found.items()
    }
    return {task: variants for task, variants in several.items() if variants}, shown_as


def by_size(task: str, variants: Mapping[str, Sequence[AtSize]], shown_as: str) -> Table:
    """A row for each variant, a column for each size of states, of one task of `accuracies_by_size`."""
    rows, raw = [], []
    columns = dict.fromkeys(at.states for at in sorted(itertools.chain(*variants.values()), key=_numbers))
    for variant, sizes in variants.items():
        cells = {at.states: f"{with_interval(*at.at_best[1:])} with {at.numbers:,}" for at in sizes}
        rows.append({"variant": variant} | {states: cells.get(states, "–") for states in columns})
        for at in sizes:
            numbers = {"variant": variant, "states": at.states, "numbers_kept": at.numbers}
            of_seeds = at.at_best._asdict()
            raw.append(numbers | {"num_seeds": len(of_seeds.pop("shown"))} | of_seeds)
    note = (
        "Columns: heads × width of keys × width of values. Cells: mean over seeds in % [95 % interval], with how many numbers "
        "a layer keeps of the longest sequence when it decodes: one state, or a state for each level (and sums of keys, if λ "
        "looks at them), or all keys and values."
    )
    return Table(f"{task}: {shown_as}, by the size of the states", rows, raw, note)


def tables_by_size(runs: Sequence[Run]) -> list[Table]:
    """`by_size` of each task that these runs have with states of several sizes."""
    found, shown_as = accuracies_by_size(runs)
    return [by_size(task, variants, shown_as) for task, variants in found.items()]


def draw_by_size(panels: Mapping[str, Mapping[str, Sequence[AtSize]]], shown_as: str) -> Figure:
    """A panel for each task, a line for each variant: the mean over seeds, with its interval of 95 %, against the numbers that
    a layer keeps.

    panels, shown_as: of `accuracies_by_size`.
    """
    looks = style.looks_of(dict.fromkeys(variant for drawn in panels.values() for variant in drawn))
    figure, axes = style.panel_grid(len(panels), [6.5] + [style.FULL_WIDTH] * (MOST_COLUMNS - 1), 1.2, 3.6)
    width = figure.get_figwidth() / axes.shape[1]
    handles: dict[str, Any] = {}
    for axis, (task, drawn) in zip(axes.flat, panels.items(), strict=False):
        for variant, sizes in drawn.items():
            numbers = [at.numbers for at in sizes]
            means, lows, highs = zip(*(at.at_best[1:] for at in sizes), strict=True)
            how = looks[variant]._asdict() | {"markersize": 5}
            (handles[style.describe_variant(variant)],) = axis.plot(numbers, means, linewidth=1.6, **how)
            for at in sizes:
                if len(at.at_best.shown) < FEWEST_FOR_INTERVAL:
                    axis.plot(at.numbers, at.at_best.mean, markerfacecolor="white", **how)
            axis.vlines(numbers, lows, highs, color=how["color"], linewidth=1.6)
        axis.set_xscale("log")
        axis.set_title(style.wrap(task, width - 0.9, 9), fontsize=9)
        axis.set_xlabel("numbers that a layer keeps of a sequence")
        axis.set_ylim(-2, 102)
        axis.xaxis.set_tick_params(labelbottom=True)
        axis.grid(color="0.92", linewidth=0.8)
        axis.set_axisbelow(True)
        style.open_frame(axis)
    style.log_ticks(axes[0, 0].xaxis)
    for axis in axes[:, 0]:
        axis.set_ylabel(f"{shown_as} (%)")
    style.legend_below(figure, handles)
    counts = [len(at.at_best.shown) for drawn in panels.values() for sizes in drawn.values() for at in sizes]
    interval = " with its 95 % interval" if max(counts) >= FEWEST_FOR_INTERVAL else ""
    hollow = f" (hollow: fewer than {FEWEST_FOR_INTERVAL} seeds)" if min(counts) < FEWEST_FOR_INTERVAL else ""
    style.title(figure, f"Accuracy against what a layer keeps; mean over seeds{interval}{hollow}")
    return figure


class Sizes(Section):
    """From the summaries of runs of one task."""

    NAME = "tables"
    TITLE = "Results"

    def show_all(self) -> None:
        found, shown_as = accuracies_by_size(self.context.runs)
        if found:
            figure = draw_by_size(found, shown_as)
            self.add(figure, "by-size", title="Accuracy against the size of what a layer keeps")
        for index, table in enumerate(tables_by_size(self.context.runs)):
            self.add(table, f"by-size-{index + 1}")
