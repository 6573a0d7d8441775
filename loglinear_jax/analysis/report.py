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

from loglinear_jax.analysis.experiments import describe_run, setting_of
from loglinear_jax.analysis.html import Report
from loglinear_jax.analysis.section import Choices, Context, Section
from loglinear_jax.analysis.table import Table
from loglinear_jax.config import ConfigError, differing_names, flat_settings, has_several
from loglinear_jax.files import local_path
from loglinear_jax.runs.loading import Run, load_run, read_run

LOG = "report.log"
# The files of the sections in the report's order; sections in other files follow.
ORDER = (
    "comparisons", "outcomes", "rates", "curves", "answers", "lam", "dependence", "looks", "attention_rows",
    "lengths",
)  # fmt: skip


def find_sections() -> dict[str, list[type[Section]]]:
    """By name, the sections in the files of this package, in the report's order."""
    names = {file.name for file in pkgutil.iter_modules([str(Path(__file__).parent)])} - {"__main__"}
    found: dict[str, list[type[Section]]] = {}
    for name in [*ORDER, *sorted(names - set(ORDER))]:
        module = importlib.import_module(f"loglinear_jax.analysis.{name}")
        classes = [x for x in vars(module).values() if isinstance(x, type) and issubclass(x, Section) and x.NAME]
        for section in (x for x in classes if x.__module__ == module.__name__):
            found.setdefault(section.NAME, []).append(section)
    return found


def chosen_sections(names: Sequence[str] | None) -> list[type[Section]]:
    """The sections of these names or import paths, in the report's order. Raises ConfigError for one that is unknown."""
    known = find_sections()
    if names is None:
        return [section for sections in known.values() for section in sections]
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
    workdirs: Sequence[str | os.PathLike], out: str | os.PathLike, choices: Choices | None = None
) -> tuple[Path, list[str]]:
    """Writes figures, tables and report.html into `out`; returns the report's path and what had to be left out, and why.

    Tracebacks of what failed are in report.log, which is there only if something did.

    Raises ConfigError if none of the workdirs can be read, and for an unknown section.
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
        raise ConfigError("; ".join(problems) or "workdir: give at least one")
    same = Counter(describe_run(run) for run in runs)
    runs = [dataclasses.replace(run, label=run.name) if same[describe_run(run)] > 1 else run for run in runs]
    report = Report(Path(out))
    report.problems += problems
    context = Context(runs, report, choices)
    with _logged_to(report.out / LOG):
        _go_through(context, [section(context) for section in chosen])
    title = describe_run(runs[0]) if len(runs) == 1 else f"Log-linear attention: {len(runs)} runs"
    commands = [run.summary.command for run in runs if run.summary is not None and run.summary.command]
    return report.write(title, _runs_table(runs), _settings_tables(runs), commands), report.problems


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
                trained, outcome = load_run(run.workdir, variant), run.outcomes.get(variant)
                if outcome is not None and trained.step < outcome.last_step:
                    context.report.problems.append(
                        f"{run.workdir}: {variant}: its last checkpoint, of step {outcome.last_step}, can't be read: "
                        f"parameters are those of step {trained.step}"
                    )
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


def _runs_table(runs: Sequence[Run]) -> Table:
    rows = []
    for run in runs:
        model, train, summary, setting = run.config.model, run.config.train, run.summary, setting_of(run.config)
        size = f"{model.layers} × {model.hidden}" if "layers" in model else model.kind  # a model of one's own
        seconds = [outcome.seconds for outcome in run.outcomes.values() if outcome.seconds is not None]
        speeds = [o.seed_steps_per_second for o in run.outcomes.values() if o.seed_steps_per_second]
        rates = train.learning_rate if has_several(train.learning_rate) else [train.learning_rate]
        rate = ", ".join(f"{rate:g}" for rate in rates)
        rows.append(
            {
                "run": run.name,
                "task": run.task.describe(),
                "model": f"{size}{setting and f', setting {setting}'}",
                "seeds": str(train.num_seeds),
                "steps": f"{train.num_steps:,} of {train.batch_size}, rate {rate}, {train.precision}",
                "machine": (summary and summary.device) or "–",
                "JAX": (summary and summary.versions.get("jax")) or "–",
                "commit": (summary and summary.provenance.get("commit")) or "–",
                "time": f"{sum(seconds) / 60:.1f} min" if seconds else "–",
                "seed-steps/s": f"{np.median(speeds):,.0f}" if speeds else "–",
            }
        )
    note = (
        "Time: training and evaluation of all variants, compilation included. seed-steps/s: the median over variants of "
        "optimiser steps of one seed in a second, of seeds that stopped too as long as they are computed along. Numbers "
        "called “the paper” are those that Amin, Li, Zhang and Ayhan print; all others were computed from these runs."
    )
    return Table("Runs", rows, note)


def _settings_tables(runs: Sequence[Run]) -> list[Table]:
    """In which settings the runs differ, and all that they share."""
    flat = [flat_settings(run.config) for run in runs]
    differing = differing_names(flat)
    shared = [{"setting": name, "value": str(value)} for name, value in flat[0].items() if name not in differing]
    tables = [Table("All settings" if len(runs) == 1 else "Settings that the runs share", shared)]
    if differing:
        of_runs = zip(runs, flat, strict=True)
        rows = [{"run": run.name} | {n: str(of_run.get(n, "–")) for n in differing} for run, of_run in of_runs]
        tables.insert(0, Table("Settings that differ", rows))
    return tables
