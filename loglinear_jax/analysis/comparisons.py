"""How do several runs compare? The paper's tables, one of all settings, and accuracies by the size of what a layer keeps."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, TypeVar

from ml_collections import ConfigDict

from loglinear_jax.analysis import paper
from loglinear_jax.analysis import table as cells
from loglinear_jax.analysis.best_rates import RATES, AtBest, at_best_of_runs, named_rates, without_rates
from loglinear_jax.analysis.experiments import RELEASED, changed_settings, experiment_of, setting_of
from loglinear_jax.analysis.section import Section
from loglinear_jax.analysis.table import Cell, Table
from loglinear_jax.config.building import checked_settings
from loglinear_jax.models import OwnSettings
from loglinear_jax.runs.loading import Run
from loglinear_jax.runs.outcome import VariantOutcome, on_one_set

MEANS, SHARES = "accuracy %", "≥ 90 %, ≥ 99 %"  # what a row shows
OF_STATES = {"model.heads", "model.key_groups", "model.key_dim", "model.head_dim"}
Place, Found = TypeVar("Place"), TypeVar("Found")


def most_seeds(
    found: Iterable[tuple[Place, Found]], seeds: Callable[[Place, Found], int]
) -> tuple[dict[Place, Found], list[tuple[Place, Found]]]:
    """(By place in a table, what is shown there: of several the one with most seeds, or the first; what is not shown)."""
    kept, left_out = {}, []
    for place, one in found:
        other = kept.setdefault(place, one)
        if other is not one:
            if seeds(place, one) > seeds(place, other):
                kept[place], one = one, other
            left_out.append((place, one))
    return kept, left_out


def _shown_runs(
    found: Iterable[tuple[tuple[str, Any], Run]],
) -> tuple[dict[tuple[str, Any], Run], list[str]]:
    """`most_seeds` of runs by (variant, another place), and notes of what is not shown."""
    kept, left_out = most_seeds(found, lambda place, run: len(run.outcomes[place[0]].seeds))
    notes = [f"not shown: {place[0]} of {run.name}, as {kept[place].name} has it too" for place, run in left_out]
    return kept, notes


def _share(outcome: VariantOutcome, separator: str | None = None) -> Cell:
    """How many seeds reached 90 % and 99 %, with the accuracies as numbers. separator: whether the step follows at which they
    did."""
    names = ("mean_accuracy", "std_accuracy", "peak_accuracy", "num_converged", "num_solved")
    numbers = {name: getattr(outcome, name) for name in names} | cells.share_converged(outcome).numbers
    text = cells.converged_and_solved(outcome) + ("" if separator is None else cells.median_step(outcome, separator))
    return Cell(text, shown=outcome.shown_as, num_seeds=len(outcome.seeds), **numbers)


def as_the_paper(runs: Sequence[Run]) -> list[Table]:
    """The paper's Tables 2 and 3 from several runs: λ against key-value pairs, or against length; its numbers below ours.

    Runs go together that differ in nothing else.
    """
    runs = [run for run in runs if run.outcomes and run.task.AXIS is not None]
    groups: dict[tuple, list[tuple[Run, str]]] = {}
    for run, changes in zip(runs, changed_settings(runs), strict=True):
        axis = f"task.{run.task.AXIS[0]}"
        same = tuple((name, repr(value)) for name, value in experiment_of(run).items() if name != axis)
        groups.setdefault(same, []).append((run, changes))
    tables = [_against_axis([run for run, _ in group], group[0][1]) for group in groups.values()]
    return [table for table in tables if table is not None]


def _against_axis(runs: list[Run], changes: str) -> Table | None:
    """One table of λ against pairs or length; None for fewer than two columns."""
    field, shown, words = runs[0].task.AXIS
    runs = sorted(runs, key=lambda run: run.config.task[field])
    columns = sorted({run.config.task[field] for run in runs})
    if len(columns) < 2:
        return None
    shown_runs, notes = _shown_runs(
        ((variant, run.config.task[field]), run) for run in runs for variant in run.outcomes
    )
    outcomes = on_one_set({place: run.outcomes[place[0]] for place, run in shown_runs.items()})
    rows, by_length = [], field == "seq_len"
    for variant in dict.fromkeys(variant for variant, _ in shown_runs):
        ours, theirs, shares = (
            {"variant": Cell(variant, variant=variant), "": what} for what in (MEANS, "the paper", SHARES)
        )
        for value in (value for value in columns if (variant, value) in shown_runs):
            outcome, name = outcomes[variant, value], f"{shown}={value}"
            published = paper.result(shown_runs[variant, value].config, variant)
            theirs[name] = published or "–"
            mean_and_peak = f"{100 * outcome.mean_accuracy:.1f} ({100 * outcome.peak_accuracy:.1f})"
            ours[name] = cells.mean_and_std(100 * outcome.accuracy) if by_length else mean_and_peak
            shares[name] = _share(outcome)
        rows += [ours, shares] + ([theirs] if any(x != "–" for k, x in theirs.items() if "=" in k) else [])
    first = (
        f"{cells.accuracy_note(outcome, counts_solved=True)} Shown: {'mean ± std' if by_length else 'mean (peak)'} of the "
        "seeds. Then how many seeds reached 90 %, with Wilson's 95 % interval of their share, and 99 %. Runs: "
        + ", ".join(run.name for run in runs)
    )
    if field == "num_pairs" and 32 in columns and any("paper" in row[""] for row in rows):
        again = " and ".join(f"{variant} {number}" for variant, number in paper.MQAR_32_AGAIN.items())
        notes.append(f"in its text the paper has another run at kv=32: {again}")
    setting = "" if RELEASED in changes else setting_of(runs[0].config)
    title = f"{runs[0].task.TITLE}{setting and f', setting {setting}'}: {outcome.shown_as}, by {words}"
    title += f", length {runs[0].config.task.seq_len}" if shown == "kv" else ""
    return Table(title + (changes and f" ({changes})"), rows, "; ".join([first, *notes]) + ".")


def by_setting(runs: Sequence[Run]) -> dict[str, Table]:
    """For each task whose score has thresholds, in words, that was run in several settings: for each of them a row of every
    variant's accuracies, and one of how many seeds converged; settings with few changes first. All tables are of accuracies on
    one set."""
    groups: dict[str, list[Run]] = {}
    finished = [run for run in runs if run.outcomes and run.task.score.thresholds]
    for run in sorted(finished, key=lambda run: _in_order(run.config.task)):
        groups.setdefault(run.task.describe(), []).append(run)
    shown, notes = {}, {}  # by task; runs by variant and changes
    for task, group in groups.items():
        changed = list(zip(changed_settings(group), group, strict=True))
        if len({changes for changes, _ in changed}) > 1:
            changed.sort(key=lambda pair: (bool(pair[0]) + pair[0].count(","), pair[0]))
            places = (((variant, changes), run) for changes, run in changed for variant in run.outcomes)
            shown[task], notes[task] = _shown_runs(places)
    outcomes = on_one_set({(task, *at): run.outcomes[at[0]] for task in shown for at, run in shown[task].items()})
    tables = {}
    for task, of_task in shown.items():
        rows: dict[str, tuple[dict[str, str], dict[str, str]]] = {}
        for variant, changes in of_task:
            outcome = outcomes[task, variant, changes]
            changed = {"changed": changes or "nothing"}
            means, shares = rows.setdefault(changes, (changed | {"": MEANS}, changed | {"": SHARES}))
            means[variant] = cells.mean_and_std(cells.finite(100 * outcome.accuracy))
            shares[variant] = _share(outcome, "")
        note = (
            f"{cells.accuracy_note(outcome, counts_solved=True)} "
            "Mean ± std of the seeds. Then how many seeds reached 90 %, with Wilson's 95 % interval of "
            "their share, and 99 %; the median step at which those did. Changed: against the default settings, as far as these "
            "runs differ"
        )
        title, both = f"{task}: {outcome.shown_as}, by what is changed", list(itertools.chain(*rows.values()))
        tables[task] = Table(title, both, "; ".join([note, *notes[task]]) + ".")
    return tables


def _in_order(task: ConfigDict) -> tuple:
    """Sorts settings of tasks by name, then by value: numbers before text, before all else."""

    def comparable(value: Any) -> tuple:
        if isinstance(value, (bool, int, float)):
            return (0, value)
        return (1, value) if isinstance(value, str) else (2, repr(value))

    return task.name, sorted((name, comparable(value)) for name, value in task.items() if name != "name")


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
    one size is left out. Of a variant with several learning rates, at the rate that the other half of the seeds choose; none of
    one seed.
    """
    of_runs, shown_as = at_best_of_runs(runs)
    named_by_all = RATES.intersection(*(named_rates(variant) for run, _ in of_runs for variant in run.outcomes))
    changed = changed_settings([run for run, _ in of_runs], unnamed=OF_STATES | named_by_all)
    places = []
    for (run, of_run), changes in zip(of_runs, changed, strict=True):
        name = "; ".join(filter(None, (run.task.describe(), changes)))
        at_rates = without_rates(run.config, run.outcomes)
        for variant, at_best in of_run.items():
            model = checked_settings(run.config, next(iter(at_rates[variant]))).model
            if not isinstance(model, OwnSettings) and len(at_best.shown):  # nothing says what that keeps
                states = f"{model.heads} × {model.key_dim} × {model.head_dim}"
                size = AtSize(model.numbers_kept(run.task.max_seq_len), states, at_best)
                places.append(((name, variant, states), size))
    found: dict[str, dict[str, list[AtSize]]] = {}
    for (name, variant, _), size in most_seeds(places, lambda _, size: len(size.at_best.shown))[0].items():
        found.setdefault(name, {}).setdefault(variant, []).append(size)
    several = {
        name: {v: sorted(sizes, key=lambda at: at[:2]) for v, sizes in variants.items() if len(sizes) > 1}
        for name, variants in found.items()
    }
    return {name: variants for name, variants in several.items() if variants}, shown_as


