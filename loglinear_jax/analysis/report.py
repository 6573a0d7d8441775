"""The report of several runs: which sections it has, in which order, and what had to be left out."""

from __future__ import annotations

import dataclasses
import os
import pkgutil
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jinja2  # noqa: F401  # if it is missing, that shows before anything is made
import numpy as np

from loglinear_jax.analysis.answers import Answers, Looks
from loglinear_jax.analysis.attention_rows import AttentionRows
from loglinear_jax.analysis.curves import Curves
from loglinear_jax.analysis.lam import Dependence, Means, OverTokens, Static
from loglinear_jax.analysis.lengths import Lengths
from loglinear_jax.analysis.outcomes import Comparisons, Outcomes
from loglinear_jax.analysis.paper import describe_run, setting_of
from loglinear_jax.analysis.rates import Rates
from loglinear_jax.analysis.section import Choices, Context, Report, Section
from loglinear_jax.analysis.table import Table
from loglinear_jax.config import ConfigError, differing_names, flat_settings, has_several
from loglinear_jax.files import local_path
from loglinear_jax.runs.loading import Run, load_run, read_run
from loglinear_jax.runs.outcome import RunSummary

SECTIONS: tuple[type[Section], ...] = (
    Comparisons, Outcomes, Rates, Curves, Answers, OverTokens, Means, Static, Dependence, Looks, AttentionRows, Lengths,
)  # fmt: skip


def find_sections() -> dict[str, list[type[Section]]]:
    """Lists the classes of sections by their names, in the report's order."""
    found: dict[str, list[type[Section]]] = {}
    for section in SECTIONS:
        found.setdefault(section.NAME, []).append(section)
    return found


def chosen_sections(names: Sequence[str] | None) -> list[type[Section]]:
    """Find the sections of these names or import paths, in the report's order; None stands for all.

    Raises:
        ConfigError: for a section that is unknown.
    """
    known = find_sections()
    if names is None:
        return list(SECTIONS)
    if not names:
        raise ConfigError(f"sections is empty: expected some of {', '.join(known)}")
    if unknown := [name for name in names if name not in known and ":" not in name]:
        raise ConfigError(f"sections: there is no {unknown[0]!r}, but {', '.join(known)}")
    try:
        own = [pkgutil.resolve_name(name) for name in names if name not in known]
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError(f"sections: {error}") from error
    if wrong := [one for one in own if not (isinstance(one, type) and issubclass(one, Section))]:
        raise ConfigError(f"sections: expected a subclass of Section, got {wrong[0]!r}")
    return [section for section in SECTIONS if section.NAME in names] + own


def make_report(
    workdirs: Sequence[str | os.PathLike], out: str | os.PathLike, choices: Choices | None = None
) -> tuple[Path, list[str]]:
    """Write figures, tables and report.html about runs.

    Args:
        workdirs: folders or records of runs; one that can't be read is named, and left out.
        out: folder to write to.
        choices: what to show.

    Returns:
        The report's path, and a line for each thing that had to be left out.

    Raises:
        ConfigError: if none of the workdirs can be read, and for an unknown section.
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
    _go_through(context, [section(context) for section in chosen])
    title = describe_run(runs[0]) if len(runs) == 1 else f"Log-linear attention: {len(runs)} runs"
    commands = [run.summary.command for run in runs if run.summary is not None and run.summary.command]
    return report.write(title, _runs_table(runs), _settings_tables(runs), commands), report.problems


def _go_through(context: Context, sections: list[Section]) -> None:
    """Gives the sections what they are made from, with one variant's parameters in memory at a time."""
    reading = [section for section in sections if section.READS_CHECKPOINTS]
    for run in context.runs:
        found: dict[Section, dict[str, Any]] = {section: {} for section in sections}
        for variant in run.variants if reading else ():
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
        for section in sections:
            with context.attempt(run.workdir, str(section)):
                if found[section] or not section.READS_CHECKPOINTS:
                    section.show_run(run, found[section])
    for section in sections:
        with context.attempt("all runs", str(section)):
            section.show_all()


def _runs_table(runs: Sequence[Run]) -> Table:
    rows = []
    for run in runs:
        model, train, setting = run.config.model, run.config.train, setting_of(run.config)
        summary = run.summary or RunSummary({})
        size = f"{model.layers} × {model.hidden}" if "layers" in model else model.kind  # a model of one's own
        seconds = [outcome.seconds for outcome in run.outcomes.values() if outcome.seconds is not None]
        speeds = [o.seed_steps_per_second for o in run.outcomes.values() if o.seed_steps_per_second]
        rates = train.learning_rate if has_several(train.learning_rate) else [train.learning_rate]
        steps = f"{train.num_steps:,}, batch {train.batch_size}, rate {', '.join(f'{rate:g}' for rate in rates)}"
        row = {"run": run.name, "task": run.task.describe(), "model": f"{size}{setting and f', setting {setting}'}"}
        row |= {"seeds": str(train.num_seeds), "steps": f"{steps}, {train.precision}", "machine": summary.device}
        row |= {"JAX": summary.versions.get("jax"), "commit": summary.provenance.get("commit")}
        row |= {"time": f"{sum(seconds) / 60:.1f} min" if seconds else None}
        row |= {"seed-steps/s": f"{np.median(speeds):,.0f}" if speeds else None}
        rows.append({name: cell or "–" for name, cell in row.items()})
    note = (
        "Time: training and evaluation of all variants, with compilation. seed-steps/s: optimiser steps per second, summed "
        "over the seeds trained together; the median over variants. “The paper”: numbers printed by Amin, Li, Zhang and "
        "Ayhan; all other numbers were computed from these runs."
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
