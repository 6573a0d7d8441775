"""The command line: flags, config, one call. Bad input ends with one line and exit code 2."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from absl import flags
from ml_collections import config_flags

from loglinear_jax.config import ConfigError

BAD_INPUT = 2


def define_flags(values: flags.FlagValues, argv: list[str]) -> None:
    config_flags.DEFINE_config_file(
        "config", help_string="configs/<task>.py[:preset,...]", flag_values=values, sys_argv=argv
    )
    flags.DEFINE_string("workdir", None, "where to write; runs/<config> if not given", flag_values=values)


def main(argv: Sequence[str] | None = None) -> None:
    """Runs the command line and exits: 0 when done or interrupted and saved, 2 for bad input."""
    argv = list(sys.argv if argv is None else argv)
    # Before JAX is loaded: C++ libraries report on start-up, which nobody asked for.
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    values = flags.FlagValues()
    define_flags(values, argv)
    try:
        rest = values(argv)[1:]
        if rest:
            raise ConfigError(f"unexpected argument {rest[0]!r}")
        if values.config is None:
            raise ConfigError("name a config: --config=configs/selective_copy.py:smoke")
        workdir = values.workdir or default_workdir(values["config"].config_filename)
        config = values.config
        config.lock()  # also where the flag's value is an error that only shows when used
    except (flags.Error, ConfigError, AttributeError, KeyError, ValueError, TypeError, OSError) as error:
        fail(error)

    from loglinear_jax import experiment, summary
    from loglinear_jax.checkpoints import NoReadableCheckpoint

    log = logging.getLogger("loglinear_jax")
    log.setLevel(logging.INFO)
    log.propagate = False
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("%(message)s"))
    log.handlers = [handler]
    try:
        outcome = experiment.run(config, workdir)
    except (ConfigError, NoReadableCheckpoint) as error:
        fail(error)
    if outcome.summary is None:
        log.info("Stopped. Saved to %s; the same command goes on from there.", outcome.interrupted_at)
        return
    print(summary.table(outcome.summary["variants"]))
    print(f"\nWritten to {Path(workdir).absolute()}")


def fail(error: Exception) -> None:
    text = " ".join(str(error.args[0] if isinstance(error, KeyError) and error.args else error).split())
    print(f"run.py: {text}", file=sys.stderr)
    sys.exit(BAD_INPUT)


def default_workdir(config_filename: str) -> Path:
    """runs/selective_copy-smoke for configs/selective_copy.py:smoke."""
    filename, _, preset = config_filename.partition(":")
    return Path("runs") / (Path(filename).stem + (f"-{preset}" if preset else ""))
