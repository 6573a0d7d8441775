"""Figures, tables and a report of one or several runs.

  loglinear_jax analyze --workdir=runs/mqar-kv=8 --workdir=runs/mqar-kv=32 --out=analysis
  loglinear_jax analyze --workdir='results/mqar/runs/*.json' --out=analysis --sections=tables,rates

Runs may have been trained on any machine. A run that can't be read is named, and the others are reported.
"""

from __future__ import annotations

import argparse
import dataclasses
import glob
import os
import sys

from loglinear_jax.command_line import (
    FAILED,
    BadInput,
    Failed,
    check_folder,
    comma_separated,
    integer,
    path,
    path_pattern,
    quiet_libraries,
    size,
    whole_number,
)

HELP = "figures, tables and a report of runs"
EXTRA = "analysis"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    from loglinear_jax.analysis.report import find_sections
    from loglinear_jax.analysis.section import Choices

    def add(name: str, help: str, **kwargs) -> None:
        parser.add_argument(f"--{name}", default=getattr(Choices, name), help=help, **kwargs)

    help_of_runs = "folder or record (NAME.json) of a run, or a pattern such as 'runs/*'; may be given several times"
    parser.add_argument("--workdir", action="append", type=path_pattern, required=True, help=help_of_runs)
    parser.add_argument("--out", type=path, required=True, help="folder to write to")
    help_of_sections = (
        f"sections of the report: {', '.join(find_sections())}, or import paths of your own (default: all); without "
        "checkpoints: tables,rates,answers, and with metrics.jsonl curves"
    )
    help_of_positions = "positions whose attention rows are drawn (default: three scored ones)"
    help_of_which = "parameters of each seed: at its best evaluation, or at the end (default: %(default)s)"
    add("sections", help_of_sections, type=comma_separated())
    add("seeds", "seeds whose λ is drawn (default: the first three)", type=comma_separated(whole_number))
    add("max_seeds", "most seeds of each variant to average over (default: all)", type=size)
    add("layer", "layer whose λ and attention rows are drawn; -1 is the last", type=integer)
    add("head", "head whose λ and attention rows are drawn", type=integer)
    add("example", "number of the sequence that is drawn, from 0", type=whole_number)
    add("positions", help_of_positions, type=comma_separated(whole_number))
    add("sequences", "number of sequences over which λ is averaged (default: %(default)s)", type=size)
    add("longest", "longest sequence in length generalisation (default: the run's model.max_length)", type=size)
    add("evaluated", "number of sequences of each length in length generalisation (default: %(default)s)", type=size)
    add("which", help_of_which, choices=["best", "last"])


def run(args: argparse.Namespace) -> int:
    import jax

    from loglinear_jax.analysis.report import make_report
    from loglinear_jax.analysis.section import Choices
    from loglinear_jax.runs.writing import NoReadableCheckpoint, RunFailed
    from loglinear_jax.settings import SettingError

    quiet_libraries()
    jax.devices()  # what is wrong with them is no section's problem
    given = {field.name: getattr(args, field.name) for field in dataclasses.fields(Choices)}
    try:
        choices = Choices(**given)
    except ValueError as error:
        raise BadInput(error) from error
    workdirs = _matching(args.workdir)
    check_folder(args.out, "--out")
    try:
        page, problems = make_report(workdirs, args.out, choices)
    except (SettingError, NoReadableCheckpoint) as error:
        raise BadInput(error) from error
    except RunFailed as error:
        raise Failed(error) from error
    for problem in problems:
        print("analysis:", problem, file=sys.stderr)
    print(f"Written to {page}")
    return FAILED if problems else 0


def _matching(patterns: list[str]) -> list[str]:
    """The runs that the patterns stand for; what matches nothing stays as it is, to be named as no run."""
    found = []
    for pattern in patterns:
        paths = [path for path in glob.glob(pattern) if os.path.isdir(path) or path.endswith(".json")]
        found += sorted(paths, key=lambda path: path.removesuffix(".json")) or [pattern]
    return found
