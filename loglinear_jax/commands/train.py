"""The command line: flags, config, one call. Bad input ends with one line and exit code 2."""

from __future__ import annotations

import ast
import contextlib
import logging
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from absl import flags
from ml_collections import config_flags

from loglinear_jax.config import ConfigError

BAD_INPUT, INTERRUPTED = 2, 130
USAGE = """Trains what a config says, or goes on with it.

  python run.py --config=configs/selective_copy.py:smoke
  python run.py --config=configs/mqar.py:kv=32 --config.train.num_seeds=64 --workdir=runs/mqar-32

Any field of the config can be set as --config.section.field=value; loglinear_jax/config.py lists them all.
"""


def define_flags(values: flags.FlagValues, argv: list[str]) -> None:
    config_flags.DEFINE_config_file(
        "config", help_string="configs/<task>.py[:preset,...]", flag_values=values, sys_argv=argv
    )
    flags.DEFINE_string("workdir", None, "where to write; runs/<config> if not given", flag_values=values)
    flags.DEFINE_bool(
        "distributed",
        False,
        "join the other processes of this job; under SLURM nothing else is needed",
        flag_values=values,
    )
    flags.DEFINE_string(
        "coordinator", None, "without SLURM: host:port of process 0, the same for all", flag_values=values
    )
    flags.DEFINE_integer("num_processes", None, "without SLURM: how many there are", flag_values=values)
    flags.DEFINE_integer("process_id", None, "without SLURM: which this one is, from 0", flag_values=values)


def main(argv: Sequence[str] | None = None) -> None:
    """Runs the command line and exits: 0 when done or interrupted and saved, 2 for bad input, 130 when interrupted where
    there is nothing to save, or twice."""
    try:
        _main(list(sys.argv if argv is None else argv))
    except KeyboardInterrupt:
        print("run.py: interrupted", file=sys.stderr)
        sys.exit(INTERRUPTED)


def _main(argv: list[str]) -> None:
    values = flags.FlagValues()
    try:
        define_flags(values, argv)
        if {"-h", "-help", "--help"} & set(argv):
            print(f"{USAGE}\n{values.get_help()}")
            return
        rest = values(argv)[1:]
        if rest:
            raise ConfigError(f"unexpected argument {rest[0]!r}")
        by_hand = {name: values[name].value for name in ("coordinator", "num_processes", "process_id")}
        join_others(values.distributed, **by_hand)
        if values.config is None:
            raise ConfigError("name a config: --config=configs/selective_copy.py:smoke")
        workdir = values.workdir or default_workdir(values["config"].config_filename)
        config = values.config
        config.lock()  # also where the flag's value is an error that only shows when used
    except (
        flags.Error,
        LookupError,
        AttributeError,
        ValueError,
        TypeError,
        OSError,
        SyntaxError,
        ImportError,
        RuntimeError,
    ) as error:
        fail(error)

    from loglinear_jax import distributed
    from loglinear_jax.analysis.figures import draw_learning_curves
    from loglinear_jax.runs import loop as experiment
    from loglinear_jax.runs.checkpoints import NoReadableCheckpoint
    from loglinear_jax.runs.outcome_table import outcome_table
    from loglinear_jax.runs.workdir import Workdir

    log = logging.getLogger("loglinear_jax")
    log.setLevel(logging.INFO if distributed.is_main() else logging.ERROR)
    log.propagate = False
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("%(message)s"))
    log.handlers = [handler]
    try:
        outcome = experiment.run(config, workdir, ["python", Path(argv[0]).name, *argv[1:]])
    except (ConfigError, NoReadableCheckpoint) as error:
        fail(error)
    if outcome.summary is None:
        log.info("Stopped. Saved to %s; the same command goes on from there.", outcome.interrupted_at)
        return
    if not distributed.is_main():
        return
    draw_learning_curves(workdir, Workdir(workdir).curves_file)
    print(outcome_table(outcome.summary.variants))
    print(f"\nWritten to {Path(workdir).absolute()}")


def join_others(distributed: bool, coordinator: str | None, num_processes: int | None, process_id: int | None) -> None:
    """Joins the other processes, if there are any. Raises ConfigError for flags that leave that half said."""
    by_hand = (coordinator, num_processes, process_id)
    if any(x is not None for x in by_hand) and (not distributed or any(x is None for x in by_hand)):
        raise ConfigError(
            "--coordinator, --num_processes and --process_id go together, and with --distributed; under SLURM "
            "--distributed alone is enough"
        )
    if distributed:
        from loglinear_jax.distributed import join

        join(coordinator, num_processes, process_id)


def fail(error: BaseException) -> NoReturn:
    """One line on stderr, exit code 2."""
    if "Traceback" in str(error):  # ml_collections wraps what a config file raises in its whole traceback
        while error.__cause__ or error.__context__:
            error = error.__cause__ or error.__context__
    text = str(error)
    if isinstance(error, (AttributeError, KeyError)):
        with contextlib.suppress(SyntaxError, ValueError):
            while text[:1] in ("'", '"'):  # it also wraps messages in repr, sometimes twice
                text = ast.literal_eval(text)
        text = f"there is no setting {text}"
    elif "No such file or directory" in text and (path := re.search(r"Attempted\s+\[[^]]*\]:\s+(\S+)", text)):
        text = f"there is no config file {path[1]}"
    elif isinstance(error, (SyntaxError, ImportError)):
        text = f"the config can't be read: {text}"
    print("run.py:", " ".join(text.split()), file=sys.stderr)
    sys.exit(BAD_INPUT)


def default_workdir(config_filename: str) -> Path:
    """runs/selective_copy-smoke for configs/selective_copy.py:smoke."""
    filename, _, preset = config_filename.partition(":")
    return Path("runs") / (Path(filename).stem + (f"-{preset}" if preset else ""))
