"""Figures, tables and a report of one or several runs.

python -m loglinear_jax.analysis --workdir=runs/mqar-kv=8 --workdir=runs/mqar-kv=32 --out=analysis
python -m loglinear_jax.analysis --workdir='results/mqar-*' --out=analysis --sections=tables,decays

Runs may have been trained on any machine. A run that can't be read is named, and the others are reported.
"""

from __future__ import annotations

import glob
import os
import sys
from pathlib import Path

from absl import app, flags
from absl import logging as absl_logging

from loglinear_jax.analysis.sections import SECTIONS, Choices, make_report
from loglinear_jax.commands.list_flags import define_list, whole_number

WORKDIRS = flags.DEFINE_multi_string(
    "workdir", None, "a run of run.py, or a pattern such as 'runs/*'; may be given several times", required=True
)
OUT = flags.DEFINE_string("out", None, "folder to write to", required=True)
ONLY = flags.DEFINE_list(
    "sections", list(SECTIONS), f"of {', '.join(SECTIONS)}; without checkpoints: tables,curves,decays"
)
SEEDS = define_list("seeds", None, "seeds whose λ is drawn; the first three of a run if not given", whole_number)
MAX_SEEDS = flags.DEFINE_integer(
    "max_seeds", None, "of each variant, for what is averaged over seeds; all if not given"
)
LAYER = flags.DEFINE_integer("layer", -1, "layer whose λ and attention rows are drawn; -1 is the last")
HEAD = flags.DEFINE_integer("head", 0, "and its head")
EXAMPLE = flags.DEFINE_integer("example", 0, "which of the drawn sequences")
POSITIONS = define_list(
    "positions", None, "tokens whose attention rows are drawn; three scored ones if not given", whole_number
)
SEQUENCES = flags.DEFINE_integer("sequences", 64, "sequences over which λ is averaged")
EVALUATED = flags.DEFINE_integer("evaluated", 256, "sequences of each length in length generalisation")
WHICH = flags.DEFINE_enum("which", "best", ["best", "last"], "parameters at each seed's best evaluation, or at the end")


def main(argv: list[str]) -> None:
    if len(argv) > 1:
        raise app.UsageError(f"unexpected argument {argv[1]!r}")
    absl_logging.set_verbosity(absl_logging.ERROR)  # Orbax tells every step it takes
    try:
        choices = Choices(
            sections=tuple(ONLY.value),
            seeds=SEEDS.value,
            max_seeds=MAX_SEEDS.value,
            layer=LAYER.value,
            head=HEAD.value,
            example=EXAMPLE.value,
            positions=POSITIONS.value,
            sequences=SEQUENCES.value,
            evaluated=EVALUATED.value,
            which=WHICH.value,
        )
        path, problems = make_report(_matching(WORKDIRS.value), Path(OUT.value), choices)
    except (ValueError, OSError) as error:
        print("analysis:", " ".join(str(error).split()), file=sys.stderr)
        sys.exit(2)
    for problem in problems:
        print("analysis:", problem, file=sys.stderr)
    print(f"Written to {path}")
    sys.exit(1 if problems else 0)


def _matching(patterns: list[str]) -> list[str]:
    """The folders that the patterns stand for; what matches nothing stays as it is, to be named as no run."""
    found = [sorted(filter(os.path.isdir, glob.glob(os.path.expanduser(p)))) or [p] for p in patterns]
    return [path for paths in found for path in paths]


if __name__ == "__main__":
    app.run(main)
