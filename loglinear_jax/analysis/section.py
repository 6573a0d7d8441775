"""What a question of the report is made from: its choices, the runs, and the report that shows the answer, one HTML file
that holds all figures and tables and needs nothing else."""

from __future__ import annotations

import base64
import contextlib
import dataclasses
import itertools
import logging
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np
from matplotlib.figure import Figure

from loglinear_jax.analysis.lam_values import mixer_values
from loglinear_jax.analysis.paper import describe_run
from loglinear_jax.analysis.style import save, sentence
from loglinear_jax.analysis.table import Table
from loglinear_jax.progress import progress_bar
from loglinear_jax.runs.folders import finished_outcomes
from loglinear_jax.runs.loading import Run, TrainedVariant
from loglinear_jax.runs.outcome import on_one_set
from loglinear_jax.runs.writing import NoReadableCheckpoint, replace_file
from loglinear_jax.settings import SettingError, check_fields, setting

log = logging.getLogger(__name__)
MOST_UNFOLDED = 12  # rows of a table: above them it is shown only when opened
FEW_SEEDS = 3  # drawn of each variant, if no others are asked for
MOST_KEPT = 1 << 30  # bytes of layers' values
MOST_OF_STEM = 240  # characters of the names of a report's files, without their endings
BySeed = Mapping[int, Mapping[str, np.ndarray]]  # what was measured, by its name


@dataclasses.dataclass(frozen=True)
class Choices:
    """What to show; the fields are the flags of `loglinear_jax analyze`. Raises SettingError for a number that can't be."""

    sections: Sequence[str] | None = setting(None, "sections of the report, or import paths of your own (default: all)")
    seeds: Sequence[int] | None = setting(None, "seeds whose λ is drawn (default: the first three)")
    max_seeds: int | None = setting(None, "seeds per variant to average over, at most (default: all)", least=1)
    layer: int = setting(-1, "layer whose λ and attention rows are drawn; -1 is the last")
    head: int = setting(0, "head whose λ and attention rows are drawn")
    example: int = setting(0, "number of the sequence that is drawn, from 0", least=0)
    positions: Sequence[int] | None = setting(None, "positions of attention rows (default: three scored ones)")
    sequences: int = setting(64, "number of sequences over which λ is averaged", least=1)
    longest: int | None = setting(
        None, "longest sequence in length generalisation (default: the run's model.max_length)", least=1
    )
    evaluated: int = setting(256, "number of sequences of each length in length generalisation", least=1)
    which: Literal["best", "last"] = setting(
        "best", "parameters of each seed: at its best evaluation, or at the end", choices=("best", "last")
    )

    def __post_init__(self):
        check_fields(self, "analyze")
        if self.example >= self.sequences:
            most = self.sequences
            raise SettingError(f"example={self.example}: expected 0 to {most - 1}, as there are {most}")


def slug(text: str) -> str:
    """A name for files and anchors."""
    return re.sub(r"[^a-z0-9]+", "-", text.lower().replace("λ", "lam")).strip("-")


@dataclasses.dataclass
class Part:
    """A heading of the report with its figures and tables, as the template shows them."""

    title: str
    intro: str = ""
    items: list[dict[str, Any]] = dataclasses.field(default_factory=list)

    @property
    def anchor(self) -> str:
        return slug(self.title)


class Report:
    """A report of parts in order, written into one folder. problems: what had to be left out, and why."""

    def __init__(self, out: Path):
        self.out = out
        self.parts: dict[str, Part] = {}
        self.problems: list[str] = []
        self._stems: set[str] = set()
        out.mkdir(parents=True, exist_ok=True)

    def part(self, title: str, intro: str = "") -> Part:
        """Returns the part of that title, begun if there is none yet. One without items is not shown."""
        return self.parts.setdefault(title, Part(title, intro))

    def add(self, part: Part, shown: Figure | Table, stem: str, title: str = "", note: str = "") -> None:
        """Write a figure as stem.png and stem.svg, or a table as stem.md, stem.csv and stem.tex, and show it.

        Args:
            part: where it is shown; a table with more than MOST_UNFOLDED rows is folded.
            shown: the figure or table.
            stem: of its files; it is cut where it is too long, and gets a number where others have it.
            title: in the report; a table has one of its own.
            note: below it; a table has one of its own.
        """
        stem = stem[:MOST_OF_STEM]
        numbered = itertools.chain([stem], (f"{stem}-{number}" for number in itertools.count(2)))
        stem = next(name for name in numbered if name not in self._stems)
        self._stems.add(stem)
        item = {"title": title, "note": note, "folded": isinstance(shown, Table) and len(shown.rows) > MOST_UNFOLDED}
        if isinstance(shown, Table):
            paths = shown.write(self.out / stem)
            item |= {"html": shown.text("html"), "title": title or shown.full_title, "note": note or shown.note}
        else:
            paths = save(shown, self.out / stem)
            item["image"] = "data:image/png;base64," + base64.b64encode(paths[0].read_bytes()).decode()
            item["width"] = round(96 * shown.get_figwidth())  # CSS pixels an inch
        part.items.append(item | {"files": [path.name for path in paths]})

    def write(self, title: str, runs: Table, settings: list[Table], commands: list[str]) -> Path:
        """Writes report.html, with pictures inside. Raises CannotWrite."""
        import jinja2  # of the extra analysis, which training does not need

        loader = jinja2.PackageLoader("loglinear_jax.analysis", "")
        environment = jinja2.Environment(loader=loader, autoescape=True, trim_blocks=True, lstrip_blocks=True)
        environment.filters["as_html"] = lambda table: table.text("html")
        parts = [part for part in self.parts.values() if part.items]
        html = environment.get_template("report.html.jinja").render(
            title=title, runs=runs, settings=settings, commands=commands, problems=self.problems, parts=parts
        )
        path = self.out / "report.html"
        replace_file(path, lambda file: file.write(html))
        return path


