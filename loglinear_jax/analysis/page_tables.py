"""The tables that Markdown pages show of runs: what entries of tables.toml may name.

Every function of TABLES returns rows, as cells by column, from `find`, which gives the runs of a text that names some, and the
entry's other keys. `variants` are names of trained settings, such as linear or mixer=softmax; where runs and variants are named
together, they are a list: ["mqar-kv*", "linear"].
"""

from __future__ import annotations

import csv
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from loglinear_jax.analysis import comparisons, outcomes, paper
from loglinear_jax.analysis import table as cells
from loglinear_jax.analysis.best_rates import (
    AtRate,
    at_best,
    by_rate,
    by_variant,
    chosen_rate,
    difference_at_best_rates,
    name_of,
    named_rates,
    several_decays,
)
from loglinear_jax.analysis.experiments import setting_of
from loglinear_jax.config import ConfigError, some_of
from loglinear_jax.runs.loading import Run
from loglinear_jax.runs.outcome import VariantOutcome
from loglinear_jax.statistics import mean_difference
from loglinear_jax.tasks import ACCURACY, CONVERGED_ACCURACY

SOLVED = "≥ 99 %"  # in the heads of columns that count such seeds
Rows = list[dict[str, str]]
Runs = Callable[[str], list[Run]]
TABLES: dict[str, Callable[..., Rows]] = {}


def table(accuracies: bool = True) -> Callable[[Callable[..., Rows]], Callable[..., Rows]]:
    """Registers a table. accuracies: whether it shows accuracies, so that a line below says on which set."""

    def register(function: Callable[..., Rows]) -> Callable[..., Rows]:
        function.accuracies = accuracies
        TABLES[function.__name__] = function
        return function

    return register


def outcome_of(run: Run, variant: str) -> VariantOutcome:
    """Raises ConfigError if the run has no such variant."""
    if variant not in run.outcomes:
        raise ConfigError(f"{run.name} has no variant {variant!r}: it has {some_of(run.outcomes)}")
    return run.outcomes[variant]


def choose(kind: str, name: str, known: Mapping[str, Any]) -> Any:
    if name not in known:
        raise ConfigError(f"there is no {kind} {name!r}: there are {', '.join(known)}")
    return known[name]


# Tables of the report, by their names in pages: of several runs, or of one.
OF_REPORT: dict[str, Callable[[Sequence[Run]], Sequence[Any]]] = {
    "by axis": comparisons.as_the_paper,
    "by setting": lambda runs: list(comparisons.by_setting(runs).values()),
    "by size": comparisons.tables_by_size,
    "parts": lambda runs: [outcomes.parts(run) for run in runs],
}


@table()
def of_report(
    find: Runs,
    runs: str,
    name: str,
    variants: list[str] | None = None,
    columns: list[str] | None = None,
    lines: str = "",
) -> Rows:
    """A table of the report about these runs, which must make one.

    name: in OF_REPORT. variants: their rows alone, in this order; where a row compares two, A and B, those of two of them.
    columns: those alone, behind the first. lines: only the rows of this kind, such as those that count seeds.
    """
    found = [made for made in choose("table", name, OF_REPORT)(find(runs)) if made is not None]
    if len(found) != 1:
        raise ConfigError(f"these runs make {len(found)} tables {name!r}, expected one")
    rows = found[0].rows
    if lines:
        rows = [{k: v for k, v in row.items() if k} for row in rows if row[""] == lines]
    if columns is not None:
        first = next(iter(rows[0]))
        rows = [{k: row[k] for k in (first, *columns) if k in row} for row in rows if set(columns) & set(row)]
    if variants is None:
        return rows
    named = [((row["A"], row["B"]) if "A" in row else (row["variant"],), row) for row in rows]
    kept = [(names, row) for names, row in named if set(names) <= set(variants)]
    if missing := set(variants) - {variant for names, _ in kept for variant in names}:
        raise ConfigError(f"{name} has no row of {min(missing, key=variants.index)}")
    return [row for _, row in sorted(kept, key=lambda one: [variants.index(variant) for variant in one[0]])]


