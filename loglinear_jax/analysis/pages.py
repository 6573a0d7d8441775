"""Markdown pages about runs, whose tables and numbers are made from the runs and checked against them.

A table is between two comments, of which the first names an entry of tables.toml:

    <!-- table: mqar-pairs -->                 [mqar-pairs]
    | variant | ...                            table = "shares_by_pairs"
    <!-- end table -->                         rows = { softmax = ["mqar-kv*", "mixer=softmax"] }

`table` is a function of page_tables.py, and the other keys are its parameters. Where the signature says Runs, the value is a
text that names runs, comma-separated, with * and ?; where it says Chosen, a list of such a text and variants.

A piece of prose is repeated in a comment, with functions of page_tables.NUMBERS in braces instead of its numbers, each followed
by runs and its other arguments:

    <!-- checked: `linear` converges in {converged mqar-seq128-kv* linear} of 256 runs -->

The page must then contain that piece with the numbers filled in; where its lines break does not count.

The accuracies of a table, or of a piece of prose, are those on the test sets if all of its runs have them, else those in
validation. A line below the table says which, unless none of its runs has a test.

Pages are README.md and all *.md in docs and results, tables are in results/tables.toml, and runs are the records
results/STUDY/runs/NAME.json, which are named without their study.
"""

from __future__ import annotations

import copy
import dataclasses
import fnmatch
import functools
import inspect
import itertools
import re
import tomllib
import typing
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from tabulate import tabulate

from loglinear_jax.analysis.cells import accuracy_note
from loglinear_jax.analysis.page_tables import NUMBERS, SOLVED, TABLES, Chosen, Runs
from loglinear_jax.config import ConfigError
from loglinear_jax.runs.loading import Run, read_run
from loglinear_jax.runs.outcome import VariantOutcome, on_one_set
from loglinear_jax.tasks import ACCURACY

TABLE = re.compile(
    r"(?P<first><!-- table: (?P<name>\S*?)\s*-->\n)(?P<table>.*?)(?P<last><!-- end table -->)", re.DOTALL
)
CHECKED = re.compile(r"<!-- checked: (.*?)\s*-->", re.DOTALL)
NUMBER = re.compile(r"\{(.*?)\}", re.DOTALL)
COMMENT = re.compile(r"<!--.*?-->", re.DOTALL)


