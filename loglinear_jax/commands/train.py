"""Train a configuration, or resume a run.

  loglinear_jax train --config=selective_copy:smoke
  loglinear_jax train --config=mqar:kv=32 --config.train.num_seeds=64 --workdir=runs/mqar-32

--config is a file, or the name of a configuration below, then a colon and presets joined by commas. Every setting can
be changed as --config.section.setting=value. With --config=NAME, --help lists the config's presets and settings.
"""

from __future__ import annotations

import argparse
import inspect
import logging
import textwrap
from pathlib import Path
from typing import TYPE_CHECKING

from loglinear_jax.command_line import INTERRUPTED, BadInput, path, quiet_libraries, show_log, size, whole_number
from loglinear_jax.settings import SettingError

if TYPE_CHECKING:
    from loglinear_jax.runs import Run
    from loglinear_jax.runs.folders import RunFolder

HELP = "train a configuration, or resume a run"
TAKES_CONFIG = True


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--config", metavar="CONFIG[:PRESET,...]", help="configuration, by name or file, and presets")
    add("--config.SECTION.SETTING", metavar="VALUE", help="change a setting of the config")
    add("--workdir", type=path, help="folder to write to (default: runs/CONFIG-PRESETS)")
    help_of_only = "train only this variant, at all its learning rates; may be given several times"
    add("--only", action="append", default=[], metavar="VARIANT", help=help_of_only)
    add("--wandb", default="", metavar="PROJECT", help="Weights & Biases project that also gets the curves")
    help_of_distributed = "join the other processes of this job; under SLURM nothing else is needed"
    add("--distributed", action="store_true", help=help_of_distributed)
    add("--coordinator", help="without SLURM: host:port of process 0, the same for all processes")
    add("--num_processes", type=size, help="without SLURM: how many processes there are")
    add("--process_id", type=whole_number, help="without SLURM: which process this is, from 0")


def run(args: argparse.Namespace) -> int:
    # With what is drawn and printed at the end: if something is missing for it, that shows before training.
    import loglinear_jax.analysis.curves  # noqa: F401
    from loglinear_jax.analysis.outcomes import outcomes
    from loglinear_jax.config import check_effects
    from loglinear_jax.config.files import read_config_arguments
    from loglinear_jax.distributed import is_main, leave_without_others
    from loglinear_jax.runs import read_run
    from loglinear_jax.runs import run as train
    from loglinear_jax.runs.folders import RunFolder

    chosen = read_config_arguments(args.config_arguments)
    _join_others(args)
    workdir = args.workdir or Path("runs") / chosen.name
    if not RunFolder(workdir).config_file.exists():  # a run goes on with what it was started with
        check_effects(chosen.config, chosen.given)
    quiet_libraries()
    show_log(log, is_main())
    called = [argument for argument in args.called if not argument.startswith("--only")]
    try:
        result = train(chosen.config, workdir, called, args.only, args.wandb)
        if result.interrupted_at is None and is_main():
            finished = read_run(workdir)
            print(outcomes(finished).text("github"))
            _draw_curves(RunFolder(workdir), finished, again=result.trained)
    except Exception as error:
        if not isinstance(error, (BadInput, SettingError)):  # which all processes raise
            leave_without_others()
        raise
    if result.interrupted_at is not None:
        log.info("Stopped. Saved to %s; the same command goes on from there.", result.interrupted_at)
        return INTERRUPTED
    if is_main():
        print(f"\nWritten to {workdir.absolute()}")
    return 0


log = logging.getLogger("loglinear_jax")


def _draw_curves(folder: RunFolder, finished: Run, again: bool) -> None:
    """Draws the learning curves of a run whose variants are all finished, if they are not drawn yet, or again."""
    from loglinear_jax.analysis.curves import draw_learning_curves
    from loglinear_jax.runs.writing import replace_file

    if folder.summary_file.exists() and (again or not folder.curves_file.exists()):
        figure = draw_learning_curves(finished)
        replace_file(folder.curves_file, lambda file: figure.savefig(file, dpi=120, format="png"), mode="wb")


def _join_others(args: argparse.Namespace) -> None:
    """Joins the other processes, if there are any. Raises BadInput for arguments of which only some are given."""
    by_hand = (args.coordinator, args.num_processes, args.process_id)
    if any(x is not None for x in by_hand) and (not args.distributed or any(x is None for x in by_hand)):
        raise BadInput(
            "--coordinator, --num_processes and --process_id go together, and with --distributed; under SLURM "
            "--distributed alone is enough"
        )
    if args.distributed:
        import jax

        try:  # before anything else asks JAX for its devices
            jax.distributed.initialize(*by_hand)
        except (RuntimeError, ValueError) as error:  # no such address, or no scheduler that JAX knows
            none = "no scheduler that JAX knows started this process; give --coordinator, --num_processes and --process_id: "
            raise BadInput(f"--distributed: {none if args.coordinator is None else ''}{error}") from error


def more_help(arguments: list[str]) -> str:
    """The configs there are; of the config that the arguments choose: its docstring, presets and settings."""
    from loglinear_jax.config import ConfigError, describe_settings
    from loglinear_jax.config.files import chosen_file, config_names, load_config_file, read_config_arguments

    chosen = chosen_file(arguments)
    if not chosen:
        return f"\nconfigs by name: {', '.join(config_names())}\n"
    file = load_config_file(chosen.partition(":")[0])
    try:
        settings = describe_settings(read_config_arguments(arguments).config)
    except ConfigError as error:  # a preset that there is not, or one that is needed
        shown = f"settings: {error}\n"
    else:
        shown = "settings, each with its value here:\n"
        shown += _definitions([(f"{s.name} = {s.default!r}", s.meaning) for s in settings])
    presets = [(f"{name}N" if name.endswith("=") else name, inspect.getdoc(f)) for name, f in file.presets.items()]
    return f"\n{file.path}\n\n{file.docstring}\n\npresets, joined by commas:\n{_definitions(presets)}\n{shown}"


def _definitions(items: list[tuple[str, str]]) -> str:
    """Each term on a line, what it means below it."""
    return "".join(
        f"  {term}\n{textwrap.indent(textwrap.fill(' '.join(text.split()), 100), ' ' * 8)}\n" for term, text in items
    )