# Of `of_variants`: by their names, their heads, and their cells of a run, a variant and its outcome.
COLUMNS: dict[str, tuple[str, Callable[[Run, str, VariantOutcome], str]]] = {
    "variant": ("variant", lambda run, variant, o: variant),
    "setting": ("setting", lambda run, v, o: setting_of(run.config) or "–"),
    "vocabulary": ("vocabulary", lambda run, v, o: str(run.config.task.vocab_size)),
    "hidden": ("hidden", lambda run, v, o: str(run.config.model.hidden)),
    "predicts": ("predicts", lambda run, v, o: o.predicts),
    "seeds": ("seeds", lambda run, v, o: cells.num_seeds(o)),
    "interval": ("mean % [95 % interval]", lambda run, v, o: cells.mean_with_interval(100 * o.accuracy)),
    "mean": ("accuracy %, mean ± std", lambda run, v, o: cells.mean_and_std(100 * o.accuracy)),
    "least": ("least %", lambda run, v, o: f"{100 * min(o.accuracy):.1f}"),
    "peak": ("peak %", lambda run, v, o: f"{100 * o.peak_accuracy:.1f}"),
    "converged": ("≥ 90 %", lambda run, v, o: cells.num_and_share_converged(o)),
    "solved": (f"{SOLVED}; median step", lambda run, v, o: cells.solved_and_step(o, ",")),
    "paper": ("the paper", lambda run, variant, o: paper.result(run.config, variant) or "–"),
    "validation": ("validation", lambda run, v, o: cells.perplexity(o.best_loss)),
    "test": ("test", lambda run, v, o: cells.perplexity(cells.of_evaluated(o, o.test_loss))),
    "best step": ("best at step", lambda run, v, o: cells.median_of(o.best_step, ",")),
    "lam": ("λ adds", lambda run, v, o: f"{o.lam_params_percent:.4f} %"),
}


@table()
def of_variants(find: Runs, runs: str, columns: list[str], variants: list[str] | None = None) -> Rows:
    """A row for each variant of each run. columns: names in COLUMNS, behind the variant if that is not among them."""
    names = columns if "variant" in columns else ["variant", *columns]
    found = [choose("column", name, COLUMNS) for name in names]
    every = [(run, variant, outcome) for run in find(runs) for variant, outcome in run.outcomes.items()]
    return [{head: cell(*one) for head, cell in found} for one in every if variants is None or one[1] in variants]


CELLS = {
    "share converged": cells.share_converged,
    "converged and solved": cells.converged_and_solved,
    "solved": lambda outcome: cells.solved_and_step(outcome, ","),
}


@table()
def by_pairs(find: Runs, rows: dict[str, list[str]], cell: str, heads: list[str]) -> Rows:
    """A cell of CELLS against pairs, for the runs and variants of each row. heads: of the column of labels, and of one of
    variants if there are several in a row."""
    found = []
    for label, (runs, *variants) in rows.items():
        for index, variant in enumerate(variants):
            names = dict(zip(heads, ("" if index else label, f"`{variant}`"), strict=False))
            found.append(names | {_pairs(run): CELLS[cell](outcome_of(run, variant)) for run in find(runs)})
    return found


def _pairs(run: Run) -> str:
    return f"{run.config.task.num_pairs} pairs"


Groups = Callable[[Run], dict[str, list[AtRate]]]


def _several_or_named(run: Run) -> dict[str, list[AtRate]]:
    """`by_variant`, of variants with several rates, or with one that is part of the variant's name."""
    return {v: group for v, group in by_variant(run).items() if len(group) > 1 or named_rates(group[0].variant)}


def _each(run: Run) -> dict[str, list[AtRate]]:
    """Every variant by its full name."""
    return {at.variant: [at] for group in by_variant(run).values() for at in group}


def _groups(find: Runs, columns: dict[str, str], variant: str, groups_of: Groups) -> Iterator[tuple[str, list[AtRate]]]:
    """The label of each column of which a run has the variant among its groups, with the first such run's."""
    for label, runs in columns.items():
        groups = (groups_of(run) for run in find(runs))
        if (group := next((of_run[variant] for of_run in groups if variant in of_run), None)) is not None:
            yield label, group


