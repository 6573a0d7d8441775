"""How do several runs compare? The paper's tables, one of all settings, and every variant in every task."""

from __future__ import annotations

import itertools
import textwrap
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from ml_collections import ConfigDict

from loglinear_jax.analysis import cells, paper, style
from loglinear_jax.analysis.best_rates import AtBest, at_best_of_runs
from loglinear_jax.analysis.experiments import changed_settings, experiment_of, setting_of
from loglinear_jax.analysis.section import Section
from loglinear_jax.analysis.table import Table
from loglinear_jax.runs.loading import Run
from loglinear_jax.runs.outcome import VariantOutcome, on_one_set
from loglinear_jax.statistics import FEWEST_FOR_INTERVAL
from loglinear_jax.tasks import CONVERGED_ACCURACY

MEANS, SHARES = "accuracy %", "≥ 90 %, ≥ 99 %"  # what a row shows
SHARE_WIDTHS = (6.3, style.FULL_WIDTH)  # of figures of shares, by their columns
TASK_COLUMNS = 5


def as_the_paper(runs: Sequence[Run]) -> list[Table]:
    """The paper's Tables 2 and 3 from several runs: λ against key-value pairs, or against length; its numbers below ours.

    Runs go together that differ in nothing else; of a variant that was run twice the run with more seeds is shown, or the
    first.
    """
    runs = [run for run in runs if run.outcomes and run.task.AXIS is not None]
    groups: dict[tuple, list[int]] = {}
    for index, run in enumerate(runs):
        axis = f"task.{run.task.AXIS[0]}"
        same = tuple((name, repr(value)) for name, value in experiment_of(run).items() if name != axis)
        groups.setdefault(same, []).append(index)
    changes = changed_settings(runs)
    tables = [_against_axis([runs[i] for i in group], changes[group[0]]) for group in groups.values()]
    return [table for table in tables if table is not None]


def _against_axis(runs: list[Run], changes: str) -> Table | None:
    """One table of λ against pairs or length; None for fewer than two columns."""
    runs = sorted(runs, key=lambda run: run.config.task[run.task.AXIS[0]])
    first = runs[0]
    field, shown, words = first.task.AXIS
    found: dict[str, dict[int, Run]] = {}  # by variant and column
    notes = []
    for run in runs:
        for variant in run.outcomes:
            _keep_most_seeds(found.setdefault(variant, {}), run.config.task[field], variant, run, notes)
    columns = sorted({run.config.task[field] for run in runs})
    if len(columns) < 2:
        return None
    outcomes = on_one_set(
        {(variant, value): run.outcomes[variant] for variant in found for value, run in found[variant].items()}
    )
    rows, raw = [], []
    for variant, by_column in found.items():
        ours, theirs, shares = ({"variant": variant, "": what} for what in (MEANS, "the paper", SHARES))
        for value in columns:
            if value not in by_column:
                continue
            outcome, name = outcomes[variant, value], f"{shown}={value}"
            published = paper.result(by_column[value].config, variant)
            theirs[name] = published or "–"
            mean_and_peak = f"{100 * outcome.mean_accuracy:.1f} ({100 * outcome.peak_accuracy:.1f})"
            ours[name] = cells.mean_and_std(100 * outcome.accuracy) if field == "seq_len" else mean_and_peak
            shares[name] = cells.converged_and_solved(outcome)
            raw.append({"variant": variant, field: value} | _share_numbers(outcome) | {"the_paper": published})
        rows += [ours, shares] + ([theirs] if any(x != "–" for k, x in theirs.items() if "=" in k) else [])
    how = "mean ± std" if field == "seq_len" else "mean (peak)"
    notes.insert(
        0,
        f"{cells.accuracy_note(outcome, counts_solved=True)} Shown: {how} of the seeds. "
        f"Then how many seeds reached 90 %, with Wilson's 95 % interval of "
        f"their share, and 99 %. Runs: {', '.join(run.name for run in runs)}",
    )
    if field == "num_pairs" and 32 in columns and any("paper" in row[""] for row in rows):
        again = " and ".join(f"{variant} {number}" for variant, number in paper.MQAR_32_AGAIN.items())
        notes.append(f"in its text the paper has another run at kv=32: {again}")
    setting = "" if "setting released" in changes else setting_of(first.config)
    title = f"{first.task.TITLE}{setting and f', setting {setting}'}: {outcome.shown_as}, by {words}"
    if shown == "kv":
        title += f", length {first.config.task.seq_len}"
    if changes:
        title += f" ({changes})"
    return Table(title, rows, raw, "; ".join(notes) + ".")


