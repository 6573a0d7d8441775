"""A table and its files."""

from __future__ import annotations

import csv
import dataclasses
from pathlib import Path
from typing import Any

from tabulate import tabulate

LATEX = {
    "±": r"$\pm$", "λ": r"$\lambda$", "≥": r"$\ge$", "–": "--", "×": r"$\times$", "−": "$-$", "→": r"$\to$",
    "≡": r"$\equiv$", "²": "$^2$",
}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Table:
    """title: what is shown; of: of which run, if of one. rows: cells to be read, by column. raw: the same as plain numbers, for
    CSV; rows if None. note: stands below."""

    title: str
    rows: list[dict[str, str]]
    raw: list[dict[str, Any]] | None = None
    note: str = ""
    of: str = ""

    @property
    def full_title(self) -> str:
        """Which run, and what is shown."""
        return f"{self.of}: {self.title}" if self.of else self.title

    def text(self, style: str) -> str:
        """In one of tabulate's styles. Cells are text, whatever they hold: no HTML, no line or column of Markdown."""
        rows = self.rows
        if style == "github":  # tabulate escapes in its other styles
            rows = [{markdown(name): markdown(cell) for name, cell in row.items()} for row in rows]
        return tabulate(rows, headers="keys", tablefmt=style, disable_numparse=True, missingval="–")

    def write(self, stem: Path) -> list[Path]:
        """Writes stem.md, stem.csv and stem.tex."""
        note = f"\n\n{markdown(self.note)}" if self.note else ""
        stem.with_suffix(".md").write_text(
            f"**{markdown(self.full_title)}**\n\n{self.text('github')}{note}\n", encoding="utf-8"
        )
        raw = self.rows if self.raw is None else self.raw
        with stem.with_suffix(".csv").open("w", encoding="utf-8", newline="") as file:
            writer = csv.DictWriter(file, list(dict.fromkeys(key for row in raw for key in row)))
            writer.writeheader()
            writer.writerows(raw)
        tex = self.text("latex_booktabs")
        for sign, command in LATEX.items():
            tex = tex.replace(sign, command)
        stem.with_suffix(".tex").write_text(f"% {' '.join(self.full_title.splitlines())}\n{tex}\n", encoding="utf-8")
        return [stem.with_suffix(suffix) for suffix in (".md", ".csv", ".tex")]


def markdown(text: str) -> str:
    """A text as one line of Markdown that shows it as it is, in a cell of a table too."""
    return " ".join(str(text).splitlines()).replace("&", "&amp;").replace("<", "&lt;").replace("|", "&#124;")