class Section:
    """A section of the report: one question. A subclass overrides the methods that it needs; a call that raises is left out,
    and named.

    NAME: of the section on the command line, which several classes may share. TITLE, INTRO: of its part of the report.
    READS_CHECKPOINTS: whether it is given the trained variants.
    """

    NAME: ClassVar[str] = ""
    TITLE: ClassVar[str]
    INTRO: ClassVar[str] = ""
    READS_CHECKPOINTS: ClassVar[bool] = False

    def __init__(self, context: Context):
        """Begins the part of the report that it fills, so that parts come in the order of the sections."""
        self.context = context
        self.part = context.report.part(self.TITLE, self.INTRO)

    def __str__(self) -> str:
        return self.NAME or type(self).__name__

    def find(self, run: Run, trained: TrainedVariant) -> Any:
        """Returns what is found of a variant with a checkpoint, None for nothing; it should not keep `trained`."""

    def show_run(self, run: Run, found: dict[str, Any]) -> None:
        """Shows a run, after its last variant. found: by variant, what was found; not called where that is nothing."""

    def show_all(self) -> None:
        """After the last run."""

    def add(self, shown: Figure | Table | None, name: str, run: Run | None = None, title: str = "", **how: Any) -> None:
        """Adds a figure or a table, of one run or of all, to the report; nothing for None. name: of its files."""
        if shown is None:
            return
        if run is not None:
            name = f"{name}-{self.context.names[run.workdir]}"
            what = title or shown.title
            title = f"{describe_run(run)}: {what}" if len(self.context.runs) > 1 else sentence(what)
        self.context.report.add(self.part, shown, name, title, **how)


