"""How do several runs compare? The paper's tables, one of all settings, and accuracies by the size of what a layer keeps."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from typing import Any

from ml_collections import ConfigDict

from loglinear_jax.analysis import paper
from loglinear_jax.analysis import table as cells
from loglinear_jax.analysis.experiments import RELEASED, changed_settings, experiment_of, setting_of
from loglinear_jax.analysis.rates import RATES, at_best_of_runs, named_rates, without_rates
from loglinear_jax.analysis.section import Section
from loglinear_jax.analysis.table import Cell, Table
from loglinear_jax.config.building import checked_settings
from loglinear_jax.models import OwnSettings
from loglinear_jax.runs.loading import Run
from loglinear_jax.runs.outcome import VariantOutcome, on_one_set

MEANS, SHARES = "accuracy %", "≥ 90 %, ≥ 99 %"  # what a row shows
OF_STATES = {"model.heads", "model.key_groups", "model.key_dim", "model.head_dim"}
COUNTED = "Then how many seeds reached 90 %, with Wilson's 95 % interval of their share, and 99 %"


def _shown_runs(found: Iterable[tuple[tuple, Run]]) -> tuple[dict[tuple, Run], list[str]]:
    """(By (variant, another place) in a table the run with most seeds, or the first; notes of what is not shown)."""
    kept, left_out = {}, []
    for place, run in found:
        other = kept.setdefault(place, run)
        if other is not run:
            if len(run.outcomes[place[0]].seeds) > len(other.outcomes[place[0]].seeds):
                kept[place], run = run, other
            left_out.append((place, run))
    return kept, [f"not shown: {place[0]} of {run.name}, as {kept[place].name} has it too" for place, run in left_out]


def _share(outcome: VariantOutcome, step: str = "") -> Cell:
    """How many seeds reached 90 % and 99 %, then `step`, with the accuracies as numbers."""
    names = ("mean_accuracy", "std_accuracy", "peak_accuracy", "num_converged", "num_solved")
    numbers = {name: getattr(outcome, name) for name in names} | cells.share_converged(outcome).numbers
    text = cells.converged_and_solved(outcome) + step
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
    places, notes = _shown_runs(((variant, run.config.task[field]), run) for run in runs for variant in run.outcomes)
    outcomes = on_one_set({place: run.outcomes[place[0]] for place, run in places.items()})
    rows, by_length = [], field == "seq_len"
    for variant in dict.fromkeys(variant for variant, _ in places):
        ours, theirs, shares = (
            {"variant": Cell(variant, variant=variant), "": x} for x in (MEANS, "the paper", SHARES)
        )
        for value in (value for value in columns if (variant, value) in places):
            outcome, name = outcomes[variant, value], f"{shown}={value}"
            theirs[name] = paper.result(places[variant, value].config, variant) or "–"
            mean_and_peak = f"{100 * outcome.mean_accuracy:.1f} ({100 * outcome.peak_accuracy:.1f})"
            ours[name] = cells.mean_and_std(100 * outcome.accuracy) if by_length else mean_and_peak
            shares[name] = _share(outcome)
        rows += [ours, shares] + ([theirs] if any(x != "–" for k, x in theirs.items() if "=" in k) else [])
    first = (
        f"{cells.accuracy_note(outcome, counts_solved=True)} Shown: {'mean ± std' if by_length else 'mean (peak)'} of the "
        f"seeds. {COUNTED}. Runs: {', '.join(run.name for run in runs)}"
    )
    if field == "num_pairs" and 32 in columns and any("paper" in row[""] for row in rows):
        again = " and ".join(f"{variant} {number}" for variant, number in paper.MQAR_32_AGAIN.items())
        notes.append(f"in its text the paper has another run at kv=32: {again}")
    setting = "" if RELEASED in changes else setting_of(runs[0].config)
    title = f"{runs[0].task.TITLE}{setting and f', setting {setting}'}: {outcome.shown_as}, by {words}"
    title += f", length {runs[0].config.task.seq_len}" if shown == "kv" else ""
    return Table(title + (changes and f" ({changes})"), rows, "; ".join([first, *notes]) + ".")


def by_setting(runs: Sequence[Run]) -> list[Table]:
    """For each task whose score has thresholds that was run in several settings: for each of them a row of every variant's
    accuracies, and one of how many seeds converged; settings with few changes first. All accuracies are on one set."""
    groups: dict[str, list[Run]] = {}
    finished = [run for run in runs if run.outcomes and run.task.score.thresholds]
    for run in sorted(finished, key=lambda run: _in_order(run.config.task)):
        groups.setdefault(run.task.describe(), []).append(run)
    shown, notes = {}, {}  # by task; runs by variant and changes
    for task, group in groups.items():
        changed = sorted(
            zip(changed_settings(group), group, strict=True),
            key=lambda pair: (bool(pair[0]) + pair[0].count(","), pair[0]),
        )
        if len({changes for changes, _ in changed}) > 1:
            places = (((variant, changes), run) for changes, run in changed for variant in run.outcomes)
            shown[task], notes[task] = _shown_runs(places)
    outcomes = on_one_set({(task, *at): run.outcomes[at[0]] for task in shown for at, run in shown[task].items()})
    tables = []
    for task, of_task in shown.items():
        rows: dict[str, tuple[dict[str, str], dict[str, str]]] = {}
        for variant, changes in of_task:
            outcome, changed = outcomes[task, variant, changes], {"changed": changes or "nothing"}
            means, shares = rows.setdefault(changes, (changed | {"": MEANS}, changed | {"": SHARES}))
            means[variant] = cells.mean_and_std(cells.finite(100 * outcome.accuracy))
            shares[variant] = _share(outcome, cells.median_step(outcome))
        note = (
            f"{cells.accuracy_note(outcome, counts_solved=True)} Mean ± std of the seeds. {COUNTED}; the median step at which "
            "those did. Changed: against the default settings, as far as these runs differ"
        )
        title, both = f"{task}: {outcome.shown_as}, by what is changed", list(itertools.chain(*rows.values()))
        tables.append(Table(title, both, "; ".join([note, *notes[task]]) + "."))
    return tables


def _in_order(task: ConfigDict) -> tuple:
    """Sorts settings of tasks by name, then by value: numbers before text, before all else."""

    def comparable(value: Any) -> tuple:
        if isinstance(value, (bool, int, float)):
            return (0, value)
        return (1, value) if isinstance(value, str) else (2, repr(value))

    return task.name, sorted((name, comparable(value)) for name, value in task.items() if name != "name")


def tables_by_size(runs: Sequence[Run]) -> list[Table]:
    """For each task and setting the accuracies by what a layer keeps: a row for each variant, a column for each size of states.

    Runs go together that differ in nothing but OF_STATES, and in rates that each of their variants names; a variant that has
    one size is left out. Of a variant with several learning rates, at the rate that the other half of the seeds choose; none of
    one seed.
    """
    of_runs, shown_as = at_best_of_runs(runs)
    named_by_all = RATES.intersection(*(named_rates(variant) for run, _ in of_runs for variant in run.outcomes))
    changed = changed_settings([run for run, _ in of_runs], unnamed=OF_STATES | named_by_all)
    tasks: dict[str, dict[str, dict[str, tuple]]] = {}  # by task, variant and size in words
    for (run, of_run), changes in zip(of_runs, changed, strict=True):
        name = "; ".join(filter(None, (run.task.describe(), changes)))
        at_rates = without_rates(run.config, run.outcomes)
        for variant, best in of_run.items():
            model = checked_settings(run.config, next(iter(at_rates[variant]))).model
            if not isinstance(model, OwnSettings) and len(best.shown):  # nothing says what that keeps
                states = f"{model.heads} × {model.key_dim} × {model.head_dim}"
                sizes = tasks.setdefault(name, {}).setdefault(variant, {})
                if states not in sizes or len(best.shown) > len(sizes[states][2].shown):
                    sizes[states] = model.numbers_kept(run.task.max_seq_len), states, best
    note = (
        "Columns: heads × width of keys × width of values. Cells: mean over seeds in % [95 % interval], with how many "
        "numbers a layer keeps of the longest sequence when it decodes: one state, or a state for each level (and sums of "
        "keys, if λ looks at them), or all keys and values."
    )
    tables = []
    for task, variants in tasks.items():
        several = {variant: sizes for variant, sizes in variants.items() if len(sizes) > 1}
        every = sorted((one for sizes in several.values() for one in sizes.values()), key=lambda one: one[:2])
        rows = []
        for variant, sizes in several.items():
            row = {"variant": Cell(variant, variant=variant)} | {states: "–" for _, states, _ in every}
            for numbers_kept, states, best in sizes.values():
                cell = cells.with_interval(*best[1:])
                numbers = {"numbers_kept": numbers_kept, "num_seeds": len(best.shown), **cell.numbers}
                row[states] = Cell(f"{cell} with {numbers_kept:,}", **numbers)
            rows.append(row)
        if rows:
            tables.append(Table(f"{task}: {shown_as}, by the size of the states", rows, note))
    return tables


class Comparisons(Section):
    """From the summaries of several runs."""

    NAME = "tables"
    TITLE = "Results"

    def show_all(self) -> None:
        for name, make in (("as-the-paper", as_the_paper), ("by-setting", by_setting), ("by-size", tables_by_size)):
            with self.context.attempt("all runs", f"tables {name}"):
                for index, table in enumerate(make(self.context.runs), 1):
                    self.add(table, f"{name}-{index}")
