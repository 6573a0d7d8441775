"""What the benchmarks share: the flag --output, and the record that it asks for."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any


def add_output(parser: argparse.ArgumentParser, suffixes: Sequence[str] = (".json",)) -> None:
    parser.add_argument("--output", type=Path, help=f"write {' and '.join(f'OUTPUT{suffix}' for suffix in suffixes)}")


def write_record(output: Path | None, record: Mapping[str, Any]) -> None:
    """Writes OUTPUT.json, if it was asked for."""
    if output is not None:
        output.with_suffix(".json").write_text(json.dumps(record, indent=1) + "\n")
