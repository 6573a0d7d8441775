"""The command `loglinear_jax`: finds the file beside this one that the first argument names, and runs it.

A command is a file here with HELP (a line), `add_arguments(parser)` and `run(args)`, which returns the exit code and raises
BadInput or Failed; and EXTRA, if it needs more than the extra `train`. It imports JAX only inside these functions, so that
`loglinear_jax --help` is quick.
"""

from __future__ import annotations

import importlib
import os
import pkgutil
import select
import sys
from collections.abc import Sequence
from types import ModuleType
from typing import TextIO

from loglinear_jax import commands
from loglinear_jax.command_line import BAD_INPUT, BROKEN_PIPE, FAILED, INTERRUPTED, BadInput, Failed, Parser, one_line

# The extra that brings a module which is no dependency of the package itself.
EXTRAS = {
    "train": ("matplotlib", "ml_collections", "scipy", "tabulate", "tensorboardX", "tqdm"),
    "hub": ("huggingface_hub", "safetensors"),
    "text": ("array_record", "filelock", "grain", "pyarrow", "requests", "tensorflow_datasets", "tokenizers"),
    "analysis": ("jinja2",),
    "sweep": ("rich", "submitit"),
}  # fmt: skip


def find_commands() -> dict[str, ModuleType]:
    """Every command by its name."""
    names = [module.name for module in pkgutil.iter_modules(commands.__path__)]
    modules = {name: importlib.import_module(f"{commands.__name__}.{name}") for name in names}
    return {name: module for name, module in modules.items() if hasattr(module, "HELP")}


def main(argv: Sequence[str] | None = None, command: str | None = None, called: str = "loglinear_jax") -> int:
    """Runs a command line and returns its exit code.

    command, called: for a file that stands for one command, such as run.py: which one, and how it is called.
    """
    argv = list(sys.argv[1:] if argv is None else argv)
    known = find_commands()
    if command is None:
        parser = Parser(prog=called, description="Log-linear attention with adaptive λ: experiments and measurements.")
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
        if chosen is not None:
            known[command].add_arguments(chosen)
        args = parser.parse_args(argv)
        args.called = [*called.split(), *argv]
        return args.run(args)
    except (BadInput, Failed) as error:
        print(f"{name}:", one_line(error), file=sys.stderr)
        return BAD_INPUT if isinstance(error, BadInput) else FAILED
    except KeyboardInterrupt:
        print(f"{name}: interrupted", file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:
        if not _is_closed(sys.stdout):
            raise
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # what is still to be written
        return BROKEN_PIPE
    except ModuleNotFoundError as error:
        missing = error.name  # of a part of a package that is there it has a dot, and is a bug
        extra = next((extra for extra, modules in EXTRAS.items() if missing in modules), None)
        if extra is None:
            raise
        if extra == "train":  # which every command needs, and the command's own extra includes
            extra = getattr(known[command], "EXTRA", extra)
        print(f"{name}: needs {missing}: pip install 'loglinear_jax[{extra}]'", file=sys.stderr)
        return BAD_INPUT


def _is_closed(stream: TextIO) -> bool:
    """Whether whoever reads the stream is gone, as `head` is when it has read enough."""
    poll = select.poll()
    poll.register(stream.fileno(), 0)
    return any(event & select.POLLERR for _, event in poll.poll(0))


if __name__ == "__main__":
    sys.exit(main())