def by_setting(runs: Sequence[Run]) -> dict[str, Table]:
    """For each task whose score has thresholds, in words, that was run in several settings: for each of them a row of every
    variant's accuracies, and one of how many seeds converged; settings with few changes first. All tables are of accuracies on
    one set."""
    groups: dict[str, list[Run]] = {}
    finished = [run for run in runs if run.outcomes and run.task.score.thresholds]
    for run in sorted(finished, key=lambda run: _in_order(run.config.task)):
        groups.setdefault(run.task.describe(), []).append(run)
    compared = {task: group for task, group in groups.items() if len(set(changed_settings(group))) > 1}
    chosen, notes = {}, {}  # by task
    for task, group in compared.items():
        chosen[task], notes[task] = _by_changes(group)
    outcomes = on_one_set({(task, *key): run.outcomes[key[1]] for task in chosen for key, run in chosen[task].items()})
    return {task: _against_settings(task, runs, outcomes, notes[task]) for task, runs in chosen.items()}


def _in_order(task: ConfigDict) -> tuple:
    """Sorts settings of tasks by name, then by value: numbers before text, before all else."""

    def comparable(value: Any) -> tuple:
        if isinstance(value, (bool, int, float)):
            return (0, value)
        return (1, value) if isinstance(value, str) else (2, repr(value))

    others = sorted((name, comparable(value)) for name, value in task.items() if name != "name")
    return task.name, others


def _by_changes(runs: list[Run]) -> tuple[dict[tuple[str, str], Run], list[str]]:
    """By changes and variant the run that is shown, few changes first; and notes of what is not."""
    found: dict[tuple[str, str], Run] = {}
    notes: list[str] = []
    by_changes = zip(changed_settings(runs), runs, strict=True)
    for changes, run in sorted(by_changes, key=lambda pair: (bool(pair[0]) + pair[0].count(","), pair[0])):
        for variant in run.outcomes:
            _keep_most_seeds(found, (changes, variant), variant, run, notes)
    return found, notes


def _against_settings(
    task: str,
    runs: Mapping[tuple[str, str], Run],
    outcomes: Mapping[tuple[str, str, str], VariantOutcome],
    notes: Sequence[str],
) -> Table:
    """One such table. runs, notes: of `_by_changes`. outcomes: by task, changes and variant."""
    rows: dict[str, tuple[dict[str, str], dict[str, str]]] = {}
    raw = []
    for (changes, variant), run in runs.items():
        outcome = outcomes[task, changes, variant]
        changed = {"changed": changes or "nothing"}
        means, shares = rows.setdefault(changes, (changed | {"": MEANS}, changed | {"": SHARES}))
        means[variant] = cells.mean_and_std(cells.finite(100 * outcome.accuracy))
        shares[variant] = cells.converged_and_solved(outcome) + cells.median_step(outcome)
        raw.append({"run": run.name, "changed": changes, "variant": variant} | _share_numbers(outcome))
    note = (
        f"{cells.accuracy_note(outcome, counts_solved=True)} "
        "Mean ± std of the seeds. Then how many seeds reached 90 %, with Wilson's 95 % interval of "
        "their share, and 99 %; the median step at which those did. Changed: against the default settings, as far as these "
        "runs differ"
    )
    title = f"{task}: {outcome.shown_as}, by what is changed"
    return Table(title, list(itertools.chain(*rows.values())), raw, "; ".join([note, *notes]) + ".")


def _keep_most_seeds(place: dict[Any, Run], key: Any, variant: str, run: Run, notes: list[str]) -> None:
    """Puts a run in its place in a table; of two for one place that with more seeds, or the first. The notes say which is
    not shown."""
    kept = place.setdefault(key, run)
    if kept is run:
        return
    if len(run.outcomes[variant].seeds) > len(kept.outcomes[variant].seeds):
        place[key], kept, run = run, run, kept
    notes.append(f"not shown: {variant} of {run.name}, as {kept.name} has it too")


