"""What the benchmarks share: the flag --output, and the record that it asks for."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from loglinear_jax.command_line import path

SUFFIXES = (".json", ".png")


def flag_adder(parser: argparse.ArgumentParser) -> Callable[..., None]:
    """A function that adds a flag to the parser: add(name, default, help, ...)."""

    def add(name: str, default: Any, help: str, **settings: Any) -> None:
        parser.add_argument(f"--{name}", default=default, help=f"{help} (default: %(default)s)", **settings)

    return add


def add_output(parser: argparse.ArgumentParser, suffixes: Sequence[str] = (".json",)) -> None:
    parser.add_argument("--output", type=path, help=f"write {' and '.join(f'OUTPUT{suffix}' for suffix in suffixes)}")


def output_file(output: Path, suffix: str) -> Path:
    """OUTPUT.json and the like; an OUTPUT that ends so already is its own."""
    stem = output.with_suffix("") if output.suffix in SUFFIXES else output
    return stem.with_name(stem.name + suffix)


def write_record(output: Path | None, record: Mapping[str, Any]) -> None:
    """Writes OUTPUT.json, if it was asked for."""
    if output is not None:
        output_file(output, ".json").write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
