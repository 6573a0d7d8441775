"""Train or resume every cell of a grid file, on this machine's GPUs or under SLURM.

  loglinear_jax sweep results/mqar/grid.toml --list
  loglinear_jax sweep results/mqar/grid.toml --only='mqar-seq128-*'
  loglinear_jax sweep grid.toml --out=shared/runs --cluster=slurm --partition=gpu --time=240

Each cell is a call of `loglinear_jax train`; each of its variants is trained in a process of its own. Finished variants are
skipped, interrupted ones are resumed. --config.section.setting=value changes a setting of every cell.
"""

from __future__ import annotations

import argparse
import functools
import os
import shlex
import sys
from pathlib import Path

from loglinear_jax.command_line import FAILED, INTERRUPTED, BadInput, check_can_be_made, comma_separated, path, size

HELP = "train every cell of a grid file, here or under SLURM"
EXTRA = "sweep"
TAKES_CONFIG = True


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add, slurm = parser.add_argument, parser.add_argument_group("under SLURM, for each variant").add_argument
    add("file", type=path, help="a grid file, in TOML")
    add("--config.SECTION.SETTING", metavar="VALUE", help="change a setting of every cell")
    add("--out", type=path, default=Path("runs"), help="folder of the workdirs (default: %(default)s)")
    add("--only", type=comma_separated(), default=[], help="patterns of cells' names, such as 'mqar-*'")
    help_of_list = "print each variant's state and name, or its command, and start nothing"
    add("--list", nargs="?", const="names", choices=["names", "commands"], help=help_of_list)
    help_of_report = "folder for tables and figures of the finished cells (see analyze), made at the end"
    add("--report", type=path, help=help_of_report)
    add("--cluster", choices=["local", "slurm"], default="local", help="where to run (default: %(default)s)")
    help_of_workers = "variants trained at a time (default: as many as have GPUs, or 1; under SLURM all)"
    add("--workers", type=size, help=help_of_workers)
    add("--gpus", type=size, help="GPUs for each variant (default: 1)")
    help_of_time = "minutes; a variant that needs more is queued again and resumed (default: 60)"
    help_of_slurm = "further option of sbatch, such as account=ours or cpus_per_task=8; may be given several times"
    slurm("--partition", help="partition to submit to")
    slurm("--time", type=size, help=help_of_time)
    slurm("--slurm", action="append", metavar="KEY=VALUE", help=help_of_slurm)


def run(args: argparse.Namespace) -> int:
    from loglinear_jax.config.files import chooses_config
    from loglinear_jax.sweep.grid import read_grid
    from loglinear_jax.sweep.jobs import counts, end_report, supervise
    from loglinear_jax.sweep.states import State, track

    changes = args.config_arguments
    if any(map(chooses_config, changes)):
        raise BadInput("--config is each cell's own: expected settings alone, --config.section.setting=value")
    if args.report is not None:
        import loglinear_jax.analysis.report  # noqa: F401  # if something is missing for it, that shows before training
    if os.getcwd() not in sys.path:  # as for run.py, so that variants of modules in this folder are found
        sys.path.insert(0, os.getcwd())
    grid = read_grid(args.file)
    variants = track(grid, grid.only(args.only), args.out, changes)
    if args.list:
        width = max(len(one.state) for one in variants)
        for one in variants:
            shown = one.name if args.list == "names" else shlex.join(["python", "run.py", *one.arguments])
            print(f"{one.state:<{width}}  {shown}")
        print(counts(variants))
        return 0
    missing = [one for one in variants if one.state is not State.FINISHED]
    jobs = _jobs(args, missing) if missing else None
    check_can_be_made(args.out, "--out")  # jobs make it, and the report its own
    if args.report is not None:
        check_can_be_made(args.report, "--report")
    for one in variants:
        if one.state is State.FINISHED:
            one.why = one.of.keep()

    stopped = jobs is not None and supervise(variants, jobs)
    print(end_report(variants))
    finished = [one for one in variants if one.state is State.FINISHED]
    if args.report is not None and finished and not stopped:
        _report(finished, args.report)
    if len(finished) == len(variants):
        return 0
    return INTERRUPTED if stopped else FAILED


def _jobs(args: argparse.Namespace, variants: list):
    from loglinear_jax.commands.main import main
    from loglinear_jax.sweep.jobs import LocalJobs, SlurmJobs, gpus_here

    train = functools.partial(main, command="train", called="python run.py")

    given = [f"--{name}" for name in ("partition", "time", "slurm") if getattr(args, name) is not None]
    if args.cluster == "local":
        if given:
            raise BadInput(f"{given[0]} is for --cluster=slurm: here --workers says how many variants run at a time")
        gpus, each = gpus_here(), args.gpus or 1
        if args.gpus is not None and each > len(gpus):
            raise BadInput(f"--gpus={each}: this machine has {len(gpus)} for all variants: expected no more than that")
        places = [",".join(gpus[i : i + each]) for i in range(0, len(gpus) - each + 1, each)] or [None]
        workers = args.workers or len(places)
        return LocalJobs(variants, args.out, train, [places[i % len(places)] for i in range(workers)])
    parameters = {"name": args.file.stem, "timeout_min": args.time or 60, "gpus_per_node": args.gpus or 1}
    parameters["slurm_partition"] = args.partition
    for item in args.slurm or []:
        key, equals, value = item.partition("=")
        if not (key and equals and value):
            raise BadInput(f"--slurm={item}: expected KEY=VALUE, such as account=ours")
        parameters[f"slurm_{key}"] = int(value) if value.isdecimal() else value
    return SlurmJobs(variants, args.out, train, parameters, args.workers)


def _report(finished: list, out: Path) -> None:
    from loglinear_jax.analysis.report import make_report
    from loglinear_jax.analysis.section import Choices

    workdirs = list(dict.fromkeys(one.of.outcome_folder for one in finished))
    page, problems = make_report(workdirs, out, Choices(sections=("tables", "rates", "curves")))
    for problem in problems:
        print("analysis:", problem, file=sys.stderr)
    print(f"Report: {page}")