@dataclasses.dataclass
class Context:
    """What every section is made from: the runs, what to show of them, and the report."""

    runs: list[Run]
    report: Report
    choices: Choices

    def __post_init__(self):
        names = [slug(run.name) or "run" for run in self.runs]
        numbers = [names[:index].count(name) for index, name in enumerate(names)]
        of_runs = zip(self.runs, names, numbers, strict=True)
        # Of each run's files: its folder's, with a number where two are the same.
        self.names = {run.workdir: name + (f"-{number + 1}" if number else "") for run, name, number in of_runs}
        self._kept: dict[tuple, dict[int, dict[str, np.ndarray]]] = {}

    @contextlib.contextmanager
    def attempt(self, where: Any, what: str) -> Iterator[None]:
        """Records what goes wrong inside as a line of the report, and goes on: nothing already computed is lost.

        The line of an error that is not about the run or the choices begins with the error's type, and its traceback is
        logged.
        """
        try:
            yield
        except Exception as error:
            text = " ".join(str(error).split()) or type(error).__name__
            if not isinstance(error, (OSError, ValueError, NoReadableCheckpoint)):
                log.exception("%s: %s", where, what)
                text = f"{type(error).__name__}: {text}"
            self.report.problems.append(f"{where}: {what}: {text}"[:500])

    def drawn_seeds(self, trained: TrainedVariant) -> list[int]:
        """Returns the seeds to draw. Raises ValueError if the run has none of those that were asked for."""
        if self.choices.seeds is None:
            return trained.seeds[:FEW_SEEDS]
        chosen = [seed for seed in self.choices.seeds if seed in trained.seeds]
        if not chosen:
            raise ValueError(f"seeds={self.choices.seeds}: this run has {trained.seeds[0]} to {trained.seeds[-1]}")
        return chosen

    def averaged_seeds(self, trained: TrainedVariant) -> list[int]:
        """Returns the seeds for what is averaged: those with a finite evaluation, as the others' best parameters were never
        trained.

        Raises ValueError if there is none.
        """
        shown = self.shown(trained)
        any_will_do = self.choices.which == "last"
        seeds = [seed for seed in trained.seeds[: self.choices.max_seeds] if any_will_do or np.isfinite(shown[seed])]
        if not seeds:
            raise ValueError(f"no seed has a finite validation {trained.task.score.name}: there is nothing to average")
        return seeds

    def best_seed(self, trained: TrainedVariant) -> int:
        """Returns the best of the seeds to draw, in validation."""
        shown, sign = self.shown(trained), 1 if trained.task.score.higher_is_better else -1
        return max(self.drawn_seeds(trained), key=lambda seed: np.nan_to_num(sign * shown[seed], nan=-np.inf))

    def describe_seed(self, trained: TrainedVariant, seed: int) -> str:
        """Describes a seed: "seed 3, validation accuracy 97.1 %"."""
        step, score = trained.diverged_step[trained.seeds.index(seed)], trained.task.score
        value = float(self.shown(trained)[seed])
        shown = f"validation {score.name} {score.text(value)}" if np.isfinite(value) else f"no validation {score.name}"
        last = " at the last step" if self.choices.which == "last" else ""
        return f"seed {seed}, {shown}{last}" + (f", diverged at step {step}" if step >= 0 else "")

    def shown(self, trained: TrainedVariant) -> dict[int, float]:
        """Returns the score in validation, by seed, with the parameters that are shown; not finite where there is none."""
        accuracy, loss = trained.scores(self.choices.which)
        with np.errstate(over="ignore"):
            return dict(zip(trained.seeds, trained.task.score.of(loss, accuracy), strict=True))

    def accuracy(self, run: Run, trained: TrainedVariant) -> tuple[dict[int, float], str]:
        """Returns each seed's accuracy, as a share of 1, with the parameters that are shown, and what it is: "test
        accuracy" if every variant of the run has one, as in the run's tables.
        """
        if self.choices.which == "best" and len(finished_outcomes(run.outcomes, run.config)) == len(run.variants):
            outcome = on_one_set(run.outcomes)[trained.variant]
            if outcome.test_accuracy is not None:
                return dict(zip(outcome.seeds, outcome.accuracy, strict=True)), "test accuracy"
        accuracy, _ = trained.scores(self.choices.which)
        return dict(zip(trained.seeds, accuracy, strict=True)), f"{self.choices.which} validation accuracy"

    def layer_and_head(self, trained: TrainedVariant, layers: list[int]) -> tuple[int, int]:
        """Returns the layer and head that were asked for, from 0; a negative layer counts from the end of `layers`.

        Raises ValueError if there is no such layer or head.
        """
        layer, head, heads = self.choices.layer, self.choices.head, trained.model.settings.heads
        if layer not in (*layers, *range(-len(layers), 0)):
            raise ValueError(f"layer={layer}: expected one of {layers}, or -{len(layers)} to -1")
        if not -heads <= head < heads:
            raise ValueError(f"head={head}: expected -{heads} to {heads - 1}")
        return layer if layer >= 0 else layers[layer], head % heads

    def sequences(self, trained: TrainedVariant) -> tuple[np.ndarray, np.ndarray]:
        """Returns (tokens, targets) [sequences, T]. Raises ValueError if the example to draw is not among them."""
        tokens, targets = trained.inspection_sequences(self.choices.sequences)
        if self.choices.example >= len(tokens):
            raise ValueError(f"example={self.choices.example}: there are {len(tokens)} sequences")
        return tokens, targets

    def mixer_values(self, trained: TrainedVariant, seed: int) -> dict[int, dict[str, np.ndarray]]:
        """Returns `mixer_values` of all sequences, kept for as many seeds of the current variant as fit in MOST_KEPT bytes,
        as several sections use them.
        """
        key = (trained.workdir, trained.variant, seed)
        if key not in self._kept:
            values = mixer_values(trained, seed, self.sequences(trained)[0], self.choices.which)
            kept = {k: v for k, v in self._kept.items() if k[:2] == key[:2]} | {key: values}
            arrays = [array for layers in kept.values() for layer in layers.values() for array in layer.values()]
            if sum(array.nbytes for array in arrays) > MOST_KEPT:
                return values
            self._kept = kept
        return self._kept[key]

    def over_seeds(
        self, trained: TrainedVariant, what: str, seeds: list[int], compute: Callable[[int], dict[str, np.ndarray]]
    ) -> dict[int, dict[str, np.ndarray]]:
        """Returns compute(seed) for these seeds, under a progress bar."""
        with progress_bar(f"{trained.workdir.name} {trained.variant}: {what}", len(seeds), unit="seed") as bar:
            found = {}
            for seed in seeds:
                found[seed] = compute(seed)
                bar.update()
        return found
