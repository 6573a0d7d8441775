"""State tracking: word problems of small groups (Grazzi et al. 2025; Siems et al. 2025)."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import re

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Int

from loglinear_jax.settings import SettingError, other_default, setting
from loglinear_jax.tasks.base import Task
from loglinear_jax.tasks.mixture import Mixture

OBJECTS = {"parity": 2, "s3": 3, "s4": 4, "s5": 5}  # of which the group's elements are all the permutations


@dataclasses.dataclass(frozen=True)
class StateTracking(Task):
    """Each token is an element of a group, uniform and independent; at each, output the product of all so far.

    The groups are those of all permutations of n objects, 2 for `parity` (whose product is the number of ones, odd or even) and
    n for `sN`. Token i is the i-th permutation in lexicographic order, so 0 is the identity; a product applies the first token
    first.

    No state of a few numbers that only decays, with no negative eigenvalue, tells the parities of sequences of any length apart
    (Grazzi et al. 2025, theorem 1).
    """

    seq_len: int = other_default(Task, "seq_len", 40)
    vocab_size: int = other_default(Task, "vocab_size", 2)
    group: str = setting(
        "parity", "`parity`, or all permutations of 3, 4 or 5 objects: `s3`, `s4`, `s5`", choices=tuple(OBJECTS)
    )
    tests: str = setting(
        "", "lengths of the validation and test sequences, such as 40,80,160, with equal weight; empty: seq_len"
    )

    TITLE = "State tracking"
    AXIS = ("seq_len", "length", "length")

    def check(self) -> None:
        size = len(elements(self.group))
        if self.vocab_size != size:
            raise SettingError(
                f"task.vocab_size must be {size}, the elements of group={self.group}, got {self.vocab_size}"
            )
        if self.tests:
            self.evaluated_on.check("task.tests")

    @property
    def evaluated_on(self):
        if not self.tests:
            return Mixture.of(self)
        lengths = [part.strip() for part in self.tests.split(",")]
        if not all(re.fullmatch("[0-9]{1,9}", length) for length in lengths):
            raise SettingError(
                f"task.tests must be lengths with commas between them, such as 40,80, got {self.tests!r}"
            )
        parts = tuple(dataclasses.replace(self, seq_len=int(length), tests="") for length in lengths)
        return Mixture(parts, (1,) * len(parts), tuple(f"length {length}" for length in lengths))

    def shown(self, token):
        return "".join(map(str, elements(self.group)[token]))

    def sample(self, key, num):
        table = jnp.asarray(products(self.group))
        tokens = jax.random.randint(key, (num, self.seq_len), 0, self.vocab_size, jnp.int32)
        return tokens, jax.lax.associative_scan(lambda before, after: table[before, after], tokens, axis=1)


@functools.cache
def elements(group: str) -> Int[np.ndarray, "E N"]:
    """The permutations that are the group's elements: element e takes object n to the place elements[e, n]."""
    return np.array(list(itertools.permutations(range(OBJECTS[group]))), np.int32)


@functools.cache
def products(group: str) -> Int[np.ndarray, "E E"]:
    """At [a, b] the element that does what a does, and then what b does."""
    permutations = elements(group)
    number = {tuple(permutation): index for index, permutation in enumerate(permutations.tolist())}
    return np.array([[number[tuple(b[a].tolist())] for b in permutations] for a in permutations], np.int32)


TASK = StateTracking
