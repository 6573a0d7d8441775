"""Tables and their files; how numbers are written in their cells, and which accuracies they show."""

from __future__ import annotations

import csv
import dataclasses
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any

import numpy as np
from tabulate import tabulate

from loglinear_jax.runs.outcome import VariantOutcome
from loglinear_jax.statistics import mean_interval
from loglinear_jax.tasks import ACCURACY, SOLVED_ACCURACY

Values = Sequence[float] | np.ndarray
LATEX = {
    "±": r"$\pm$", "λ": r"$\lambda$", "≥": r"$\ge$", "–": "--", "×": r"$\times$", "−": "$-$", "→": r"$\to$",
    "≡": r"$\equiv$", "²": "$^2$",
}  # fmt: skip


class Cell(str):
    """A cell as it is read, and the numbers behind it by their names in the CSV: Cell("71.2 ± 3.0", mean=71.2, std=3.0)."""

    numbers: Mapping[str, Any]

    def __new__(cls, text: Any, **numbers: Any):
        cell = super().__new__(cls, text)
        cell.numbers = numbers
        return cell


@dataclasses.dataclass(frozen=True)
class Table:
    """A table to be shown and written.

    title: what is shown; of: of which run, if of one. rows: cells by column. long: rows of the CSV, where these are not
    the numbers of the cells. note: below the table.
    """

    title: str
    rows: list[dict[str, str]]
    note: str = ""
    of: str = ""
    long: list[dict[str, Any]] | None = None

    @property
    def full_title(self) -> str:
        """The title, with the run."""
        return f"{self.of}: {self.title}" if self.of else self.title

    @property
    def raw(self) -> list[dict[str, Any]]:
        """The rows of the CSV: each row's cells, or the numbers behind them, with the column where several have one name."""
        if self.long is not None:
            return self.long
        found = []
        for row in self.rows:
            cells = [(c, *item) for c, cell in row.items() for item in getattr(cell, "numbers", {c: cell}).items()]
            times = Counter(name for _, name, _ in cells)
            found.append({(name if times[name] == 1 else f"{column}: {name}"): x for column, name, x in cells})
        return found

    def text(self, style: str) -> str:
        """Formats the table in one of tabulate's styles. Cells are text, whatever they hold: no HTML, no column of Markdown."""
        rows = self.rows
        if style == "github":  # tabulate escapes in its other styles
            rows = [{markdown(name): markdown(cell) for name, cell in row.items()} for row in rows]
        return tabulate(rows, headers="keys", tablefmt=style, disable_numparse=True, missingval="–")

    def write(self, stem: Path) -> list[Path]:
        """Writes stem.md, stem.csv and stem.tex; returns their paths."""
        note = f"\n\n{markdown(self.note)}" if self.note else ""
        text = f"**{markdown(self.full_title)}**\n\n{self.text('github')}{note}\n"
        stem.with_suffix(".md").write_text(text, encoding="utf-8")
        with stem.with_suffix(".csv").open("w", encoding="utf-8", newline="") as file:
            write_csv(file, self.raw)
        tex = self.text("latex_booktabs")
        for sign, command in LATEX.items():
            tex = tex.replace(sign, command)
        stem.with_suffix(".tex").write_text(f"% {' '.join(self.full_title.splitlines())}\n{tex}\n", encoding="utf-8")
        return [stem.with_suffix(suffix) for suffix in (".md", ".csv", ".tex")]


def write_csv(file: IO[str], rows: Sequence[Mapping[str, Any]]) -> None:
    """Writes rows, with the columns that any of them has."""
    writer = csv.DictWriter(file, list(dict.fromkeys(key for row in rows for key in row)), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)


def markdown(text: str) -> str:
    """Escapes a text as one line of Markdown that shows it as it is, in a cell of a table too."""
    return " ".join(str(text).splitlines()).replace("&", "&amp;").replace("<", "&lt;").replace("|", "&#124;")


def natural(text: str) -> list[Any]:
    """Returns a key that sorts kv4 before kv16."""
    return [int(part) if part.isdecimal() else part for part in re.split(r"(\d+)", text)]


def finite(values: Sequence[float | None] | np.ndarray | None) -> np.ndarray:
    """Returns the values that are there: without None, nan and infinity."""
    found = np.array([] if values is None else values, np.float64)
    return found[np.isfinite(found)]


def mean_and_std(values: Values, digits: int = 1) -> str:
    """Formats mean and standard deviation over seeds: "84.7 ± 30.1"; one seed has no "±", none is "–"."""
    if not len(values):
        return "–"
    spread = f" ± {np.std(values, ddof=1):.{digits}f}" if len(values) > 1 else ""
    return f"{np.mean(values):.{digits}f}{spread}"


def mean_std_and_reached(values: Values, least: float) -> str:
    """Formats mean, standard deviation, and how many are at least `least`: "84.7 ± 30.1 (49/64)"."""
    return f"{mean_and_std(values)} ({sum(value >= least for value in values)}/{len(values)})"


