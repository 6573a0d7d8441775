"""Time and memory on the machine at hand, beside peers.

loglinear_jax benchmark attention --preset=language --output=bench
loglinear_jax benchmark language --what=training
"""

from __future__ import annotations

import argparse

from loglinear_jax.command_line import BadInput, check_writable

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
    if getattr(args, "output", None) is not None:
        if not args.output.name:
            raise BadInput(f"--output: {args.output} is a folder, expected a file's name without .json")
        check_writable(args.output.parent, "--output")
    if not args.kernels:
        return args.measure(args)
    from loglinear_jax.benchmarks.measure import printing_kernels

    with printing_kernels():
        return args.measure(args)
