"""Which seeds steps are computed for: seeds that stopped are left out once that is worth compiling for fewer."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import jax
import numpy as np

from loglinear_jax.train import ManySeeds


def steps_worth_compiling() -> int:
    """So many steps of one seed take about as long as compiling steps for fewer seeds, of each part of a task's mixture. Not
    measured, so that all runs do alike."""
    return 2_000 if jax.default_backend() == "cpu" else 16_000


class IdleSeeds:
    """Counts the steps that stopped seeds cost, from the records of the evaluations: a run that goes on after a stop computes
    what it would have without one.

    records: those of the evaluations so far. rows: `ManySeeds.rows_to_train`, None for all seeds.
    """

    def __init__(self, many: ManySeeds, num_steps: int, eval_every: int, records: Iterable[Mapping[str, Any]]):
        self._many, self._num_steps, self._eval_every = many, num_steps, eval_every
        self._active = np.ones(len(many.numbers), bool)
        self._idle_seed_steps = 0
        self.rows: jax.Array | None = None
        for record in records:
            self.count(record)

    @property
    def num_computed(self) -> int:
        """Seeds that steps are computed for, some that stopped included."""
        return len(self._active) if self.rows is None else self.rows.size

    def count(self, record: Mapping[str, Any]) -> None:
        """After an evaluation: leaves stopped seeds out once steps worth compiling were spent on them, and as many are
        ahead."""
        self._idle_seed_steps += self._eval_every * (self.num_computed - self._active.sum())
        self._active = np.asarray(record["active"])
        ahead = (self._num_steps - record["step"]) * (self.num_computed - self._active.sum())
        parts = len(self._many.trainer.task.trained_on.parts)
        if min(self._idle_seed_steps, ahead) >= steps_worth_compiling() * parts:
            self.rows, self._idle_seed_steps = self._many.rows_to_train(self._active), 0