def tables_by_size(runs: Sequence[Run]) -> list[Table]:
    """Of each task of `accuracies_by_size` a row for each variant, a column for each size of states."""
    found, shown_as = accuracies_by_size(runs)
    tables = []
    for task, variants in found.items():
        rows = []
        in_order = sorted(itertools.chain(*variants.values()), key=lambda at: at[:2])
        for variant, sizes in variants.items():
            row = {"variant": Cell(variant, variant=variant)} | dict.fromkeys((at.states for at in in_order), "–")
            for at in sizes:
                cell = cells.with_interval(*at.at_best[1:])
                numbers = {"numbers_kept": at.numbers, "num_seeds": len(at.at_best.shown), **cell.numbers}
                row[at.states] = Cell(f"{cell} with {at.numbers:,}", **numbers)
            rows.append(row)
        note = (
            "Columns: heads × width of keys × width of values. Cells: mean over seeds in % [95 % interval], with how many "
            "numbers a layer keeps of the longest sequence when it decodes: one state, or a state for each level (and sums of "
            "keys, if λ looks at them), or all keys and values."
        )
        tables.append(Table(f"{task}: {shown_as}, by the size of the states", rows, note))
    return tables


class Comparisons(Section):
    """From the summaries of several runs."""

    NAME = "tables"
    TITLE = "Results"

    def show_all(self) -> None:
        context, runs = self.context, self.context.runs
        with context.attempt("all runs", "the paper's tables"):
            for index, table in enumerate(as_the_paper(runs), 1):
                self.add(table, f"as-the-paper-{index}")
        with context.attempt("all runs", "the tables of changes"):
            for index, table in enumerate(by_setting(runs).values(), 1):
                self.add(table, f"by-setting-{index}")
        with context.attempt("all runs", "the sizes of states"):
            for index, table in enumerate(tables_by_size(runs), 1):
                self.add(table, f"by-size-{index}")
