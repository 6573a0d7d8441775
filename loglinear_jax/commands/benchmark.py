"""Time and memory on this machine, compared with other implementations.

loglinear_jax benchmark attention --preset=language --output=bench
loglinear_jax benchmark language --what=training
"""

from __future__ import annotations

import argparse

from loglinear_jax.command_line import BadInput, check_writable
from loglinear_jax.files import MOST_BYTES_OF_NAME, bytes_of_longest_name

HELP = "time and memory on this machine"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    from loglinear_jax.benchmarks import attention, lam, language_model, scaling, training

    parsers = parser.add_subparsers(metavar="benchmark", required=True)
    modules = {"attention": attention, "lam": lam, "language": language_model, "training": training, "scaling": scaling}
    for name, module in modules.items():
        own = parsers.add_parser(name, help=module.HELP, description=module.__doc__)
        module.add_arguments(own)
        own.set_defaults(measure=module.run)


def run(args: argparse.Namespace) -> int:
    from loglinear_jax.benchmarks.measure import json_file, printing_kernels

    if getattr(args, "output", None) is not None:
        file = json_file(args.output)
        if (longest := bytes_of_longest_name(str(file))) > MOST_BYTES_OF_NAME:
            raise BadInput(f"--output: a name of {longest} bytes with .json: expected at most {MOST_BYTES_OF_NAME}")
        if args.output.name in ("", "..") or file.is_dir():
            raise BadInput(f"--output: {args.output} is a folder, expected a file's name without .json")
        check_writable(args.output.parent, "--output")
    if not args.kernels:
        return args.measure(args)
    with printing_kernels():
        return args.measure(args)
