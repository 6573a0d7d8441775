"""Markdown pages about runs whose tables and numbers are made from the runs, and checked against them.

A table stands between two comments. The first names a function of `pages.TABLES` and its options:

    <!-- table: by_pairs runs=mqar-seq128-kv* variants=linear,mlp_softplus -->
    | variant | ...
    <!-- end table -->

A piece of prose is repeated in a comment, with functions of `pages.NUMBERS` in braces in place of its numbers:

    <!-- checked: `linear` converges in {converged runs=mqar-seq128-kv* variant=linear} of 256 runs -->

The page must then contain that piece with the numbers filled in; where its lines break does not count.

The accuracies of a table, or of a piece of prose, are those on the test sets if all of its runs have them, else those in
validation. A line below the table says which, unless none of its runs has a test.

A folder's pages are its *.md, and its runs its <name>/summary.json. Of a folder that has a folder results, such as the
repository, the runs are those in results, and the pages also those in docs and results.
"""

from __future__ import annotations

import functools
import itertools
import re
import shlex
from pathlib import Path
from typing import Any

from tabulate import tabulate

from loglinear_jax.analysis.pages import NUMBERS, TABLES, Results
from loglinear_jax.config import ConfigError

TABLE = re.compile(r"(?P<first><!-- table: (?P<call>.*?)\s*-->\n)(?P<table>.*?)(?P<last><!-- end table -->)", re.DOTALL)
CHECKED = re.compile(r"<!-- checked: (.*?)\s*-->", re.DOTALL)
NUMBER = re.compile(r"\{(.*?)\}", re.DOTALL)
COMMENT = re.compile(r"<!--.*?-->", re.DOTALL)


def write_pages(folder: Path, slow: bool = False) -> tuple[list[Path], list[str]]:
    """Makes the tables of every page of a folder again. slow: also those that take a minute.

    Returns the pages that changed and one line for everything that could not be made and every piece of prose that does not
    agree with the runs, which nobody but its author can change.
    """
    results, changed, problems = Results(_runs(folder)), [], []
    for page in _pages(folder):
        text = page.read_text(encoding="utf-8")
        new = TABLE.sub(functools.partial(_made, page, results=results, slow=slow, problems=problems), text)
        if new != text:
            page.write_text(new, encoding="utf-8")
            changed.append(page)
        problems += _wrong_prose(page, new, results)
    return changed, problems


def check_pages(folder: Path, slow: bool = False) -> list[str]:
    """One line for each table and each checked piece of prose in the pages of a folder that does not agree with the runs:
    which page, which table, the first differing line. slow: also the tables that take a minute."""
    results, problems = Results(_runs(folder)), []
    for page in _pages(folder):
        text = page.read_text(encoding="utf-8")
        opened, whole = text.count("<!-- table:"), len(TABLE.findall(text))
        if opened != whole:
            problems.append(f"{page}: {opened} tables begin, {whole} of them end")
        for match in TABLE.finditer(text):
            new = _made(page, match, results, slow, problems)
            if new != match[0]:
                problems.append(_first_difference(page, match, new, text))
        problems += _wrong_prose(page, text, results)
    return problems


def count_pages_and_tables(folder: Path, slow: bool = False) -> tuple[int, int]:
    """How many pages, and how many tables in them, `check_pages` looks at."""
    tables = [
        match["call"].split()[0]
        for page in _pages(folder)
        for match in TABLE.finditer(page.read_text(encoding="utf-8"))
    ]
    return len(_pages(folder)), sum(slow or not TABLES[name].slow for name in tables)


def _runs(folder: Path) -> Path:
    return folder / "results" if (folder / "results").is_dir() else folder


def _pages(folder: Path) -> list[Path]:
    patterns = ("*.md", "docs/*.md", "results/*.md") if _runs(folder) != folder else ("*.md",)
    pages = [page for pattern in patterns for page in sorted(folder.glob(pattern))]
    if not pages:
        raise ConfigError(f"{folder} has no pages (*.md)")
    return pages


def _made(page: Path, match: re.Match, results: Results, slow: bool, problems: list[str]) -> str:
    """The table with its comments, made again; as it stands if it is slow, or can't be made, which is then a problem."""
    try:
        name, options = _call(match["call"])
        table = _named(TABLES, name)
        if table.slow and not slow:
            return match[0]
        comparable, tested = results.on_one_set(table.every_run(results, **options))
        rows = table(comparable, **options)
    except (ConfigError, TypeError, ValueError, OSError) as error:
        problems.append(f"{page}: table {_one_line(match['call'])}: {_one_line(error)}")
        return match[0]
    lines = tabulate(rows, headers="keys", tablefmt="github", disable_numparse=True, missingval="–")
    note = table.note_below(rows, tested)
    below = f"{note}\n\n" if note else ""
    return f"{match['first']}\n{lines}\n\n{below}{match['last']}"


def _first_difference(page: Path, match: re.Match, new: str, text: str) -> str:
    pairs = itertools.zip_longest(match[0].splitlines(), new.splitlines(), fillvalue="(nothing)")
    index, old, made = next((i, a, b) for i, (a, b) in enumerate(pairs) if a != b)
    line = text.count("\n", 0, match.start()) + index + 1
    return f"{page}:{line}: table {_one_line(match['call'])}: {old!r} should be {made!r}"


def _wrong_prose(page: Path, text: str, results: Results) -> list[str]:
    prose, problems = _one_line(COMMENT.sub("", text)), []
    for piece in CHECKED.findall(text):
        try:
            filled = _filled(piece, results)
        except (ConfigError, TypeError, ValueError) as error:
            problems.append(f"{page}: {_one_line(piece)}: {_one_line(error)}")
            continue
        if _one_line(filled) not in prose:
            problems.append(f"{page}: does not say {_one_line(filled)!r}")
    return problems


def _filled(piece: str, results: Results) -> str:
    """With the numbers filled in, which all are of accuracies on one set."""
    calls = [(_named(NUMBERS, name), options) for name, options in map(_call, NUMBER.findall(piece))]
    comparable, _ = results.on_one_set(run for number, options in calls for run in number.every_run(results, **options))
    found = iter([number(comparable, **options) for number, options in calls])
    return NUMBER.sub(lambda _: next(found), piece)


def _call(text: str) -> tuple[str, dict[str, str]]:
    """ "by_pairs runs=a,b" as a name and options; a value with spaces is in quotes."""
    name, *options = shlex.split(text)
    if wrong := [option for option in options if "=" not in option]:
        raise ValueError(f"{wrong[0]!r} is not an option: expected name=value")
    return name, dict(option.split("=", 1) for option in options)


def _named(known: dict[str, Any], name: str) -> Any:
    if name not in known:
        raise ConfigError(f"there is no {name!r}: there are {', '.join(known)}")
    return known[name]


def _one_line(text: Any) -> str:
    return " ".join(str(text).split())