@table()
def means(find: Runs, columns: dict[str, str], variants: list[str], best_rates: bool = False) -> Rows:
    """Mean accuracy of each variant with its bootstrapped 95 % interval, in the runs of each column.

    best_rates: the variants are named without rates, and are at their best learning rate, which one half of the seeds choose
    for the other (`chosen_rate`); in the first run of each column that has them at several rates, or that names their rate,
    which other seeds may have chosen.
    """
    rows = []
    for variant in variants:
        row = {"variant": variant}
        for label, runs in columns.items() if not best_rates else ():
            if found := [run.outcomes[variant].accuracy for run in find(runs) if variant in run.outcomes]:
                row[label] = cells.mean_with_interval(100 * np.concatenate(found))
        for label, group in _groups(find, columns, variant, _several_or_named) if best_rates else ():
            found = at_best(ACCURACY, group)
            row[label] = cells.with_interval(*found[1:])
            if len(group) > 1:
                row[label] += f" at {name_of(chosen_rate(ACCURACY, group).rates, several_decays([group]))}"
        if len(row) == 1:
            rates = " at several learning rates, or at one that its name sets" if best_rates else ""
            raise ConfigError(f"no column has {variant}{rates}")
        rows.append(row)
    return rows


@table()
def at_every_rate(find: Runs, runs: str, variants: list[str]) -> Rows:
    """Mean accuracy of each variant of one run with its interval, a column for each of its learning rates and weight decays."""
    (run,) = find(runs)
    groups = by_rate(run)
    if missing := [variant for variant in variants if variant not in groups]:
        raise ConfigError(f"{run.name} has no {missing[0]} at several learning rates")
    return [
        {"variant": variant}
        | {
            name_of(at, several_decays([groups[variant]])): cells.mean_with_interval(100 * at.outcome.accuracy)
            for at in groups[variant]
        }
        for variant in variants
    ]


@table()
def gains(find: Runs, columns: dict[str, str], rows: dict[str, list[str]], best_rates: bool = False) -> Rows:
    """How much more accurate one variant is than another, in points, paired by seed, with the interval of the mean; in the
    first runs of each column that have them. rows: two variants each.

    best_rates: the variants are named without rates, and are each at their own best learning rates (`chosen_rate`), which may
    differ by column; where a run has a variant at one rate alone, that one counts.
    """
    found, groups_of = [], by_variant if best_rates else _each
    for label, pair in rows.items():
        if len(pair) != 2:
            raise ConfigError(f"{', '.join(pair)}: expected two variants")
        row = {"gain": label}
        groups = [dict(_groups(find, columns, variant, groups_of)) for variant in pair]
        for column in (column for column in columns if all(column in of_one for of_one in groups)):
            ours, others = (of_one[column] for of_one in groups)
            if ours[0].outcome.seeds != others[0].outcome.seeds:
                raise ConfigError(f"{column}: the seeds of {', '.join(pair)} are not the same")
            if best_rates:
                difference = difference_at_best_rates(ACCURACY, ours, others)[:3]
            else:
                difference = mean_difference(*(100 * of_one[0].outcome.accuracy for of_one in (ours, others)))
            row[column] = cells.with_interval(*difference, sign="+").replace("-", "−")
        if len(row) == 1:
            raise ConfigError(f"no column has both {' and '.join(pair)}")
        found.append(row)
    return found


def beside(run: Run, file: str) -> Path:
    """A table of the report that is kept beside a run's record."""
    return run.workdir.with_name(f"{run.name}-{file}")


@table(accuracies=False)
def lengths(find: Runs, runs: str) -> Rows:
    """Accuracy in % (seeds at ≥ 90 %) or perplexity at the trained length and beyond, mean ± std; from lengths.csv."""
    rows: dict[str, dict[str, str]] = {}
    of = find(runs)
    one_task = all(run.config.task == of[0].config.task for run in of)
    for run in of:
        evaluated: dict[tuple[str, str], list[dict[str, str]]] = {}  # a line a seed
        with beside(run, "lengths.csv").open(encoding="utf-8") as file:
            for line in csv.DictReader(file):
                evaluated.setdefault((line["variant"], line["length"]), []).append(line)
        for (variant, length), lines in evaluated.items():
            column = f"length {length}" if one_task else f"{_pairs(run)}, length {length}"
            if "perplexity" in lines[0]:
                cell = cells.mean_and_std([float(line["perplexity"]) for line in lines])
            else:
                accuracies = [float(line["accuracy"]) for line in lines]
                cell = cells.mean_std_and_reached(accuracies, 100 * CONVERGED_ACCURACY)
            rows.setdefault(variant, {"variant": variant}).setdefault(column, cell)
    if all(run.config.task.name == "mqar" for run in of):
        for variant, row in rows.items():
            row["the paper at 256"] = str(paper.MQAR_FROM_128_TO_256.get(variant, "–"))
    return list(rows.values())
