"""Sequences of several kinds in one training set or test: of several lengths, say."""

from __future__ import annotations

import dataclasses
import math
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int

from loglinear_jax.settings import SettingError, check_fields

if TYPE_CHECKING:
    from loglinear_jax.tasks.base import BaseTask

LARGEST_ROUND = 10_000  # steps in which each part comes as often as its weight says
MOST_PIECES = 32  # where a set is cut; each takes a call of its own


@dataclasses.dataclass(frozen=True)
class Mixture:
    """Mixture of tasks, such as several lengths, each with a weight.

    weights: whole numbers from 1 on; parts occur in proportion to them. names: of the parts, in tables.
    """

    parts: tuple[BaseTask, ...]
    weights: tuple[int, ...]
    names: tuple[str, ...]

    @classmethod
    def of(cls, task: BaseTask) -> Mixture:
        """The task alone."""
        return cls((task,), (1,), ("",))

    def check(self, setting: str) -> None:
        """Raises SettingError, naming the setting that lists the parts, if one of them admits no sequence or appears
        twice, or if their weights make a round too long."""
        if len(set(self.names)) < len(self.names):
            raise SettingError(f"{setting} names the same sequences twice: {', '.join(self.names)}")
        if min(self.weights) < 1 or sum(self.weights) > LARGEST_ROUND:
            raise SettingError(
                f"{setting} must have weights from 1 on that add up to at most {LARGEST_ROUND}, got {self.weights}"
            )
        for part, name in zip(self.parts, self.names, strict=True):
            try:
                check_fields(part, "task")
                part.check()
            except SettingError as error:
                raise SettingError(f"{setting}: {name}: {error}") from error

    @property
    def longest_part(self) -> BaseTask:
        """The part with the longest sequences; the last of several."""
        return max(reversed(self.parts), key=lambda part: part.seq_len)

    @property
    def longest(self) -> int:
        """Tokens in its longest sequences."""
        return self.longest_part.seq_len

    @property
    def mean_length(self) -> float:
        """Tokens in a sequence, on average."""
        return float(np.average([part.seq_len for part in self.parts], weights=self.weights))

    def split(self, num: int) -> tuple[int, ...]:
        """How many of `num` sequences each part has: in proportion, rounded, and at least one."""
        return tuple(max(1, round(num * weight / sum(self.weights))) for weight in self.weights)

    def pieces(self, num: int, like: int) -> tuple[int, int]:
        """How to cut a set of `num` sequences into pieces of the sizes that a set of `like` sequences has: (how many pieces,
        sequences in each); the last may have to be filled up. If there would be more than MOST_PIECES, one piece of all."""
        count = max(-(-ours // theirs) for ours, theirs in zip(self.split(num), self.split(like), strict=True))
        return (count, like) if count <= MOST_PIECES else (1, num)

    def at(self, steps: Int[Array, " N"]) -> Int[Array, " N"]:
        """Which part each step's batch comes from; the same for every seed, so that all batches of a step have one
        length.

        A round has as many steps as the weights, divided by their common divisor, add up to. In it each part occurs as
        often as its weight says, in an order drawn for the round.
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
        """Sequences of each part, `num` in all, by a method of its task. A single part draws with the key itself."""
        keys = [key] if len(self.parts) == 1 else jax.random.split(key, len(self.parts))
        return tuple(
            getattr(part, method)(of_part, count)
            for part, of_part, count in zip(self.parts, keys, self.split(num), strict=True)
        )
