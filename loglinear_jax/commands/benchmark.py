"""Time and memory on the machine at hand, beside peers.

loglinear_jax benchmark attention --preset=language --output=bench
loglinear_jax benchmark language --what=training
"""

from __future__ import annotations

import argparse

HELP = "time and memory on this machine"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    from loglinear_jax.benchmarks import attention, language_model, tiles, training

    parsers = parser.add_subparsers(metavar="benchmark", required=True)
    for name, module in {
        "attention": attention,
        "language": language_model,
        "training": training,
        "tiles": tiles,
    }.items():
        own = parsers.add_parser(name, help=module.HELP, description=module.__doc__)
        module.add_arguments(own)
        own.set_defaults(measure=module.run)


def run(args: argparse.Namespace) -> int:
    return args.measure(args)
