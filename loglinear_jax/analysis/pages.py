"""Markdown pages about runs, whose tables are made from the runs' records and checked against them.

A table is between two comments, of which the first names an entry of tables.toml:

    <!-- table: mqar-shares -->                [mqar-shares]
    | mixer | ...                              table = "grid"
    <!-- end table -->                         cell = "solved"
                                               rows = { softmax = "mixer=softmax" }
                                               columns = { "4 pairs" = "mqar-kv4" }

`table` is a function of TABLES, and the other keys are its parameters. The accuracies of a table are those on the test sets if
all of its runs have them, else those in validation; a line below the table says which, unless none of its runs has a test.

Pages are README.md and all *.md in docs and results, tables are in results/tables.toml, and runs are the records
results/STUDY/runs/NAME.json, which are named without their study, comma-separated, with * and ?.
"""

from __future__ import annotations

import csv
import dataclasses
import fnmatch
import functools
import itertools
import re
import tomllib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from tabulate import tabulate

from loglinear_jax.analysis import outcomes, paper, rates
from loglinear_jax.analysis import table as cells
from loglinear_jax.analysis.paper import setting_of
from loglinear_jax.config import ConfigError
from loglinear_jax.runs.loading import Run, read_run
from loglinear_jax.runs.outcome import VariantOutcome
from loglinear_jax.runs.writing import replace_file
from loglinear_jax.statistics import mean_difference
from loglinear_jax.tasks import ACCURACY, CONVERGED_ACCURACY

TABLE = re.compile(r"(<!-- table: (\S*?)\s*-->\n)(.*?)(<!-- end table -->)", re.DOTALL)
NOT_MADE = (ConfigError, IndexError, KeyError, TypeError, ValueError, OSError)
SOLVED = "≥ 99 %"  # in the heads of columns that count such seeds
Rows = list[dict[str, str]]
Runs = Callable[[str], list[Run]]


def choose(kind: str, name: str, known: Mapping[str, Any]) -> Any:
    """Looks up a name that a page or tables.toml gives. Raises ConfigError, naming those there are, for any other."""
    if name not in known:
        raise ConfigError(f"there is no {kind} {name!r}: there are {', '.join(known)}")
    return known[name]


# --- Tables, as rows of cells by column; `find` gives the runs of a text that names some ------------------------------

# Tables of the report, by their names in pages: of several runs, or of one.
OF_REPORT: dict[str, Callable[[Sequence[Run]], Sequence[Any]]] = {
    "by axis": outcomes.as_the_paper,
    "by setting": outcomes.by_setting,
    "by size": outcomes.tables_by_size,
    "parts": lambda runs: [outcomes.parts(run) for run in runs],
}


