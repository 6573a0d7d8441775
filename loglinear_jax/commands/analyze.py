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
    check_can_be_made,
    comma_separated,
    integer,
    path,
    path_pattern,
    quiet_libraries,
)

HELP = "figures, tables and a report of runs"
EXTRA = "analysis"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    from loglinear_jax.analysis.report import find_sections
    from loglinear_jax.analysis.section import Choices
    from loglinear_jax.settings import setting_fields

    help_of_runs = "folder or record (NAME.json) of a run, or a pattern such as 'runs/*'; may be given several times"
    parser.add_argument("--workdir", action="append", type=path_pattern, required=True, help=help_of_runs)
    parser.add_argument("--out", type=path, required=True, help="folder to write to")
    types = {
        "sections": comma_separated(),
        "which": str,
        **dict.fromkeys(("seeds", "positions"), comma_separated(integer)),
    }
    for name, field in setting_fields(Choices).items():
        text = field.metadata["meaning"] + ("" if field.default is None else " (default: %(default)s)")
        if name == "sections":
            text += f": {', '.join(find_sections())}; without checkpoints tables, rates, answers, curves"
        options = {"type": types.get(name, integer), "choices": field.metadata["choices"]}
        parser.add_argument(f"--{name}", default=field.default, help=text, **options)


def run(args: argparse.Namespace) -> int:
    import jax

    from loglinear_jax.analysis.report import make_report
    from loglinear_jax.analysis.section import Choices

    quiet_libraries()
    jax.devices()  # what is wrong with them is no section's problem
    choices = Choices(**{field.name: getattr(args, field.name) for field in dataclasses.fields(Choices)})
    workdirs = _matching(args.workdir)
    check_can_be_made(args.out, "--out")  # the report makes it, once a run is read
    page, problems = make_report(workdirs, args.out, choices)
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
