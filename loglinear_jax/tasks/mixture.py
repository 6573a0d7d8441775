"""Sequences of several kinds in one training set or test: of several lengths, say."""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int

if TYPE_CHECKING:
    from loglinear_jax.tasks.base import BaseTask


@dataclasses.dataclass(frozen=True)
class Mixture:
    """Parts, each a task of its own, and how much of each there is.

    weights: whole numbers from 1 on; parts come in proportion to them. names: of the parts, in tables.
    """

    parts: tuple[BaseTask, ...]
    weights: tuple[int, ...]
    names: tuple[str, ...]

    @classmethod
    def of(cls, task: BaseTask) -> Mixture:
        """The task alone."""
        return cls((task,), (1,), ("",))

    @property
    def longest(self) -> int:
        """Tokens in its longest sequences."""
        return max(part.seq_len for part in self.parts)

    @property
    def mean_length(self) -> float:
        """Tokens in a sequence, on average."""
        return float(np.average([part.seq_len for part in self.parts], weights=self.weights))

    def split(self, num: int) -> tuple[int, ...]:
        """How many of `num` sequences each part has: in proportion, rounded, and at least one."""
        return tuple(max(1, round(num * weight / sum(self.weights))) for weight in self.weights)

    def at(self, steps: Int[Array, " N"]) -> Int[Array, " N"]:
        """Which part each step's batch is of; the same for every seed, so that all of them have batches of one length.

        In a round of steps, as many as the weights add up to without their common divisor, each part comes as often as its
        weight says, in an order that is drawn for the round.
        """
        divisor = math.gcd(*self.weights)
        of_round = np.repeat(np.arange(len(self.parts)), [weight // divisor for weight in self.weights])

        def one(step):
            key = jax.random.fold_in(jax.random.key(0), step // len(of_round))
            return jax.random.permutation(key, of_round)[step % len(of_round)]

        return jnp.zeros_like(steps) if len(self.parts) == 1 else jax.vmap(one)(steps)

    def draw(
        self, key: jax.Array, num: int, method: str = "sample"
    ) -> tuple[tuple[Int[Array, "num_of_part T"], Int[Array, "num_of_part T"]], ...]:
        """Sequences of each part, `num` in all, by a method of its task. The first draws by the key itself."""
        keys = [key, *map(functools.partial(jax.random.fold_in, key), range(1, len(self.parts)))]
        return tuple(
            getattr(part, method)(of_part, count)
            for part, of_part, count in zip(self.parts, keys, self.split(num), strict=True)
        )