def _share_numbers(outcome: VariantOutcome) -> dict[str, Any]:
    """The accuracies, and how many seeds reached 90 % and 99 %, as plain numbers."""
    low, high = outcome.share_converged_interval
    names = ("mean_accuracy", "std_accuracy", "peak_accuracy", "num_converged")
    return (
        {"shown": outcome.shown_as, "num_seeds": len(outcome.seeds)}
        | {name: getattr(outcome, name) for name in names}
        | {"share_low": low, "share_high": high, "num_solved": outcome.num_solved}
    )


def accuracies_by_task(runs: Sequence[Run]) -> tuple[dict[str, dict[str, AtBest]], str]:
    """(By task and by what its runs differ in, in words, then by variant, accuracies in %; what they are, such as "test
    accuracy").

    Of a variant with several learning rates, at the rate that the other half of the seeds choose; none of one seed. Of a
    variant that was run twice, the run with more seeds, or the first. Tasks without accuracies are left out.
    """
    of_runs, shown_as = at_best_of_runs(runs)
    by_task: dict[str, list[tuple[Run, dict[str, AtBest]]]] = {}
    for run, at_best in of_runs:
        by_task.setdefault(run.task.describe(), []).append((run, at_best))
    found: dict[str, dict[str, AtBest]] = {}
    for task, group in by_task.items():
        changed = changed_settings([run for run, _ in group], [task] * len(group))
        for (_, of_run), change in zip(group, changed, strict=True):
            of_setting = found.setdefault(f"{task}; {change}" if change else task, {})
            for variant, at_best in of_run.items():
                if len(at_best.shown) > (len(of_setting[variant].shown) if variant in of_setting else 0):
                    of_setting[variant] = at_best
    return {task: drawn for task, drawn in found.items() if drawn}, shown_as


def draw_shares(shares: Mapping[str, Sequence[Mapping[str, Any]]]) -> Figure:
    """How many seeds converge by what is changed: a panel for each task, a row for each change, a colour for each variant.

    shares: by the task's name the numbers of `by_setting`: changed, variant, shown, num_seeds, num_converged,
    num_solved, share_low, share_high. Discs are the share of seeds at ≥ 90 % accuracy, of the set that `shown` names, with
    Wilson's 95 % interval, rings that at ≥ 99 % in validation.
    """
    every = [number for numbers in shares.values() for number in numbers]
    settings = list(dict.fromkeys(number["changed"] for number in every))
    looks = style.looks_of(dict.fromkeys(number["variant"] for number in every))
    lines = [textwrap.fill(changed or "nothing changed", 36) for changed in settings]
    spacing = 0.14
    room = [max(0.5, spacing * len(looks) + 0.2) + 0.12 * line.count("\n") for line in lines]
    top = np.cumsum([0, *room])
    middle = dict(zip(settings, (top[:-1] + top[1:]) / 2, strict=True))
    figure, axes = style.panel_grid(len(shares), SHARE_WIDTHS, 0.7, 0.65 * top[-1] + 0.7)
    handles: dict[str, Any] = {}
    for axis, (task, numbers) in zip(axes.flat, shares.items(), strict=False):
        for index, (variant, (color, marker)) in enumerate(looks.items()):
            own = [number for number in numbers if number["variant"] == variant]
            if not own:
                continue
            y = [middle[number["changed"]] + spacing * (index - (len(looks) - 1) / 2) for number in own]
            at_90, at_99, low, high = (
                100 * np.array([number[name] / (number["num_seeds"] if "num" in name else 1) for number in own])
                for name in ("num_converged", "num_solved", "share_low", "share_high")
            )
            axis.hlines(y, low, high, color=color, linewidth=1.6)
            how = dict(color=color, marker=marker, linestyle="none", markersize=5.5, clip_on=False)
            (handles[style.describe_variant(variant)],) = axis.plot(at_90, y, **how)
            axis.plot(at_99, y, markerfacecolor="none", zorder=3, **how)
        axis.hlines(top[1:-1], 0, 100, color="0.9", linewidth=0.8, zorder=0)
        style.percent_panel(axis, task, 2.9, 10, (top[-1], 0), "seeds")
    for axis in axes[:, 0]:
        axis.set_yticks([middle[changed] for changed in settings], lines, fontsize=9)
        axis.set_ylabel("changed")
    grey = dict(color="0.3", marker="o", markersize=5.5)
    handles[f"≥ 90 % {every[0]['shown']}, with 95 % interval"] = Line2D([], [], **grey)
    handles["≥ 99 % in validation"] = Line2D([], [], markerfacecolor="none", linestyle="none", **grey)
    style.legend_below(figure, handles)
    style.title(figure, _most_converged(every))
    return figure


