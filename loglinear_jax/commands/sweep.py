"""Train every cell of a grid file, on this machine's GPUs or under SLURM, or go on with them.

  loglinear_jax sweep results/experiments.toml --list
  loglinear_jax sweep results/experiments.toml --only='mqar-seq128-*'
  loglinear_jax sweep grid.toml --out=shared/runs --cluster=slurm --partition=gpu --time=240

Each cell is what `loglinear_jax train` would run with its arguments. What is finished is skipped, what was interrupted goes on.
With --split each variant of a cell is trained by itself. --config.section.setting=value changes a setting of every cell.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
from pathlib import Path

from loglinear_jax.command_line import FAILED, INTERRUPTED, BadInput, Parser, check_folder, comma_separated, path, size

HELP = "train every cell of a grid file, here or under SLURM"
EXTRA = "sweep"


def add_arguments(parser: Parser) -> None:
    from loglinear_jax.config.files import split_arguments

    parser.set_aside = split_arguments
    parser.add_argument("file", type=path, help="a grid file, in TOML")
    parser.add_argument("--config.SECTION.SETTING", metavar="VALUE", help="change a setting of every cell")
    parser.add_argument("--out", type=path, default=Path("runs"), help="folder of the workdirs (default: %(default)s)")
    parser.add_argument("--only", type=comma_separated(), default=[], help="patterns of names, such as 'mqar-*'")
    parser.add_argument(
        "--split",
        action="store_true",
        help="train each variant of a cell by itself, in OUT/NAME--VARIANT, so that several run at a time",
    )
    parser.add_argument(
        "--list",
        nargs="?",
        const="settings",
        choices=["settings", "commands"],
        help="print each cell's state, name, and the settings in which cells differ, and start nothing; or its whole command",
    )
    parser.add_argument(
        "--report", type=path, help="folder for tables and figures of the finished cells (see analyze), made at the end"
    )
    parser.add_argument(
        "--cluster", choices=["local", "slurm"], default="local", help="where to run (default: %(default)s)"
    )
    parser.add_argument(
        "--workers", type=size, help="cells at a time (default: here as many as have GPUs, or 1; under SLURM all)"
    )
    parser.add_argument("--gpus", type=size, help="GPUs of each cell (default: 1)")
    slurm = parser.add_argument_group("under SLURM, for each cell")
    slurm.add_argument("--partition")
    slurm.add_argument("--time", type=size, help="minutes; a cell that needs more goes on after them (default: 60)")
    slurm.add_argument(
        "--slurm", action="append", metavar="KEY=VALUE", help="any of sbatch's, such as account=ours or cpus_per_task=8"
    )


def run(args: argparse.Namespace) -> int:
    from loglinear_jax.settings import SettingError
    from loglinear_jax.sweep.grid import read_grid
    from loglinear_jax.sweep.states import State, Tracked, track
    from loglinear_jax.sweep.supervise import counts, end_report, supervise

    changes = args.aside
    if any(change.partition("=")[0].lstrip("-") == "config" for change in changes):
        raise BadInput("--config is each cell's own: expected settings alone, --config.section.setting=value")
    if args.report is not None:
        import loglinear_jax.analysis.report  # noqa: F401  # if something is missing for it, that shows before training
    if os.getcwd() not in sys.path:  # as for run.py, so that variants of modules in this folder are found
        sys.path.insert(0, os.getcwd())
    try:
        grid = read_grid(args.file)
        cells = track(grid, grid.only(args.only), args.out, changes, args.split)
        if args.list:
            _print_list(cells, commands=args.list == "commands")
            print(counts(cells))
            return 0
        open_cells = [tracked for tracked in cells if tracked.state not in (State.FINISHED, State.WAITING)]
        jobs = _jobs(args, open_cells) if open_cells else None
        check_folder(args.out, "--out")
        if args.report is not None:
            check_folder(args.report, "--report")
        for tracked in cells:
            if tracked.state is State.FINISHED:
                tracked.keep()

        def track_again(waiting: Tracked) -> list[Tracked]:
            return track(
                grid, [cell for cell in grid.cells if cell.name == waiting.cell.name], args.out, changes, args.split
            )

        stopped = jobs is not None and supervise(cells, jobs, track_again)
    except SettingError as error:
        raise BadInput(error) from error
    print(end_report(cells))
    finished = [tracked for tracked in cells if tracked.state is State.FINISHED]
    if args.report is not None and finished and not stopped:
        _report(finished, args.report)
    if len(finished) == len(cells):
        return 0
    return INTERRUPTED if stopped else FAILED


def _print_list(cells: list, commands: bool) -> None:
    """A line for each cell, cut at a terminal's width unless it is a command, to be copied."""
    from loglinear_jax.sweep.states import differing_settings

    state = max(len(tracked.shown_state) for tracked in cells)
    name = max(len(tracked.cell.name) for tracked in cells)
    width = shutil.get_terminal_size().columns if sys.stdout.isatty() else None
    for tracked, settings in zip(cells, differing_settings(cells), strict=True):
        shown = tracked.command if commands else f"{tracked.cell.name:<{name}}  {settings}".rstrip()
        line = f"{tracked.shown_state:<{state}}  {shown}"
        print(line if commands or width is None or len(line) <= width else f"{line[: width - 1]}…")


def _jobs(args: argparse.Namespace, cells: list):
    from loglinear_jax.sweep.jobs import LocalJobs, SlurmJobs, gpus_here

    given = [f"--{name}" for name in ("partition", "time", "slurm") if getattr(args, name) is not None]
    if args.cluster == "local":
        if given:
            raise BadInput(f"{given[0]} is for --cluster=slurm: here --workers says how many cells run at a time")
        gpus, each = gpus_here(), args.gpus or 1
        if args.gpus is not None and each > len(gpus):
            raise BadInput(f"--gpus={each}: this machine has {len(gpus)} for all cells: expected no more than that")
        places = [",".join(gpus[i : i + each]) for i in range(0, len(gpus) - each + 1, each)] or [None]
        workers = args.workers or len(places)
        return LocalJobs(cells, args.out, [places[i % len(places)] for i in range(workers)])
    parameters = {
        "name": args.file.stem,
        "timeout_min": args.time or 60,
        "gpus_per_node": args.gpus or 1,
        "slurm_partition": args.partition,
    }
    for item in args.slurm or []:
        key, equals, value = item.partition("=")
        if not (key and equals and value):
            raise BadInput(f"--slurm={item}: expected KEY=VALUE, such as account=ours")
        parameters[f"slurm_{key}"] = int(value) if value.isdecimal() else value
    return SlurmJobs(cells, args.out, parameters, args.workers)


def _report(finished: list, out: Path) -> None:
    from loglinear_jax.analysis.report import make_report
    from loglinear_jax.analysis.section import Choices

    curves_in: dict[str, list[Path]] = {}
    for tracked in finished:
        apart = curves_in.setdefault(os.path.abspath(tracked.outcome_folder), [])
        if tracked.whole is not None and tracked.outcome_folder != tracked.workdir:
            apart.append(tracked.workdir)
    page, problems = make_report(list(curves_in), out, Choices(sections=("tables", "rates", "curves")), curves_in)
    for problem in problems:
        print("analysis:", problem, file=sys.stderr)
    print(f"Report: {page}")


if __name__ == "__main__":
    from loglinear_jax.commands.main import main

    sys.exit(main(command="sweep", called="python -m loglinear_jax.commands.sweep"))
