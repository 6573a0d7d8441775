"""The command `loglinear_jax`: finds the file beside this one that the first argument names, and runs it.

A command is a file here with HELP (a line), `add_arguments(parser)` and `run(args)`, which returns the exit code and raises
BadInput, SettingError or Failed; and EXTRA, if it needs more than the extra `train`. It imports JAX only inside these
functions, so that `loglinear_jax --help` is quick. With TAKES_CONFIG it takes --config and --config.section.setting, which are
set aside as `args.config_arguments`; `more_help(config_arguments)` is what its help then ends with.
"""

from __future__ import annotations

import importlib
import io
import os
import pkgutil
import sys
from collections.abc import Sequence
from types import ModuleType

from loglinear_jax import __version__, commands
from loglinear_jax.command_line import (
    BAD_INPUT,
    BROKEN_PIPE,
    FAILED,
    FULL,
    INTERRUPTED,
    BadInput,
    Failed,
    Parser,
    how_to_install,
    one_line,
    split_arguments,
)
from loglinear_jax.settings import SettingError


def find_commands() -> dict[str, ModuleType]:
    """Every command by its name."""
    names = [module.name for module in pkgutil.iter_modules(commands.__path__)]
    modules = {name: importlib.import_module(f"{commands.__name__}.{name}") for name in names}
    return {name: module for name, module in modules.items() if hasattr(module, "HELP")}


def main(argv: Sequence[str] | None = None, command: str | None = None, called: str = "loglinear_jax") -> int:
    """Runs a command line and returns its exit code.

    command, called: for a file that stands for one command, such as run.py: which one, and how it is called.
    """
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # a terminal may lack λ and ≥, or characters of a file's name
    argv = list(sys.argv[1:] if argv is None else argv)
    known = find_commands()
    if command is None:
        parser = Parser(prog=called, description="Log-linear attention with adaptive λ: experiments and measurements.")
        parser.add_argument("--version", action="version", version=f"loglinear_jax {__version__}")
        parsers = parser.add_subparsers(metavar="command", required=True)
        for name, module in known.items():
            own = parsers.add_parser(name, help=module.HELP, description=module.__doc__)
            own.set_defaults(run=module.run)
            if name in argv[:1]:
                command = name
        name = called if command is None else f"{called} {command}"
        chosen = None if command is None else parsers.choices[command]
    else:
        parser = chosen = Parser(prog=called, description=known[command].__doc__)
        parser.set_defaults(run=known[command].run)
        name = called.split()[-1].removeprefix("loglinear_jax.")
    try:
        config_arguments, others = split_arguments(argv)
        if not getattr(known.get(command), "TAKES_CONFIG", False):
            config_arguments, others = [], argv
        if chosen is not None:
            known[command].add_arguments(chosen)
            if {"-h", "--help"} & set(others) and hasattr(known[command], "more_help"):
                chosen.epilog = known[command].more_help(config_arguments)
        args = parser.parse_args(others)
        args.called, args.config_arguments = [*called.split(), *argv], config_arguments
        code = args.run(args)
        print(end="", flush=True)  # so that what can't be printed is reported below
        return code
    except (BadInput, SettingError, Failed) as error:
        sys.stderr.write(f"{name}: {one_line(error)}\n")  # at once, as other threads may write there too
        return FAILED if isinstance(error, Failed) else BAD_INPUT
    except KeyboardInterrupt:
        print(f"{name}: interrupted", file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:
        _drop_output()
        return BROKEN_PIPE
    except OSError as error:
        if (refused := _not_written(error)) is None:
            raise
        sys.stderr.write(f"{name}: {refused} can't be written: {error.strerror}\n")
        return FAILED
    except ModuleNotFoundError as error:
        hint = how_to_install(error, getattr(known[command], "EXTRA", "train"))
        if hint is None:
            raise
        print(f"{name}: {hint}", file=sys.stderr)
        return BAD_INPUT


def _drop_output() -> None:
    """Sends what is still to be printed nowhere."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _not_written(error: OSError) -> str | None:
    """What did not fit on a full disk: a file, or the output. None if that is not known, or no disk is full."""
    if error.errno not in FULL:
        return None
    if error.filename is None:
        try:
            print(flush=True)  # whether the output is on that disk
        except OSError:
            _drop_output()
            return "the output"
    return error.filename