def of_report(
    find: Runs,
    runs: str,
    name: str,
    variants: list[str] | None = None,
    columns: list[str] | None = None,
    lines: str = "",
) -> Rows:
    """Make a table as the report does, from runs that make one.

    Args:
        find: gives the runs of a text that names some.
        runs: which they are.
        name: in OF_REPORT.
        variants: their rows alone, in this order.
        columns: those alone, behind the first.
        lines: only the rows of this kind, such as those that count seeds.
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
    if variants is not None:
        of_variant = {row["variant"]: row for row in rows}
        rows = [choose("row", variant, of_variant) for variant in variants]
    return rows


# By their names, their heads, and their cells of a run, a variant and its outcome.
CELLS: dict[str, tuple[str, Callable[[Run, str, VariantOutcome], str]]] = {
    "variant": ("variant", lambda run, variant, o: variant),
    "setting": ("setting", lambda run, v, o: setting_of(run.config) or "–"),
    "vocabulary": ("vocabulary", lambda run, v, o: str(run.config.task.vocab_size)),
    "hidden": ("hidden", lambda run, v, o: str(run.config.model.hidden)),
    "seeds": ("seeds", lambda run, v, o: f"{min(o.seeds)} to {max(o.seeds)}"),
    "predicts": ("predicts", lambda run, v, o: o.predicts),
    "interval": ("mean % [95 % interval]", lambda run, v, o: cells.mean_with_interval(100 * o.accuracy)),
    "mean": ("accuracy %, mean ± std", lambda run, v, o: cells.mean_and_std(100 * o.accuracy)),
    "least": ("least %", lambda run, v, o: f"{100 * min(o.accuracy):.1f}"),
    "peak": ("peak %", lambda run, v, o: f"{100 * o.peak_accuracy:.1f}"),
    "converged": ("≥ 90 %", lambda run, v, o: cells.num_and_share_converged(o)),
    "solved": (f"{SOLVED}; median step", lambda run, v, o: cells.solved_and_step(o, ",")),
    "converged and solved": (f"≥ 90 %, {SOLVED}", lambda run, v, o: cells.converged_and_solved(o)),
    "paper": ("the paper", lambda run, variant, o: paper.result(run.config, variant) or "–"),
    "validation": ("validation", lambda run, v, o: cells.perplexity(o.best_loss)),
    "test": ("test", lambda run, v, o: cells.perplexity(cells.of_evaluated(o, o.test_loss))),
}


def of_variants(find: Runs, runs: str, columns: list[str], variants: list[str] | None = None) -> Rows:
    """Make a table with a row for each variant of each run.

    Args:
        find, runs: as in `of_report`.
        columns: names in CELLS; the variant comes first if it is not among them.
        variants: those alone.
    """
    names = columns if "variant" in columns else ["variant", *columns]
    found = [choose("column", name, CELLS) for name in names]
    every = [(run, variant, outcome) for run in find(runs) for variant, outcome in run.outcomes.items()]
    return [{head: cell(*one) for head, cell in found} for one in every if variants is None or one[1] in variants]


def grid(
    find: Runs,
    rows: list[str] | dict[str, str | list[str]],
    columns: dict[str, str | list[str]],
    cell: str = "interval",
    head: str = "variant",
    at_best_rates: bool = False,
) -> Rows:
    """Make a table with a cell for each variant in the first run of each column that has it; or for each two variants, with
    how much more accurate the first is, in points, paired by seed, with the interval of the mean.

    Args:
        find: as in `of_report`.
        rows: variants, or one or two of them by the row's label.
        columns: runs by label; in a list, settings behind them are added to the variants' names.
        cell: its name in CELLS.
        head: of the first column.
        at_best_rates: variants are named without rates, and are at their best learning rate, which one half of the seeds
            choose for the other.
    """
    found = []
    for label, variants in rows.items() if isinstance(rows, dict) else zip(rows, rows, strict=True):
        row = {head: label}
        for column, runs in columns.items():
            named, *settings = [runs] if isinstance(runs, str) else runs
            names = ["+".join([name, *settings]) for name in ([variants] if isinstance(variants, str) else variants)]
            places = [_place(find(named), name, at_best_rates) for name in names]
            if None in places:
                continue
            if len(places) == 2:
                row[column] = _gain(*(group for _, group in places), at_best_rates)
            elif at_best_rates:
                row[column] = _at_best(places[0][1])
            else:
                row[column] = choose("cell", cell, CELLS)[1](places[0][0], names[0], places[0][1][0].outcome)
        if len(row) == 1:
            raise ConfigError(f"no column has what {label} is made from")
        found.append(row)
    return found


def _place(runs: Sequence[Run], variant: str, without_rates: bool) -> tuple[Run, list[rates.AtRate]] | None:
    """The first run that has a variant, and its outcomes there."""
    for run in runs:
        groups = rates.by_variant(run)
        every = [at for group in groups.values() for at in group]
        found = groups.get(variant) if without_rates else [at for at in every if at.variant == variant]
        if found:
            return run, found
    return None


def _at_best(group: list[rates.AtRate]) -> str:
    chosen, _, *interval = rates.chosen_rate(ACCURACY, group)
    at = f" at {rates.name_of(chosen, rates.several_decays([group]))}" if len(group) > 1 else ""
    return cells.with_interval(*interval) + at


def _gain(ours: list[rates.AtRate], others: list[rates.AtRate], at_best_rates: bool) -> str:
    if ours[0].outcome.seeds != others[0].outcome.seeds:
        raise ConfigError(f"the seeds of {ours[0].variant} and {others[0].variant} are not the same")
    if at_best_rates:
        difference = rates.difference_at_best_rates(ACCURACY, ours, others)[:3]
    else:
        difference = mean_difference(*(100 * group[0].outcome.accuracy for group in (ours, others)))
    return cells.with_interval(*difference, sign="+").replace("-", "−")


def lengths(find: Runs, runs: str) -> Rows:
    """Make a table of accuracies in % (seeds at ≥ 90 %) at the trained length and beyond, mean ± standard deviation.

    It is made from the report's table of lengths, RUN-lengths.csv beside the run's record.
    """
    rows: dict[str, dict[str, str]] = {}
    of = find(runs)
    one_task = all(run.config.task == of[0].config.task for run in of)
    for run in of:
        evaluated: dict[tuple[str, str], list[float]] = {}  # a value a seed
        with run.workdir.with_name(f"{run.name}-lengths.csv").open(encoding="utf-8") as file:
            for line in csv.DictReader(file):
                evaluated.setdefault((line["variant"], line["length"]), []).append(float(line["accuracy"]))
        for (variant, length), accuracies in evaluated.items():
            column = f"length {length}" if one_task else f"{run.config.task.num_pairs} pairs, length {length}"
            cell = cells.mean_std_and_reached(accuracies, 100 * CONVERGED_ACCURACY)
            rows.setdefault(variant, {"variant": variant}).setdefault(column, cell)
    if all(run.config.task.name == "mqar" for run in of):
        for variant, row in rows.items():
            row["the paper at 256"] = str(paper.MQAR_FROM_128_TO_256.get(variant, "–"))
    return list(rows.values())


TABLES: dict[str, Callable[..., Rows]] = {f.__name__: f for f in (of_report, of_variants, grid, lengths)}


# --- Pages ------------------------------------------------------------------------------------------------------------


class Records:
    """The records of runs in a folder, by name; each is read when it is first asked for."""

    def __init__(self, folder: Path):
        self.folder = folder
        paths = {path.stem: path for path in folder.glob("*/runs/*.json")}
        self.paths = dict(sorted(paths.items(), key=lambda item: cells.natural(item[0])))
        self.read = functools.cache(lambda name: read_run(self.paths[name]))

    def matching(self, patterns: str) -> list[Run]:
        """The runs of these comma-separated patterns. Raises ConfigError for a pattern that matches none."""
        names: dict[str, None] = {}
        for pattern in map(str.strip, patterns.split(",")):
            if not (found := fnmatch.filter(self.paths, pattern)):
                raise ConfigError(f"no run in {self.folder} matches {pattern!r}")
            names |= dict.fromkeys(found)
        return list(map(self.read, names))


def _in_validation(run: Run) -> Run:
    """The run without its test."""
    variants = {name: dataclasses.replace(outcome, test_accuracy=None) for name, outcome in run.outcomes.items()}
    return dataclasses.replace(run, summary=dataclasses.replace(run.summary, variants=variants))


def _read(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise ConfigError(f"{file} can't be read: {error}") from error


class Pages:
    """The pages of a folder, with their tables and runs.

    problems: one line for each table that could not be made. Raises ConfigError where there are no pages, or one of them or
    tables.toml can't be read.
    """

    def __init__(self, folder: Path):
        patterns = ("*.md", "docs/**/*.md", "results/**/*.md")
        self.pages = [page for pattern in patterns for page in sorted(folder.glob(pattern))]
        if not self.pages:
            raise ConfigError(f"--folder: {folder} has no pages: expected README.md, or others in docs and results")
        tables = folder / "results/tables.toml"
        try:
            self.tables = tomllib.loads(_read(tables)) if tables.exists() else {}
        except tomllib.TOMLDecodeError as error:
            raise ConfigError(f"{tables} can't be read: {error}") from error
        self.records, self.problems, self.num_tables = Records(folder / "results"), [], 0

    def check(self) -> list[str]:
        """One line for each page that does not agree with the runs in a table, with the first differing line."""
        for page in self.pages:
            text = _read(page)
            lines = itertools.zip_longest(text.splitlines(), self._with_tables(page, text).splitlines())
            different = ((number, *pair) for number, pair in enumerate(lines, 1) if pair[0] != pair[1])
            for number, old, new in itertools.islice(different, 1):
                self.problems.append(f"{page}:{number}: {old!r} should be {new!r}")
        return self.problems

    def write(self) -> tuple[list[Path], list[str]]:
        """Makes the tables of every page again. Returns the pages that changed, and what could not be made."""
        changed = []
        for page in self.pages:
            text = _read(page)
            new = self._with_tables(page, text)
            if new != text:
                replace_file(page, lambda file, text=new: file.write(text))
                changed.append(page)
        return changed, self.problems

    def _with_tables(self, page: Path, text: str) -> str:
        opened, whole = text.count("<!-- table:"), len(TABLE.findall(text))
        if opened != whole:
            self.problems.append(f"{page}: {opened} tables begin, {whole} of them end")
        return TABLE.sub(functools.partial(self._made, page), text)

    def _made(self, page: Path, match: re.Match) -> str:
        """The table with its comments, made again; as it is if it can't be made, which is then a problem."""
        first, name, _, last = match.groups()
        try:
            options = dict(choose("table", name, self.tables))
            table = choose("function", options.pop("table"), TABLES)
            rows, tested = self._on_one_set(lambda find: table(find, **options))
        except NOT_MADE as error:
            self.problems.append(f"{page}: table {name}: {' '.join(str(error).split())}")
            return match[0]
        self.num_tables += 1
        lines = tabulate(rows, headers="keys", tablefmt="github", disable_numparse=True, missingval="–")
        solved = "solved" in options.get("cell", "") or any(SOLVED in column for row in rows for column in row)
        note = f"{cells.accuracy_note(tested, solved)}\n\n" if tested and table is not lengths else ""
        return f"{first}\n{lines}\n\n{note}{last}"

    def _on_one_set(self, make: Callable[[Runs], Rows]) -> tuple[Rows, VariantOutcome | None]:
        """(What `make` makes, with accuracies that may be compared in all runs that it finds; one of their outcomes as it was
        used, if any of them has a test)."""
        used: list[Run] = []

        def find(patterns: str) -> list[Run]:
            used.extend(found := self.records.matching(patterns))
            return found

        made = make(find)
        every = [o for run in used for o in run.outcomes.values() if o.score is ACCURACY]
        tested = [o for o in every if o.test_accuracy is not None]
        if len(tested) in (0, len(every)):
            return made, next(iter(tested), None)
        made = make(lambda patterns: list(map(_in_validation, self.records.matching(patterns))))
        return made, dataclasses.replace(tested[0], test_accuracy=None)