class Results:
    """The finished runs in a folder, read when they are asked for."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.paths = {path.stem: path for path in folder.glob("*/runs/*.json")}
        self.names = sorted(self.paths, key=_natural)
        self._read: dict[str, Run] = {}

    def matching(self, patterns: str) -> Runs:
        """The runs of these comma-separated patterns. Raises ConfigError for a pattern that matches none."""
        names: dict[str, None] = {}
        for pattern in map(str.strip, patterns.split(",")):
            if not (found := fnmatch.filter(self.names, pattern)):
                raise ConfigError(f"no run in {self.folder} matches {pattern!r}")
            names |= dict.fromkeys(found)
        self._read |= {name: read_run(self.paths[name]) for name in names if name not in self._read}
        return Runs(self._read[name] for name in names)

    def on_one_set(self, runs: Iterable[Run]) -> tuple[Results, VariantOutcome | None]:
        """The same results, in which the accuracies of these runs may be compared; and an outcome whose note says what they
        are, None if none of the runs has a test."""
        chosen = {run.name: run for run in runs}
        outcomes = {(name, v): outcome for name, run in chosen.items() for v, outcome in run.outcomes.items()}
        compared, results = on_one_set(outcomes), copy.copy(self)
        results._read = dict(self._read)
        for name, run in chosen.items() if compared != outcomes else ():
            variants = {variant: compared[name, variant] for variant in run.outcomes}
            summary = dataclasses.replace(run.summary, variants=variants)
            results._read[name] = dataclasses.replace(run, summary=summary)
        tested = [key for key, o in outcomes.items() if o.score is ACCURACY and o.test_accuracy is not None]
        return results, compared[tested[0]] if tested else None


@functools.cache
def _natural(name: str) -> tuple:
    """So that kv4 comes before kv16."""
    return tuple(int(part) if part.isdecimal() else part for part in re.split(r"(\d+)", name))


class Pages:
    """The pages of a folder, with their tables and runs. slow: with the tables that take a minute.

    problems: after `made`, one line for each table that could not be made, and each piece of prose that does not agree with the
    runs. Raises ConfigError where there are no pages, or tables.toml can't be read.
    """

    def __init__(self, folder: Path, slow: bool = False):
        runs = folder / "results"
        patterns = ("*.md", "docs/**/*.md", "results/**/*.md")
        self.pages = [page for pattern in patterns for page in sorted(folder.glob(pattern))]
        if not self.pages:
            raise ConfigError(f"{folder} has no pages (*.md)")
        tables = runs / "tables.toml"
        try:
            self.tables = tomllib.loads(tables.read_text(encoding="utf-8")) if tables.exists() else {}
        except (OSError, ValueError) as error:
            raise ConfigError(f"{tables} can't be read: {error}") from error
        self.results, self.slow, self.problems, self.num_tables = Results(runs), slow, [], 0

    def check(self) -> list[str]:
        """One line for each page that does not agree with the runs in a table, with the first differing line, and for each
        piece of prose that does not."""
        for page in self.pages:
            text = page.read_text(encoding="utf-8")
            lines = itertools.zip_longest(text.splitlines(), self._with_tables(page, text).splitlines())
            different = [(number, old, new) for number, (old, new) in enumerate(lines, 1) if old != new]
            for number, old, new in different[:1]:
                self.problems.append(f"{page}:{number}: {old!r} should be {new!r}")
            self._check_prose(page, text)
        return self.problems

    def write(self) -> tuple[list[Path], list[str]]:
        """Makes the tables of every page again. Returns the pages that changed, and what could not be made or does not agree,
        as from `check`."""
        changed = []
        for page in self.pages:
            text = page.read_text(encoding="utf-8")
            new = self._with_tables(page, text)
            if new != text:
                page.write_text(new, encoding="utf-8")
                changed.append(page)
            self._check_prose(page, new)
        return changed, self.problems

    def _with_tables(self, page: Path, text: str) -> str:
        opened, whole = text.count("<!-- table:"), len(TABLE.findall(text))
        if opened != whole:
            self.problems.append(f"{page}: {opened} tables begin, {whole} of them end")
        return TABLE.sub(functools.partial(self._made, page), text)

    def _made(self, page: Path, match: re.Match) -> str:
        """The table with its comments, made again; as it is if it is slow, or can't be made, which is then a problem."""
        name = match["name"]
        try:
            made = self._rows_and_note(name)
        except (ConfigError, KeyError, TypeError, ValueError, OSError) as error:
            self.problems.append(f"{page}: table {name}: {_one_line(error)}")
            return match[0]
        if made is None:
            return match[0]
        self.num_tables += 1
        rows, note = made
        lines = tabulate(rows, headers="keys", tablefmt="github", disable_numparse=True, missingval="–")
        below = f"{note}\n\n" if note else ""
        return f"{match['first']}\n{lines}\n\n{below}{match['last']}"

    def _rows_and_note(self, name: str) -> tuple[list[dict[str, str]], str] | None:
        """None for a table that is slow, if those are not asked for."""
        options = dict(_named(self.tables, name))
        table = _named(TABLES, options.pop("table"))
        if table.slow and not self.slow:
            return None
        signature = inspect.signature(table)
        signature.bind(**options)
        hints = typing.get_type_hints(table)
        named = _runs_in(_read(hints, options, self.results))
        comparable, tested = self.results.on_one_set(named)
        rows = table(**_read(hints, options, comparable))
        if tested is None or not table.accuracies:
            return rows, ""
        solved = "solved" in options.get("cell", "") or any(SOLVED in column for row in rows for column in row)
        return rows, accuracy_note(tested, solved)

    def _check_prose(self, page: Path, text: str) -> None:
        prose = _one_line(COMMENT.sub("", text))
        for piece in map(_one_line, CHECKED.findall(text)):
            try:
                filled = self._filled(piece)
            except (ConfigError, IndexError, TypeError, ValueError) as error:
                self.problems.append(f"{page}: {piece}: {_one_line(error)}")
                continue
            if filled not in prose:
                self.problems.append(f"{page}: does not say {filled!r}")

    def _filled(self, piece: str) -> str:
        """With the numbers filled in, which all are of accuracies on one set."""
        calls = [(_named(NUMBERS, name), arguments) for name, *arguments in map(str.split, NUMBER.findall(piece))]
        named = [run for _, arguments in calls for run in self.results.matching(arguments[0])]
        comparable, _ = self.results.on_one_set(named)
        found = iter([number(comparable.matching(runs), *others) for number, (runs, *others) in calls])
        return NUMBER.sub(lambda _: next(found), piece)


def _read(hints: Mapping[str, Any], options: Mapping[str, Any], results: Results) -> dict[str, Any]:
    """The options of a table, with the runs that they name."""

    def read(hint: Any, value: Any) -> Any:
        if hint is Runs:
            return results.matching(value)
        if hint is Chosen:
            runs, *variants = [value] if isinstance(value, str) else value
            return Chosen(results.matching(runs), variants)
        inner = typing.get_args(hint)
        if typing.get_origin(hint) is dict:
            return {label: read(inner[1], item) for label, item in value.items()}
        return [read(inner[0], item) for item in value] if typing.get_origin(hint) is list else value

    return {name: read(hints[name], value) for name, value in options.items()}


def _runs_in(value: Any) -> Iterator[Run]:
    """The runs in options that were read."""
    if isinstance(value, (Runs, Chosen)):
        yield from value if isinstance(value, Runs) else value.runs
    elif isinstance(value, (dict, list)):
        for item in value.values() if isinstance(value, dict) else value:
            yield from _runs_in(item)


def _named(known: Mapping[str, Any], name: str) -> Any:
    if name not in known:
        raise ConfigError(f"there is no {name!r}: there are {', '.join(known)}")
    return known[name]


def _one_line(text: Any) -> str:
    return " ".join(str(text).split())
