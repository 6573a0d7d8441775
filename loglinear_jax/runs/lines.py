"""Files of one JSON record a line, of which a kill may have cut off the last one and anything may have damaged others."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from loglinear_jax.train import TrainSettings


def read_lines(path: Path, check: Callable[[Any], None]) -> tuple[list[dict[str, Any]], list[int]]:
    """(records, numbers of the lines that are none) of a file; none of both if there is no file.

    check: raises ValueError, KeyError or TypeError for a value that is no record. A last line without its newline is left out
    without a word.
    """
    if not path.exists():
        return [], []
    found, damaged = [], []
    lines = path.read_bytes().split(b"\n")
    for number, line in enumerate(lines, 1):
        if not line:
            continue
        try:
            record = json.loads(line)
            check(record)
        except (ValueError, KeyError, TypeError, RecursionError):
            if number < len(lines):
                damaged.append(number)
        else:
            found.append(record)
    return found, damaged


CURVES = ("step", "train_loss", "val_loss", "val_accuracy")


def check_metrics(record: Any) -> None:
    """Raises ValueError, KeyError or TypeError for what is not the record of an evaluation."""
    per_seed = [record[name] for name in (*CURVES[1:], "active")]
    rates = [record[name] for name in ("seconds", "seed_steps_per_second", "tokens_per_second")]
    if not isinstance(record["variant"], str) or type(record["step"]) is not int or record["step"] < 0:
        raise ValueError("variant or step")
    if len({len(values) for values in per_seed}) != 1 or not all(isinstance(values, list) for values in per_seed):
        raise ValueError("lists of different lengths")
    if not all(_is_number(value) or value is None for values in per_seed for value in values):
        raise ValueError("an entry that is no number")
    if not all(map(_is_number, rates)):
        raise ValueError("a rate that is no number")


def check_process(record: Any) -> None:
    """Raises ValueError, KeyError or TypeError for what is not the record of a process."""
    if not isinstance(record["variant"], str) or not isinstance(record["provenance"]["commit"], str):
        raise ValueError("variant or commit")
    if "text" in record:
        record["text"]["splits"], record["text"]["tokenizer_sha256"]
    if not isinstance(record.get("modules", {}), dict):
        raise ValueError("modules")


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float))


def missing_evaluations(records: Sequence[Mapping[str, Any]], train: TrainSettings, last_step: int) -> str | None:
    """Which evaluations up to a step are not recorded, in words; None if all are."""
    expected = {*range(train.eval_every, last_step + 1, train.eval_every)}
    if last_step == train.num_steps:
        expected.add(last_step)
    missing = sorted(expected - {record["step"] for record in records})
    if not missing:
        return None
    shown = ", ".join(map(str, missing[:5])) + (", ..." if len(missing) > 5 else "")
    return f"metrics.jsonl lacks the evaluations at step {shown} ({len(missing)} of {len(expected)})"
