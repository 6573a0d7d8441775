"""The report as files: figures and tables, and report.html, which holds them all and needs nothing else."""

from __future__ import annotations

import base64
import dataclasses
import re
from pathlib import Path

from matplotlib.figure import Figure

from loglinear_jax.analysis.style import save
from loglinear_jax.analysis.table import Table
from loglinear_jax.runs.writing import replace_file


@dataclasses.dataclass(frozen=True)
class Item:
    """A figure or a table, as the report shows it. folded: shown only when opened."""

    title: str
    image: Path | None = None
    html: str = ""
    note: str = ""
    files: tuple[str, ...] = ()
    folded: bool = False


@dataclasses.dataclass
class Part:
    """A heading of the report with its items. notes: lines below the heading, such as why something is not drawn."""

    title: str
    intro: str = ""
    items: list[Item] = dataclasses.field(default_factory=list)
    notes: list[str] = dataclasses.field(default_factory=list)

    @property
    def anchor(self) -> str:
        return slug(self.title)


class Report:
    """Parts in order, written into one folder. problems: what had to be left out, and why."""

    def __init__(self, out: Path):
        self.out = out
        self.parts: list[Part] = []
        self.problems: list[str] = []
        self._stems: set[str] = set()
        out.mkdir(parents=True, exist_ok=True)

    def part(self, title: str, intro: str = "") -> Part:
        """The part of that title, begun if there is none yet. One without items and notes is not shown."""
        found = next((part for part in self.parts if part.title == title), None)
        if found is None:
            self.parts.append(found := Part(title, intro))
        return found

    def add(
        self, part: Part, shown: Figure | Table, stem: str, title: str = "", note: str = "", folded: bool = False
    ) -> None:
        """Writes a figure as stem.png and stem.svg, or a table as stem.md, stem.csv and stem.tex. title: in the report; a table
        has one of its own."""
        if stem in self._stems:
            raise ValueError(f"two figures or tables are called {stem}")
        self._stems.add(stem)
        if isinstance(shown, Table):
            paths, image, html = shown.write(self.out / stem), None, shown.text("html")
            title, note = title or shown.full_title, note or shown.note
        else:
            paths, html = save(shown, self.out / stem), ""
            image = paths[0]
        part.items.append(Item(title, image, html, note, tuple(path.name for path in paths), folded))

    def write(self, title: str, runs: Table, settings: list[Table], commands: list[str]) -> Path:
        """Writes report.html, with pictures inside. Raises CannotWrite."""
        import jinja2  # of the extra analysis, which training does not need

        loader = jinja2.PackageLoader("loglinear_jax.analysis", "")
        environment = jinja2.Environment(loader=loader, autoescape=True, trim_blocks=True, lstrip_blocks=True)
        environment.filters["as_data"] = _as_data
        environment.filters["as_html"] = lambda table: table.text("html")
        parts = [part for part in self.parts if part.items or part.notes]
        html = environment.get_template("report.html.jinja").render(
            title=title, runs=runs, settings=settings, commands=commands, problems=self.problems, parts=parts
        )
        path = self.out / "report.html"
        replace_file(path, lambda file: file.write(html))
        return path


def slug(text: str) -> str:
    """A name for files and anchors."""
    return re.sub(r"[^a-z0-9]+", "-", text.lower().replace("λ", "lam")).strip("-")


def _as_data(path: Path) -> str:
    return "data:image/png;base64," + base64.b64encode(path.read_bytes()).decode()
