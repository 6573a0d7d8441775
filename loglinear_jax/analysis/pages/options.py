"""Which functions a page may call, and how their options are read: by the types of their parameters.

A parameter of the type Runs, Labelled or Repetitions is text in the page, and names runs. All others stay text.
"""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from loglinear_jax.analysis.pages.results import Results
from loglinear_jax.config import ConfigError
from loglinear_jax.runs.loading import Run
from loglinear_jax.runs.outcome import VariantOutcome

Rows = list[dict[str, str]]
SOLVED = "≥ 99 %"  # in the heads of columns that count such seeds


class Runs(list[Run]):
    """The runs of comma-separated patterns. text: as the page has them."""

    def __init__(self, results: Results, text: str):
        super().__init__(results.matching(text))
        self.text = text

    def every_run(self) -> list[Run]:
        return list(self)


class Label(NamedTuple):
    """One of "label = runs:variant"; variant: what is after the colon, "" where there is none."""

    label: str
    runs: list[Run]
    variant: str


class Labelled(list[Label]):
    """Runs with labels, "label = runs:variant" separated by ';'."""

    def __init__(self, results: Results, text: str):
        super().__init__(Label(label, results.matching(runs), variant) for label, runs, variant in split_labels(text))

    def every_run(self) -> list[Run]:
        return [run for _, runs, _ in self for run in runs]


class Repetitions(list[list[Run]]):
    """Several times the runs of comma-separated patterns, separated by ';'. text: as the page has them."""

    def __init__(self, results: Results, text: str):
        super().__init__(results.matching(patterns) for patterns in text.split(";"))
        self.text = text

    def every_run(self) -> list[Run]:
        return [run for runs in self for run in runs]


def split_labels(text: str) -> Iterator[tuple[str, str, str]]:
    """(label, runs, variant or "") of each "label = runs:variant", separated by ';'."""
    for item in filter(None, (part.strip() for part in text.split(";"))):
        label, equals, rest = item.partition(" = ")
        runs, _, variant = rest.partition(":")
        if not equals or not runs.strip():
            raise ConfigError(f"rows: {item!r}: expected 'label = runs' or 'label = runs:variant'")
        yield label.strip(), runs.strip(), variant.strip()


@dataclasses.dataclass(frozen=True)
class PageFunction:
    """A function that a page may call with results and options as text."""

    function: Callable[..., Any]

    def __call__(self, results: Results, **options: str) -> Any:
        return self.function(**self._read(results, options))

    def every_run(self, results: Results, **options: str) -> list[Run]:
        """The runs that these options name."""
        read = self._read(results, options).values()
        return [run for value in read if isinstance(value, (Runs, Labelled, Repetitions)) for run in value.every_run()]

    def _read(self, results: Results, options: dict[str, str]) -> dict[str, Any]:
        types = typing.get_type_hints(self.function)
        read = (Runs, Labelled, Repetitions)
        return {n: types[n](results, text) if types.get(n) in read else text for n, text in options.items()}


@dataclasses.dataclass(frozen=True)
class PageTable(PageFunction):
    """slow: made only if asked for. of_accuracies: whether it shows those of summaries; counts_solved: whether its cells count
    seeds at 99 %, though no head of a column says so."""

    slow: bool = False
    of_accuracies: bool = True
    counts_solved: bool = False

    def note_below(self, rows: Rows, tested: VariantOutcome | None) -> str:
        """What stands below the table: which accuracies it shows. tested: as from `Results.on_one_set`."""
        if tested is None or not self.of_accuracies:
            return ""
        counts_solved = self.counts_solved or any(SOLVED in column for row in rows for column in row)
        return tested.solved_note if counts_solved else tested.shown_note


TABLES: dict[str, PageTable] = {}  # by their names in pages
NUMBERS: dict[str, PageFunction] = {}


def table(
    name: str | None = None, *, slow: bool = False, of_accuracies: bool = True, counts_solved: bool = False
) -> Callable[[Callable[..., Rows]], Callable[..., Rows]]:
    """Registers a table, under the function's own name if no other is given."""

    def register(function: Callable[..., Rows]) -> Callable[..., Rows]:
        TABLES[name or function.__name__] = PageTable(function, slow, of_accuracies, counts_solved)
        return function

    return register


def number(name: str | None = None) -> Callable[[Callable[..., str]], Callable[..., str]]:
    """Registers a number, under the function's own name if no other is given."""

    def register(function: Callable[..., str]) -> Callable[..., str]:
        NUMBERS[name or function.__name__] = PageFunction(function)
        return function

    return register
