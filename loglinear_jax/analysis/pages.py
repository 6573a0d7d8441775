"""Markdown pages about runs, whose tables are made from the runs and checked against them.

A table is between two comments, of which the first names an entry of tables.toml:

    <!-- table: mqar-shares -->                [mqar-shares]
    | mixer | ...                              table = "by_pairs"
    <!-- end table -->                         cell = "solved"
                                               rows = { softmax = ["mqar-kv*", "mixer=softmax"] }

`table` is a function of page_tables.py, and the other keys are its parameters.

The accuracies of a table are those on the test sets if all of its runs have them, else those in
validation. A line below the table says which, unless none of its runs has a test.

Pages are README.md and all *.md in docs and results, tables are in results/tables.toml, and runs are the records
results/STUDY/runs/NAME.json, which are named without their study, comma-separated, with * and ?.
"""

from __future__ import annotations

import dataclasses
import fnmatch
import functools
import itertools
import re
import tomllib
from pathlib import Path
from typing import Any

from tabulate import tabulate

from loglinear_jax.analysis.page_tables import SOLVED, TABLES, choose
from loglinear_jax.analysis.table import accuracy_note
from loglinear_jax.config import ConfigError
from loglinear_jax.runs.loading import Run, read_run
from loglinear_jax.tasks import ACCURACY

TABLE = re.compile(r"(<!-- table: (\S*?)\s*-->\n)(.*?)(<!-- end table -->)", re.DOTALL)
NOT_MADE = (ConfigError, IndexError, KeyError, TypeError, ValueError, OSError)


class Records:
    """The records of runs in a folder, by name; each is read when it is first asked for."""

    def __init__(self, folder: Path):
        self.folder = folder
        paths = {path.stem: path for path in folder.glob("*/runs/*.json")}
        self.paths = dict(sorted(paths.items(), key=lambda item: _natural(item[0])))
        self.read = functools.cache(lambda name: read_run(self.paths[name]))

    def matching(self, patterns: str) -> list[Run]:
        """The runs of these comma-separated patterns. Raises ConfigError for a pattern that matches none."""
        names: dict[str, None] = {}
        for pattern in map(str.strip, patterns.split(",")):
            if not (found := fnmatch.filter(self.paths, pattern)):
                raise ConfigError(f"no run in {self.folder} matches {pattern!r}")
            names |= dict.fromkeys(found)
        return list(map(self.read, names))


def _natural(name: str) -> list:
    """So that kv4 comes before kv16."""
    return [int(part) if part.isdecimal() else part for part in re.split(r"(\d+)", name)]


def _in_validation(run: Run) -> Run:
    """The run without its test."""
    variants = {name: dataclasses.replace(outcome, test_accuracy=None) for name, outcome in run.outcomes.items()}
    return dataclasses.replace(run, summary=dataclasses.replace(run.summary, variants=variants))


class Pages:
    """The pages of a folder, with their tables and runs.

    problems: one line for each table that could not be made. Raises ConfigError where there are no pages, or
    tables.toml can't be read.
    """

    def __init__(self, folder: Path):
        self.pages = [
            page for where in ("*.md", "docs/**/*.md", "results/**/*.md") for page in sorted(folder.glob(where))
        ]
        if not self.pages:
            raise ConfigError(f"{folder} has no pages (*.md)")
        tables = folder / "results/tables.toml"
        try:
            self.tables = tomllib.loads(tables.read_text(encoding="utf-8")) if tables.exists() else {}
        except (OSError, ValueError) as error:
            raise ConfigError(f"{tables} can't be read: {error}") from error
        self.records, self.problems, self.num_tables = Records(folder / "results"), [], 0

    def check(self) -> list[str]:
        """One line for each page that does not agree with the runs in a table, with the first differing line."""
        for page in self.pages:
            text = page.read_text(encoding="utf-8")
            lines = itertools.zip_longest(text.splitlines(), self._with_tables(page, text).splitlines())
            different = ((number, *pair) for number, pair in enumerate(lines, 1) if pair[0] != pair[1])
            for number, old, new in itertools.islice(different, 1):
                self.problems.append(f"{page}:{number}: {old!r} should be {new!r}")
        return self.problems

    def write(self) -> tuple[list[Path], list[str]]:
        """Makes the tables of every page again. Returns the pages that changed, and what could not be made."""
        changed = []
        for page in self.pages:
            text = page.read_text(encoding="utf-8")
            new = self._with_tables(page, text)
            if new != text:
                page.write_text(new, encoding="utf-8")
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
            rows, runs = self._on_one_set(lambda find: table(find, **options))
        except NOT_MADE as error:
            self.problems.append(f"{page}: table {name}: {_one_line(error)}")
            return match[0]
        self.num_tables += 1
        lines = tabulate(rows, headers="keys", tablefmt="github", disable_numparse=True, missingval="–")
        solved = "solved" in options.get("cell", "") or any(SOLVED in column for row in rows for column in row)
        note = f"{accuracy_note(runs[0], solved)}\n\n" if runs and table.accuracies else ""
        return f"{first}\n{lines}\n\n{note}{last}"

    def _on_one_set(self, make: Any) -> tuple[Any, list]:
        """(What `make(find)` gives, with accuracies that may be compared in all runs that it finds; an outcome of each of these
        that has a test)."""
        used: list[Run] = []

        def find(patterns: str) -> list[Run]:
            used.extend(found := self.records.matching(patterns))
            return found

        made = make(find)
        outcomes = [o for run in used for o in run.outcomes.values() if o.score is ACCURACY]
        tested = [o for o in outcomes if o.test_accuracy is not None]
        if len(tested) in (0, len(outcomes)):
            return made, tested
        validated = [dataclasses.replace(tested[0], test_accuracy=None)]
        return make(lambda patterns: list(map(_in_validation, self.records.matching(patterns)))), validated


def _one_line(text: Any) -> str:
    return " ".join(str(text).split())
