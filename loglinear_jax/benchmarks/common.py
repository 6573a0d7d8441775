"""What the benchmarks share: their flags, and the record of what they measure."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
from tabulate import tabulate

from loglinear_jax import provenance
from loglinear_jax.benchmarks import kernels
from loglinear_jax.command_line import BadInput, path

SUFFIXES = (".json", ".png")


def flag_adder(parser: argparse.ArgumentParser) -> Callable[..., None]:
    """A function that adds a flag to the parser: add(name, default, help, ...)."""

    def add(name: str, default: Any, help: str, **settings: Any) -> None:
        parser.add_argument(f"--{name}", default=default, help=f"{help} (default: %(default)s)", **settings)

    return add


def add_kernels(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--kernels", action="store_true", help="also each kernel's time, of all GPUs together (needs a GPU)"
    )


def check_kernels(args: argparse.Namespace) -> None:
    """Raises BadInput if --kernels asks for what only a GPU has."""
    if args.kernels and jax.default_backend() != "gpu":
        raise BadInput(f"--kernels: expected a GPU, got {jax.default_backend()}")


def add_output(parser: argparse.ArgumentParser, suffixes: Sequence[str] = (".json",)) -> None:
    parser.add_argument("--output", type=path, help=f"write {' and '.join(f'OUTPUT{suffix}' for suffix in suffixes)}")


def output_file(output: Path, suffix: str) -> Path:
    """OUTPUT.json and the like; an OUTPUT that ends so already is its own."""
    stem = output.with_suffix("") if output.suffix in SUFFIXES else output
    return stem.with_name(stem.name + suffix)


class Record:
    """What a benchmark measures and where, in `values`, to be written to OUTPUT.json if --output asks for it."""

    def __init__(self, args: argparse.Namespace, **about: Any):
        self.output: Path | None = args.output
        self.values: dict[str, Any] = provenance.origin(args.called) | about
        self.machine: str = self.values["machine"]

    def add(self, name: str, what: str, row: dict[str, Any]) -> None:
        """Adds a row to the list `name`: prints it, with its kernels if it has any, and writes it."""
        self.values.setdefault(name, []).append(row)
        print(json.dumps(kernels.without_kernels(row)), flush=True)
        kernels.print_tables(what, row)
        self.write()

    def table(self, name: str, **formats: Any) -> str:
        rows = map(kernels.without_kernels, self.values.get(name, []))
        return tabulate(rows, headers="keys", tablefmt="github", **formats)

    def write(self) -> None:
        if self.output is not None:
            text = json.dumps(self.values, indent=1) + "\n"
            output_file(self.output, ".json").write_text(text, encoding="utf-8")
