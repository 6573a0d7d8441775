"""The report of several runs: which sections it has, in which order, and what had to be left out."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import logging
import os
import pkgutil
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import jinja2  # noqa: F401  # if it is missing, that shows before anything is made
import numpy as np
from ml_collections import ConfigDict

import loglinear_jax.analysis
from loglinear_jax.analysis.cache import Cache
from loglinear_jax.analysis.experiments import describe_run, setting_of
from loglinear_jax.analysis.html import Report
from loglinear_jax.analysis.section import Choices, Context, Section
from loglinear_jax.analysis.table import Table
from loglinear_jax.config import ConfigError, differing_names, flat_settings, has_several
from loglinear_jax.files import local_path
from loglinear_jax.runs.loading import Run, TrainedVariant, load_run, read_run

LOG = "report.log"
# The files of the sections in the report's order; sections in other files follow.
ORDER = (
    "comparisons", "sizes", "outcomes", "rates", "curves", "decays", "answers", "lam", "dependence", "looks", "attention_rows",
    "lengths", "complexity",
)  # fmt: skip


def find_sections() -> dict[str, list[type[Section]]]:
    """By name, the sections in the files of this package, in the report's order."""
    files = [file.name for file in pkgutil.iter_modules(loglinear_jax.analysis.__path__) if file.name != "__main__"]
    found: dict[str, list[type[Section]]] = {}
    for name in sorted(files, key=lambda name: ORDER.index(name) if name in ORDER else len(ORDER)):
        module = importlib.import_module(f"loglinear_jax.analysis.{name}")
        classes = [x for x in vars(module).values() if isinstance(x, type) and issubclass(x, Section)]
        for section in classes:
            if section.NAME and section.__module__ == module.__name__:
                found.setdefault(section.NAME, []).append(section)
    return found


def chosen_sections(names: Sequence[str] | None) -> list[type[Section]]:
    """The sections of these names or import paths, in the report's order. Raises ConfigError for one that is unknown."""
    known = find_sections()
    if names is None:
        return [section for sections in known.values() for section in sections if section.BY_DEFAULT]
    if not names:
        raise ConfigError(f"sections is empty: expected some of {', '.join(known)}")
    if unknown := [name for name in names if name not in known and ":" not in name]:
        raise ConfigError(f"sections: there is no {unknown[0]!r}, but {', '.join(known)}")
    try:
        own = [pkgutil.resolve_name(name) for name in names if name not in known]
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError(f"sections: {error}") from error
    return [section for name, sections in known.items() if name in names for section in sections] + own


def make_report(
    workdirs: Sequence[str | os.PathLike],
    out: str | os.PathLike,
    choices: Choices | None = None,
) -> tuple[Path, list[str]]:
    """Writes figures, tables and report.html into `out`; returns the report's path and what had to be left out, and why.

    Tracebacks of what failed are in report.log, which is there only if something did.

    Raises ValueError if none of the workdirs can be read, and ConfigError for an unknown section.
    """
    choices = choices or Choices()
    chosen = chosen_sections(choices.sections)
    runs, problems = [], []
    for workdir in dict.fromkeys(os.path.abspath(local_path(workdir, "workdirs")) for workdir in workdirs):
        try:
            runs.append(read_run(workdir))
        except ConfigError as error:
            problems.append(str(error))
    if not runs:
        raise ValueError("; ".join(problems) or "workdir: give at least one")
    same = Counter(describe_run(run) for run in runs)
    runs = [dataclasses.replace(run, label=run.name) if same[describe_run(run)] > 1 else run for run in runs]
    report = Report(Path(out))
    report.problems += problems
    context = Context(runs, report, choices, Cache(report.out / "cache"))
    with _logged_to(report.out / LOG):
        _go_through(context, [section(context) for section in chosen])
    path = report.write(_title(runs), _runs_table(runs), _settings_tables(runs), _commands(runs))
    return path, report.problems


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
        found: dict[Section, dict[str, Any]] = {section: {} for section in reading}
        for variant in run.variants:
            with context.attempt(run.workdir, variant):
                trained = load_run(run.workdir, variant)
                _check_is_the_last(context, run, trained)
                for section in reading:
                    with context.attempt(run.workdir, f"{variant}: {section}"):
                        of_variant = section.find(run, trained)
                        if of_variant is not None:
                            found[section][variant] = of_variant
                del trained
        for section in reading:
            with context.attempt(run.workdir, str(section)):
                if found[section]:
                    section.show_run(run, found[section])
    for section in sections:
        for run in context.runs if not section.READS_CHECKPOINTS else ():
            with context.attempt(run.workdir, str(section)):
                section.show_run(run, {})
        with context.attempt("all runs", str(section)):
            section.show_all()


def _check_is_the_last(context: Context, run: Run, trained: TrainedVariant) -> None:
    outcome = run.outcomes.get(trained.variant)
    if outcome is not None and trained.step < outcome.last_step:
        context.report.problems.append(
            f"{run.workdir}: {trained.variant}: its last checkpoint, of step {outcome.last_step}, can't be read: parameters "
            f"are those of step {trained.step}"
        )


def _title(runs: Sequence[Run]) -> str:
    return describe_run(runs[0]) if len(runs) == 1 else f"Log-linear attention: {len(runs)} runs"


def _commands(runs: Sequence[Run]) -> list[str]:
    return [run.summary.command for run in runs if run.summary is not None and run.summary.command]


def _rates(value: Any) -> str:
    """One learning rate, or several."""
    return ", ".join(f"{rate:g}" for rate in (value if has_several(value) else [value]))


def _size(model: ConfigDict) -> str:
    """Layers and width, or the import path of a model of one's own."""
    return f"{model.layers} × {model.hidden}" if "layers" in model else model.kind


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
                "model": f"{_size(model)}{setting and f', setting {setting}'}",
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
