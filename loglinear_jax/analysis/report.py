"""The report of several runs: which sections it has, in which order, and what had to be left out."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np

from loglinear_jax.analysis.cache import Cache
from loglinear_jax.analysis.experiments import setting_of
from loglinear_jax.analysis.html import Report
from loglinear_jax.analysis.labels import describe_run, short_names
from loglinear_jax.analysis.sections import DEFAULT_SECTIONS, SECTIONS
from loglinear_jax.analysis.sections.base import Context, Section
from loglinear_jax.analysis.tables import Table
from loglinear_jax.config import ConfigError, differing_names, flat_settings, has_several, variant_config
from loglinear_jax.files import local_path
from loglinear_jax.runs.loading import Run, load_run, read_run

LOG = "report.log"


@dataclasses.dataclass(frozen=True)
class Choices:
    """What to show; the fields are the command line's flags.

    sections: names in loglinear_jax.analysis.sections.SECTIONS. seeds: those whose λ is drawn, the first few of a run if None.
    max_seeds: of each variant, for what is averaged over seeds; None: all. layer, head: whose λ and attention rows are drawn.
    example: which of the drawn sequences. positions: tokens whose attention rows are drawn, three scored ones if None.
    sequences: over which λ is averaged. longest: length in length generalisation, a run's model.max_length if None. evaluated:
    sequences of each length there. which: parameters at each seed's best evaluation, or at the end.

    Raises ValueError for an unknown section, or a number that can't be.
    """

    sections: tuple[str, ...] = DEFAULT_SECTIONS
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
        if not self.sections:
            raise ValueError(f"sections is empty: expected some of {', '.join(SECTIONS)}")
        if unknown := set(self.sections) - set(SECTIONS):
            raise ValueError(f"sections: there is no {sorted(unknown)[0]!r}, but {', '.join(SECTIONS)}")
        for name in ("sequences", "evaluated", "max_seeds", "longest"):
            if getattr(self, name) is not None and getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if not 0 <= self.example < self.sequences:
            raise ValueError(
                f"example={self.example}: expected 0 to {self.sequences - 1}, as there are {self.sequences}"
            )


def make_report(
    workdirs: Sequence[str | os.PathLike],
    out: str | os.PathLike,
    choices: Choices | None = None,
    curves_in: Mapping[str, Sequence[Path]] | None = None,
) -> tuple[Path, list[str]]:
    """Writes figures, tables and report.html into `out`; returns the report's path and what had to be left out, and why.

    curves_in: for the absolute path of a workdir whose variants were trained apart, the workdirs that hold their curves.

    Tracebacks of what failed are in report.log, which is there only if something did.

    Raises ValueError if none of the workdirs can be read.
    """
    choices = choices or Choices()
    runs, problems = [], []
    for workdir in dict.fromkeys(os.path.abspath(local_path(workdir, "workdirs")) for workdir in workdirs):
        try:
            runs.append(dataclasses.replace(read_run(workdir), curves_in=tuple((curves_in or {}).get(workdir, ()))))
            problems += runs[-1].problems
        except ConfigError as error:
            problems.append(str(error))
    if not runs:
        raise ValueError("; ".join(problems) or "workdir: give at least one")
    if any(SECTIONS[name].READS_CHECKPOINTS for name in choices.sections):
        _check_drawn(runs, choices)
    same = Counter(describe_run(run) for run in runs)
    runs = [dataclasses.replace(run, label=run.name) if same[describe_run(run)] > 1 else run for run in runs]
    report = Report(Path(out))
    report.problems += problems
    context = Context(runs, report, choices, Cache(report.out / "cache"))
    sections = [section_class(context) for name, section_class in SECTIONS.items() if name in choices.sections]
    with _logged_to(report.out / LOG):
        _go_through(context, sections)
    path = report.write(_title(runs), _runs_table(runs), _settings_tables(runs), _commands(runs), short_names(runs))
    return path, report.problems


def _check_drawn(runs: Sequence[Run], choices: Choices) -> None:
    """Raises ConfigError for a layer, a head or seeds that none of the runs has."""
    models = [variant_config(run.config, variant).model for run in runs for variant in run.variants]
    for name, sizes in (("layer", [m.layers for m in models]), ("head", [m.heads for m in models if m.get("heads")])):
        chosen, most = getattr(choices, name), max(sizes, default=None)
        if most is not None and not -most <= chosen < most:
            raise ConfigError(f"{name}={chosen}: expected {-most} to {most - 1}, as the models have {most} or fewer")
    trained = [run.config.train for run in runs]
    seeds = {seed for train in trained for seed in range(train.first_seed, train.first_seed + train.num_seeds)}
    if choices.seeds is not None and seeds.isdisjoint(choices.seeds):
        given = ",".join(map(str, choices.seeds))
        raise ConfigError(f"seeds={given}: expected some of {min(seeds)} to {max(seeds)}, which the runs have")


@contextlib.contextmanager
def _logged_to(path: Path) -> Iterator[None]:
    """Writes what this package logs meanwhile to a file, if it logs anything."""
    path.unlink(missing_ok=True)
    handler = logging.FileHandler(path, encoding="utf-8", delay=True)
    handler.handleError = lambda record: None  # a full disk: the report's own lines say it
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
    package = logging.getLogger("loglinear_jax")
    package.addHandler(handler)
    try:
        yield
    finally:
        package.removeHandler(handler)
        handler.close()


def _go_through(context: Context, sections: list[Section]) -> None:
    """Gives the sections what they are made from, with one variant's parameters in memory at a time."""
    reading = [section for section in sections if section.READS_CHECKPOINTS]
    for run in context.runs if reading else ():
        for variant in run.variants:
            trained = None
            with context.attempt(run.workdir, variant):
                trained = load_run(run.workdir, variant)
            if trained is not None:
                outcome = run.outcomes.get(variant)
                if outcome is not None and trained.step < outcome.last_step:
                    context.report.problems.append(
                        f"{run.workdir}: {variant}: its last checkpoint, of step {outcome.last_step}, can't be read: "
                        f"parameters are those of step {trained.step}"
                    )
                for section in reading:
                    with context.attempt(run.workdir, f"{variant}: {type(section).__name__}"):
                        section.add_variant(run, trained)
        for section in reading:
            with context.attempt(run.workdir, type(section).__name__):
                section.finish_run(run)
    for section in sections:
        with context.attempt("all runs", type(section).__name__):
            section.finish()


