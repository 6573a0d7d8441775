"""What the benchmarks share: the flag --output, the machine's name, and where a record comes from."""

from __future__ import annotations

import argparse
import json
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax

from loglinear_jax.runs.provenance import commit, versions


def add_output(parser: argparse.ArgumentParser, suffixes: Sequence[str] = (".json",)) -> None:
    parser.add_argument("--output", type=Path, help=f"write {' and '.join(f'OUTPUT{suffix}' for suffix in suffixes)}")


def machine() -> str:
    """ "1 × NVIDIA H200, JAX 0.11.2"."""
    return f"{len(jax.devices())} × {jax.devices()[0].device_kind}, JAX {jax.__version__}"


def origin(command: Sequence[str]) -> dict[str, Any]:
    """Machine, code and command, for a record."""
    return {"machine": machine(), "commit": commit(), "versions": versions(), "command": shlex.join(command)}


def write_record(output: Path | None, record: Mapping[str, Any]) -> None:
    """Writes OUTPUT.json, if it was asked for."""
    if output is not None:
        output.with_suffix(".json").write_text(json.dumps(record, indent=1) + "\n")
