"""Modules of the user's own that a run takes its λ or task from: no commit says what is in them, so it is recorded."""

from __future__ import annotations

import importlib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from loglinear_jax.config import Experiment
from loglinear_jax.files import file_sha256


def own_modules(*experiments: Experiment) -> dict[str, str]:
    """The SHA-256 of the source file of each module outside this package that has an experiment's λ or task, by its name."""
    names: set[str] = set()
    for experiment in experiments:
        parts = (experiment.task, *experiment.task.trained_on.parts, *experiment.task.evaluated_on.parts)
        names |= {type(part).__module__ for part in parts}
        names |= experiment.model.settings.own_modules
    return {name: sha for name in sorted(names) if (sha := _sha256(name)) is not None}


def changed_modules(now: Mapping[str, str], processes: Sequence[Mapping[str, Any]]) -> Iterable[str]:
    """A line for each module that is another one than the last process with it recorded."""
    for name, sha in now.items():
        before = [process["modules"][name] for process in processes if name in process.get("modules", {})]
        if before and before[-1] != sha:
            yield f"the file of {name} has changed since this was trained, and what is computed now is of the new one"


def _sha256(name: str) -> str | None:
    """None of this package's modules, and of one without a source file."""
    if name.partition(".")[0] == __name__.partition(".")[0]:
        return None
    spec = getattr(importlib.import_module(name), "__spec__", None)
    if spec is None or not spec.has_location:
        return None
    try:
        return file_sha256(Path(spec.origin))
    except OSError:  # as of a module in an archive
        return None
