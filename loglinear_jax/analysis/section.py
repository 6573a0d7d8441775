"""What a question of the report is made from: its choices, the runs, values computed before, and where to show the answer."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np
from jaxtyping import Float
from matplotlib.figure import Figure

from loglinear_jax.analysis.cache import Cache
from loglinear_jax.analysis.experiments import describe_run
from loglinear_jax.analysis.html import Part, Report, slug
from loglinear_jax.analysis.lam_values import check_index, mixer_values
from loglinear_jax.analysis.style import sentence
from loglinear_jax.analysis.table import Table
from loglinear_jax.progress import progress_bar
from loglinear_jax.runs.errors import NoReadableCheckpoint
from loglinear_jax.runs.loading import Run, TrainedVariant
from loglinear_jax.runs.outcome import on_one_set

log = logging.getLogger(__name__)
FEW_SEEDS = 3  # drawn of each variant, if no others are asked for
MOST_KEPT = 1 << 30  # bytes of layers' values


@dataclasses.dataclass(frozen=True)
class Choices:
    """What to show; the fields are the command line's flags.

    sections: their names, or import paths such as my_module:MySection; None: all that are shown by default. seeds: those
    whose λ is drawn, the first few of a run if None. max_seeds: of each variant, for what is averaged over seeds; None: all.
    layer, head: whose λ and attention rows are drawn. example: which of the drawn sequences. positions: tokens whose attention
    rows are drawn, three scored ones if None. sequences: over which λ is averaged. longest: length in length generalisation, a
    run's model.max_length if None. evaluated: sequences of each length there. which: parameters at each seed's best evaluation,
    or at the end.

    Raises ValueError for a number that can't be.
    """

    sections: tuple[str, ...] | None = None
    seeds: list[int] | None = None
    max_seeds: int | None = None
    layer: int = -1
    head: int = 0
    example: int = 0
    positions: list[int] | None = None
    sequences: int = 64
    longest: int | None = None
    evaluated: int = 256
    which: Literal["best", "last"] = "best"

    def __post_init__(self):
        for name in ("sequences", "evaluated", "max_seeds", "longest"):
            if getattr(self, name) is not None and getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if not 0 <= self.example < self.sequences:
            raise ValueError(
                f"example={self.example}: expected 0 to {self.sequences - 1}, as there are {self.sequences}"
            )


class Section:
    """A section of the report: one question. A subclass overrides the methods that it needs; a call that raises is left out,
    and named.

    NAME: of the section on the command line, which several classes may share. TITLE, INTRO: of its part of the report.
    READS_CHECKPOINTS: whether it is given the trained variants. BY_DEFAULT: whether it is there if nobody asks for it.
    """

    NAME: ClassVar[str] = ""
    TITLE: ClassVar[str]
    INTRO: ClassVar[str] = ""
    READS_CHECKPOINTS: ClassVar[bool] = False
    BY_DEFAULT: ClassVar[bool] = True

    def __init__(self, context: Context):
        """Begins the part of the report that it fills, so that parts come in the order of the sections."""
        self.context = context
        self.part = context.report.part(self.TITLE, self.INTRO)

    def __str__(self) -> str:
        return self.NAME or type(self).__name__

    def find(self, run: Run, trained: TrainedVariant) -> Any:
        """What is found of each variant with a checkpoint, None for nothing; `trained` should not be kept in it."""

    def show_run(self, run: Run, found: dict[str, Any]) -> None:
        """Shows a run, after its last variant. found: by variant, what was found; not called where that is nothing."""

    def show_all(self) -> None:
        """After the last run."""

    def add(
        self,
        shown: Figure | Table | None,
        name: str,
        run: Run | None = None,
        title: str = "",
        part: Part | None = None,
        **how: Any,
    ) -> None:
        """Adds a figure or a table to the report, of one run or of all; nothing for None. name: of its files. part: the
        section's own if None. how: see `Report.add`."""
        if shown is None:
            return
        if run is not None:
            name = self.context.stem(run, name)
            title = self.context.titled(run, title or shown.title)
        self.context.report.add(part or self.part, shown, name, title, **how)