def _most_converged(numbers: Sequence[Mapping[str, Any]]) -> str:
    """With which change most seeds converge, over all tasks and variants; of equal ones that with the fewest words."""
    counts: dict[str, np.ndarray] = {}
    for number in numbers:
        counts.setdefault(number["changed"], np.zeros(2, int))
        counts[number["changed"]] += number["num_converged"], number["num_seeds"]
    shares = {changed: converged / seeds for changed, (converged, seeds) in counts.items()}
    most = max(shares.values())
    if len(shares) > 1 and min(shares.values()) == most:
        return f"As many seeds converge with every change: {100 * most:.0f} %"
    best = min((changed for changed, share in shares.items() if share == most), key=lambda changed: changed.count(","))
    digits = 0 if 0.005 <= most < 0.995 else 1
    return f"Most seeds converge with {best or 'nothing changed'}: {cells.percent(most, digits)}"


def draw_by_task(panels: Mapping[str, Mapping[str, AtBest]], shown_as: str) -> Figure:
    """A panel for each task, a row for each variant: a stroke for each seed, and the mean over seeds with its interval of 95 %.

    panels: by the task's name and the variant, accuracies in %. shown_as: what that is, such as "test accuracy".
    """
    variants = list(dict.fromkeys(variant for drawn in panels.values() for variant in drawn))
    names = [style.wrap(style.describe_variant(variant), 2.0, 9) for variant in variants]
    row_height = max(0.3, 0.17 * max(name.count("\n") + 1 for name in names))
    figure, axes = style.panel_grid(
        len(panels), [style.FULL_WIDTH] * TASK_COLUMNS, 0.7, 0.75 + row_height * len(variants)
    )
    for axis, (task, drawn) in zip(axes.flat, panels.items(), strict=False):
        for y, (variant, (color, marker)) in enumerate(style.looks_of(variants).items()):
            if variant not in drawn:
                continue
            values, mean, low, high = drawn[variant]
            axis.plot(values, np.full(len(values), y), "|", color=color, alpha=0.35, markersize=9)
            axis.hlines(y, low, high, color="0.15", linewidth=1.6)
            axis.plot([mean], [y], marker, color=color, markeredgecolor="0.15", markersize=7, clip_on=False)
        style.percent_panel(axis, task, 1.3, 8, (len(variants) - 0.5, -0.5), shown_as)
    for axis in axes[:, 0]:
        axis.set_yticks(range(len(variants)), names, fontsize=9)
    counts = {len(at_best.shown) for drawn in panels.values() for at_best in drawn.values()}
    least, most = min(counts), max(counts)
    seeds = f"{least} to {most} seeds" if least < most else f"{most} seed{'s' * (most > 1)}"
    interval = " with its 95 % interval" if most >= FEWEST_FOR_INTERVAL else ""
    style.title(figure, f"{seeds} each (strokes), and their mean{interval}" if most > 1 else f"{seeds} each")
    return figure


class Comparisons(Section):
    """From the summaries of several runs."""

    NAME = "tables"
    TITLE = "Results"

    def show_all(self) -> None:
        context, runs = self.context, self.context.runs
        with context.attempt("all runs", "the paper's tables"):
            for index, table in enumerate(as_the_paper(runs)):
                self.add(table, f"as-the-paper-{index + 1}")
        with context.attempt("all runs", "the tables of changes"):
            tables = by_setting(runs)
            shares = {task: table.raw for task, table in tables.items()}
            what = "Seeds that converge, by what is changed"
            if any(row["num_converged"] for rows in shares.values() for row in rows):
                self.add(draw_shares(shares), "by-setting", title=what)
            elif shares:
                self.part.notes.append(f"{what}: not drawn, as no seed reaches {100 * CONVERGED_ACCURACY:.0f} %.")
            for index, table in enumerate(tables.values()):
                self.add(table, f"by-setting-{index + 1}")
        with context.attempt("all runs", "the figure of all tasks"):
            panels, shown_as = accuracies_by_task(runs)
            if len(panels) > 1:
                self.add(draw_by_task(panels, shown_as), "by-task", title="Every variant in every task")
