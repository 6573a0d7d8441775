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
    """rows: cells to be read, by column. raw: the same as plain numbers, for CSV; rows if None. note: stands below."""

    title: str
    rows: list[dict[str, str]]
    raw: list[dict[str, Any]] | None = None
    note: str = ""

    def text(self, style: str) -> str:
        """In one of tabulate's styles."""
        return tabulate(self.rows, headers="keys", tablefmt=style, disable_numparse=True, missingval="–")

    def write(self, stem: Path) -> list[Path]:
        """Writes stem.md, stem.csv and stem.tex."""
        note = f"\n\n{self.note}" if self.note else ""
        stem.with_suffix(".md").write_text(f"**{self.title}**\n\n{self.text('github')}{note}\n")
        raw = self.rows if self.raw is None else self.raw
        with stem.with_suffix(".csv").open("w", newline="") as file:
            writer = csv.DictWriter(file, list(dict.fromkeys(key for row in raw for key in row)))
            writer.writeheader()
            writer.writerows(raw)
        tex = self.text("latex_booktabs")
        for sign, command in LATEX.items():
            tex = tex.replace(sign, command)
        stem.with_suffix(".tex").write_text(f"% {self.title}\n{tex}\n")
        return [stem.with_suffix(suffix) for suffix in (".md", ".csv", ".tex")]