@dataclasses.dataclass
class Context:
    """What every section is made from: the runs, what to show of them, where to write it, and values computed before."""

    runs: list[Run]
    report: Report
    choices: Choices
    cache: Cache

    def __post_init__(self):
        self._names = _distinct_names(self.runs)
        self._kept: dict[tuple, list[dict[str, np.ndarray]]] = {}

    @contextlib.contextmanager
    def attempt(self, where: Any, what: str) -> Iterator[None]:
        """Records what goes wrong inside as a line of the report, and its traceback in the log, and goes on: nothing already
        computed is lost. The line of an error that is not about the run or the choices begins with the error's type."""
        try:
            yield
        except Exception as error:
            text = " ".join(str(error).split()) or type(error).__name__
            known = isinstance(error, (OSError, ValueError, NoReadableCheckpoint))
            log.log(logging.WARNING if known else logging.ERROR, "%s: %s", where, what, exc_info=True)
            if not known:
                text = f"{type(error).__name__}: {text}"
            self.report.problems.append(f"{where}: {what}: {text}"[:500])

    def stem(self, run: Run, what: str) -> str:
        """The name of a run's file."""
        return f"{what}-{self._names[run.workdir]}"

    def titled(self, run: Run, what: str) -> str:
        """A title in the report: which run, if there are several, and what is shown."""
        return f"{describe_run(run)}: {what}" if len(self.runs) > 1 else sentence(what)

    def drawn_seeds(self, trained: TrainedVariant) -> list[int]:
        """Seeds to draw. Raises ValueError if the run has none of those that were asked for."""
        if self.choices.seeds is None:
            return trained.seeds[:FEW_SEEDS]
        chosen = [seed for seed in self.choices.seeds if seed in trained.seeds]
        if not chosen:
            raise ValueError(f"seeds={self.choices.seeds}: this run has {trained.seeds[0]} to {trained.seeds[-1]}")
        return chosen

    def averaged_seeds(self, trained: TrainedVariant) -> list[int]:
        """Seeds for what is averaged over seeds: those with a finite evaluation, where its parameters are shown, as the others'
        were never trained. Raises ValueError if there is none."""
        seeds = trained.seeds[: self.choices.max_seeds]
        if self.choices.which == "best":
            best = self.shown(trained)
            seeds = [seed for seed in seeds if np.isfinite(best[seed])]
        if not seeds:
            raise ValueError(f"no seed has a finite validation {trained.task.score.name}: there is nothing to average")
        return seeds

    def best_seed(self, trained: TrainedVariant) -> int:
        """The best of the seeds to draw, in validation."""
        shown, higher = self.shown(trained), trained.task.score.higher_is_better
        worst = -np.inf if higher else np.inf
        key = lambda seed: np.nan_to_num(shown[seed], nan=worst)  # noqa: E731
        return (max if higher else min)(self.drawn_seeds(trained), key=key)

    def describe_seed(self, trained: TrainedVariant, seed: int) -> str:
        """ "seed 3, validation accuracy 97.1 %"; without a finite one "seed 3, no validation perplexity"."""
        index, score = trained.seeds.index(seed), trained.task.score
        value = float(self.shown(trained)[seed])
        shown = f"validation {score.name} {score.text(value)}" if np.isfinite(value) else f"no validation {score.name}"
        diverged = f", diverged at step {trained.diverged_step[index]}" if trained.diverged_step[index] >= 0 else ""
        last = " at the last step" if self.choices.which == "last" else ""
        return f"seed {seed}, {shown}{last}{diverged}"

    def shown(self, trained: TrainedVariant) -> dict[int, float]:
        """By seed, the score in validation with the parameters that are shown; not finite where there is none."""
        accuracy, loss = trained.scores(self.choices.which)
        with np.errstate(over="ignore"):
            return dict(zip(trained.seeds, trained.task.score.of(loss, accuracy), strict=True))

    def accuracy(self, run: Run, trained: TrainedVariant) -> tuple[dict[int, float], str]:
        """Each seed's accuracy, as a share of 1, of the parameters that are shown; and what it is: "test accuracy" if every
        variant of the run has one, as in the run's tables."""
        if self.choices.which == "last":
            return dict(zip(trained.seeds, trained.scores("last")[0], strict=True)), "last validation accuracy"
        if set(run.variants) <= set(run.outcomes):
            outcome = on_one_set(run.outcomes)[trained.variant]
            if outcome.test_accuracy is not None:
                return dict(zip(outcome.seeds, outcome.accuracy, strict=True)), "test accuracy"
        return dict(zip(trained.seeds, trained.scores()[0], strict=True)), "best validation accuracy"

    def layer_and_head(self, trained: TrainedVariant) -> tuple[int, int]:
        """From 0. Raises ValueError if the model has no such layer or head."""
        settings, choices = trained.model.settings, self.choices
        check_index("layer", choices.layer, settings.layers)
        check_index("head", choices.head, settings.heads)
        return choices.layer % settings.layers, choices.head % settings.heads

    def sequences(self, trained: TrainedVariant) -> tuple[np.ndarray, np.ndarray]:
        """(tokens, targets) [sequences, T] of the task. Raises ValueError if the example to draw is not among them."""
        tokens, targets = trained.inspection_sequences(self.choices.sequences)
        if self.choices.example >= len(tokens):
            raise ValueError(f"example={self.choices.example}: there are {len(tokens)} sequences")
        return tokens, targets

    def mixer_values(self, trained: TrainedVariant, seed: int) -> list[dict[str, np.ndarray]]:
        """`mixer_values` of all sequences; kept for as many seeds of the current variant as fit in MOST_KEPT bytes, as several
        sections look at them."""
        key = (trained.checkpoint, trained.variant, seed)
        if key not in self._kept:
            values = mixer_values(trained, seed, self.sequences(trained)[0], self.choices.which)
            self._kept = {k: v for k, v in self._kept.items() if k[:2] == key[:2]}
            if sum(map(_size, self._kept.values())) + _size(values) > MOST_KEPT:
                return values
            self._kept[key] = values
        return self._kept[key]

    def lam_of(self, trained: TrainedVariant, seed: int) -> Float[np.ndarray, "layers num T H L"]:
        """λ at every token of all sequences."""
        return np.stack([layer["lam_value"] for layer in self.mixer_values(trained, seed)])

    def over_seeds(
        self,
        trained: TrainedVariant,
        what: str,
        key: Mapping[str, Any],
        seeds: list[int],
        compute: Callable[[int], Mapping[str, np.ndarray]],
    ) -> dict[int, dict[str, np.ndarray]]:
        """compute(seed) for these seeds, from the cache where it was computed before."""
        key = {"checkpoint": trained.checkpoint, "what": what, "which": self.choices.which, **key}
        found = {}
        with progress_bar(f"{trained.workdir.name} {trained.variant}: {what}", len(seeds), unit="seed") as bar:
            for seed in seeds:
                found[seed] = self.cache.get(key | {"seed": seed}, lambda seed=seed: compute(seed))
                bar.update()
        return found


def _size(values: list[dict[str, np.ndarray]]) -> int:
    return sum(array.nbytes for layer in values for array in layer.values())


def _distinct_names(runs: list[Run]) -> dict[Path, str]:
    """A name for each run's files: its folder's, with a number where two are the same."""
    names: dict[Path, str] = {}
    for run in runs:
        name, count = slug(run.name) or "run", 1
        while (candidate := name if count == 1 else f"{name}-{count}") in names.values():
            count += 1
        names[run.workdir] = candidate
    return names