def perplexity(losses: Sequence[float | None] | np.ndarray | None) -> str:
    """Formats the perplexity of losses in nats, of the seeds that have a finite one: "76.30 ± 0.89"."""
    with np.errstate(over="ignore"):
        return mean_and_std(finite(np.exp(finite(losses))), 2)


def of_evaluated(outcome: VariantOutcome, values: Sequence[float | None] | None) -> np.ndarray:
    """Returns the test values of seeds with a finite evaluation in validation: others were never trained."""
    if values is None:
        return np.zeros(0)
    return finite([value for value, best in zip(values, outcome.best, strict=True) if np.isfinite(best)])


def num_finite(values: Values) -> Cell:
    """Formats how many seeds there are: "3"; "2 of 3" if one has no finite value, and is left out of means."""
    found = len(finite(values))
    return Cell(found if found == len(values) else f"{found} of {len(values)}", num_seeds=len(values))


def num_seeds(outcome: VariantOutcome) -> Cell:
    """Formats how many seeds an outcome has: "3"; "2 of 3; 1 diverged" if one diverged before its first evaluation."""
    lacking = ~np.isfinite(outcome.shown)
    diverged = sum(step is not None for step, lacks in zip(outcome.diverged_step, lacking, strict=True) if lacks)
    found = num_finite(outcome.shown)
    return Cell(found + (f"; {diverged} diverged" if diverged else ""), **found.numbers)


def with_interval(mean: float, low: float, high: float, digits: int = 1, sign: str = "", name: str = "mean") -> Cell:
    """Formats a mean with its interval: "71.2 [66.0, 75.9]"; without one where it is nan. sign: "+" for differences."""
    form = f"{sign}.{digits}f"
    interval = f" [{low:{form}}, {high:{form}}]" if np.isfinite(low) else ""
    return Cell(f"{mean:{form}}{interval}" if np.isfinite(mean) else "–", **{name: mean, "low": low, "high": high})


def mean_with_interval(values: Values) -> Cell:
    """Formats the mean of values with its bootstrap interval of 95 %."""
    return with_interval(*mean_interval(values))


def percent(share: float, digits: int = 0) -> str:
    """Formats a share: "73 %"; 100 % only for all of them, 0 % only for none."""
    if share in (0, 1):
        return f"{100 * share:.0f} %"
    least = 10.0**-digits
    return f"{min(max(100 * share, least), 100 - least):.{digits}f} %"


def short_p(p_value: float, digits: int = 1) -> str:
    """Formats a p-value: "0.0005", "8e-7"; "–" for nan."""
    return f"{p_value:.{digits}g}".replace("e-0", "e-") if np.isfinite(p_value) else "–"


def _wilson(outcome: VariantOutcome) -> str:
    return "[{:.2f}, {:.2f}]".format(*outcome.share_converged_interval)


def share_converged(outcome: VariantOutcome) -> Cell:
    """Formats the share of seeds at 90 %, with Wilson's interval: "0.77 [0.65, 0.85]"."""
    low, high = outcome.share_converged_interval
    numbers = {"share_converged": outcome.share_converged, "share_low": low, "share_high": high}
    return Cell(f"{outcome.share_converged:.2f} {_wilson(outcome)}", **numbers)


def num_and_share_converged(outcome: VariantOutcome) -> Cell:
    """Formats how many seeds reach 90 %: "49/64 = 0.77 [0.65, 0.85]"."""
    share = share_converged(outcome)
    return Cell(f"{outcome.num_converged}/{len(outcome.seeds)} = {share}", **share.numbers)


def converged_and_solved(outcome: VariantOutcome) -> str:
    """Formats how many seeds reach 90 %, with the interval of their share, and 99 %: "49/64 [0.65, 0.85], 38/64"."""
    return f"{outcome.num_converged}/{len(outcome.seeds)} {_wilson(outcome)}, {outcome.num_solved}/{len(outcome.seeds)}"


def median_step(outcome: VariantOutcome, separator: str = "") -> str:
    """Formats the median step at which seeds reach 99 %, for behind their number: "; 1200"; nothing if none does."""
    return "" if outcome.median_solved_step is None else f"; {outcome.median_solved_step:{separator}.0f}"


def solved_and_step(outcome: VariantOutcome, separator: str = "") -> str:
    """Formats how many seeds reach 99 %, and the median step at which they do: "38/64; 1200"."""
    return f"{outcome.num_solved}/{len(outcome.seeds)}{median_step(outcome, separator)}"


def accuracy_note(outcome: VariantOutcome, counts_solved: bool = False) -> str:
    """Says which accuracies, or perplexities, a table shows. counts_solved: whether it also counts seeds at 99 %."""
    if outcome.score is not ACCURACY or outcome.test_accuracy is None:
        return f"{outcome.score.name.capitalize()}: each seed's best in validation."
    note = "Accuracy: on each seed's test set, with the parameters chosen in validation."
    return note + f" Seeds at ≥ {100 * SOLVED_ACCURACY:.0f} %, and their steps: in validation." * counts_solved


def median_of(steps: Sequence[int | None]) -> str:
    """Formats the median of the steps that there are; "–" without any."""
    there = [step for step in steps if step is not None]
    return f"{np.median(there):.0f}" if there else "–"
