"""The runs that a page may name."""

from __future__ import annotations

import copy
import dataclasses
import fnmatch
import functools
import re
from collections.abc import Iterable
from pathlib import Path

from loglinear_jax.config import ConfigError, some_of
from loglinear_jax.runs.loading import Run, read_run
from loglinear_jax.runs.outcome import VariantOutcome, on_one_set
from loglinear_jax.tasks import ACCURACY


class Results:
    """The finished runs in a folder, read when they are asked for."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.names = sorted((path.parent.name for path in folder.glob("*/summary.json")), key=_natural)
        self._read: dict[str, Run] = {}

    def matching(self, patterns: str) -> list[Run]:
        """The runs of these comma-separated patterns. Raises ConfigError for a pattern that matches none."""
        names: dict[str, None] = {}
        for pattern in patterns.split(","):
            found = fnmatch.filter(self.names, pattern.strip())
            if not found:
                raise ConfigError(f"no run in {self.folder} matches {pattern.strip()!r}")
            names |= dict.fromkeys(found)
        return [self[name] for name in names]

    def __getitem__(self, name: str) -> Run:
        if name not in self._read:
            self._read[name] = read_run(self.folder / name)
        return self._read[name]

    def on_one_set(self, runs: Iterable[Run]) -> tuple[Results, VariantOutcome | None]:
        """The same results, in which the accuracies of these runs may be compared; and an outcome whose notes say what they
        are, None if none of the runs has a test."""
        chosen = {run.name: run for run in runs}
        outcomes = {(name, v): outcome for name, run in chosen.items() for v, outcome in run.outcomes.items()}
        compared = on_one_set(outcomes)
        results = copy.copy(self)
        if compared != outcomes:
            results._read = dict(self._read)
            for name, run in chosen.items():
                variants = {variant: compared[name, variant] for variant in run.outcomes}
                summary = dataclasses.replace(run.summary, variants=variants)
                results._read[name] = dataclasses.replace(run, summary=summary)
        tested = [key for key, o in outcomes.items() if o.score is ACCURACY and o.test_accuracy is not None]
        return results, compared[tested[0]] if tested else None


def outcome_of(run: Run, variant: str) -> VariantOutcome:
    """Raises ConfigError if the run has no such variant."""
    if variant not in run.outcomes:
        raise ConfigError(f"{run.name} has no variant {variant!r}: it has {some_of(run.outcomes)}")
    return run.outcomes[variant]


@functools.cache
def _natural(name: str) -> tuple:
    """So that kv4 comes before kv16."""
    return tuple(int(part) if part.isdecimal() else part for part in re.split(r"(\d+)", name))
