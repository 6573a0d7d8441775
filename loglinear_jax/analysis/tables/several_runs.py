"""Tables of several runs: those of the paper, one of all settings, and who converges by initial memory."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from jaxtyping import Float
from ml_collections import ConfigDict

from loglinear_jax.analysis import paper
from loglinear_jax.analysis.experiments import changed_settings, experiment_of, setting_of
from loglinear_jax.analysis.tables.rates import AtBest, at_best_of_runs
from loglinear_jax.analysis.tables.table import Table
from loglinear_jax.runs.cells import converged_and_solved, finite, mean_and_std, median_step
from loglinear_jax.runs.loading import Run
from loglinear_jax.runs.outcome import VariantOutcome, on_one_set
from loglinear_jax.statistics import longer_among
from loglinear_jax.tasks import CONVERGED_ACCURACY

MEANS, SHARES = "accuracy %", "≥ 90 %, ≥ 99 %"  # what a row shows


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
        means[variant] = mean_and_std(finite(100 * outcome.accuracy))
        shares[variant] = converged_and_solved(outcome) + median_step(outcome)
        raw.append({"run": run.name, "changed": changes, "variant": variant} | _share_numbers(outcome))
    note = (
        f"{outcome.solved_note} Mean ± std of the seeds. Then how many seeds reached 90 %, with Wilson's 95 % interval of "
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
            ours[name] = mean_and_std(100 * outcome.accuracy) if field == "seq_len" else mean_and_peak
            shares[name] = converged_and_solved(outcome)
            raw.append({"variant": variant, field: value} | _share_numbers(outcome) | {"the_paper": published})
        rows += [ours, shares] + ([theirs] if any(x != "–" for k, x in theirs.items() if "=" in k) else [])
    how = "mean ± std" if field == "seq_len" else "mean (peak)"
    notes.insert(
        0,
        f"{outcome.solved_note} Shown: {how} of the seeds. Then how many seeds reached 90 %, with Wilson's 95 % interval of "
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


def initial_memory(memory: Sequence[tuple[Run, str, Float[np.ndarray, "S layers heads"]]]) -> Table:
    """Whether the seeds that converged are those that remembered further back at the start.

    memory: runs, variants and their `decays.initial_memory`. Of each layer, and of all, the head that remembers longest counts.
    """
    changes = changed_settings([run for run, *_ in memory])
    outcomes = on_one_set({index: run.outcomes[variant] for index, (run, variant, _) in enumerate(memory)})
    rows, raw = [], []
    for (run, variant, tokens), changed, outcome in zip(memory, changes, outcomes.values(), strict=True):
        converged = np.array(outcome.reached(CONVERGED_ACCURACY))
        name = {"task": run.task.describe(), "changed": changed or "nothing", "variant": variant}
        row = name | {"≥ 90 %": f"{converged.sum()}/{len(converged)}"}
        number = name | {"run": run.name, "num_converged": int(converged.sum()), "num_seeds": len(converged)}
        longest = {f"layer {i}": of_layer for i, of_layer in enumerate(tokens.max(2).T)} | {"all": tokens.max((1, 2))}
        for place, of_seeds in longest.items():
            chance, p = longer_among(of_seeds, converged)
            row[place] = f"{chance:.2f} (p = {p:.1g})" if np.isfinite(chance) else "–"
            number |= {f"{place}: probability": chance, f"{place}: p": p}
        rows.append(row)
        raw.append(number)
    note = (
        f"{outcome.shown_note} "
        "The probability that a seed that reached 90 % started with a longer memory than one that did not (0.5: no matter; 1: "
        "the outcome follows from it), and the p-value of the Mann-Whitney test, not corrected for the number of comparisons. "
        "Memory: tokens after which a head's state has decayed to 1/e before training; the longest of the heads of a layer, "
        "or of all."
    )
    return Table("Which seeds converge, by how far back they remember at the start", rows, raw, note)