def _title(runs: Sequence[Run]) -> str:
    return describe_run(runs[0]) if len(runs) == 1 else f"Log-linear attention: {len(runs)} runs"


def _commands(runs: Sequence[Run]) -> list[str]:
    return [run.summary.command for run in runs if run.summary is not None and run.summary.command]


def _rates(value: Any) -> str:
    """One learning rate, or several."""
    return ", ".join(f"{rate:g}" for rate in (value if has_several(value) else [value]))


def _runs_table(runs: Sequence[Run]) -> Table:
    rows = []
    for run in runs:
        model, train, summary, setting = run.config.model, run.config.train, run.summary, setting_of(run.config)
        seconds = [outcome.seconds for outcome in run.outcomes.values() if outcome.seconds is not None]
        rates = [o.seed_steps_per_second for o in run.outcomes.values() if o.seed_steps_per_second]
        rows.append(
            {
                "run": run.name,
                "task": run.task.describe(),
                "model": f"{model.layers} × {model.hidden}{setting and f', setting {setting}'}",
                "seeds": str(train.num_seeds),
                "steps": f"{train.num_steps:,} of {train.batch_size}, rate {_rates(train.learning_rate)}, {train.precision}",
                "machine": (summary and summary.device) or "–",
                "JAX": (summary and summary.versions.get("jax")) or "–",
                "commit": (summary and summary.provenance.get("commit")) or "–",
                "time": f"{sum(seconds) / 60:.1f} min" if seconds else "–",
                "seed-steps/s": f"{np.median(rates):,.0f}" if rates else "–",
            }
        )
    note = (
        "Time: training and evaluation of all variants, compilation included. seed-steps/s: the median over variants of "
        "optimiser steps of one seed in a second, of seeds that stopped too as long as they are computed along. Numbers "
        "called “the paper” are those that Amin, Li, Zhang and Ayhan print; all others were computed from these runs."
    )
    return Table("Runs", rows, note=note)


def _settings_tables(runs: Sequence[Run]) -> list[Table]:
    """In which settings the runs differ, and all that they share."""
    flat = [flat_settings(run.config) for run in runs]
    names = list(dict.fromkeys(name for settings in flat for name in settings))
    differing = differing_names(flat)
    shared = Table("All settings" if len(runs) == 1 else "Settings that the runs share", [
        {"setting": n, "value": str(flat[0][n])} for n in names if n not in differing
    ])  # fmt: skip
    rows = [
        {"run": run.name} | {n: str(settings.get(n, "–")) for n in differing}
        for run, settings in zip(runs, flat, strict=True)
    ]
    return [*([Table("Settings that differ", rows)] if differing else []), shared]
