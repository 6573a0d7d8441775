"""Zoology's multi-query associative recall (HazyResearch/zoology, zoology/data/multiquery_ar.py)."""

from __future__ import annotations

import dataclasses
import re

import jax
import jax.numpy as jnp

from loglinear_jax.settings import SettingError, other_default, setting
from loglinear_jax.tasks.base import Task
from loglinear_jax.tasks.draws import distinct_of_many
from loglinear_jax.tasks.lookup import QueriesInSlots, check_distinct_keys, check_length
from loglinear_jax.tasks.mixture import Mixture


@dataclasses.dataclass(frozen=True)
class ZoologyMqar(QueriesInSlots):
    """k key-value pairs, then each key once more, most of them early, among random tokens: answer every key with its value.

    Definition and defaults are Zoology's (HazyResearch/zoology, zoology/data/multiquery_ar.py), of one pass through the pairs:

    - Positions 0 .. 2k-1 hold the pairs, key before value; keys are distinct in 1 .. V/2-1, values distinct in V/2 .. V-1.
    - The rest is slots of two tokens. Slots are drawn without replacement, slot i = 1, 2, .. in proportion to i^(a-1) with
      a = 0.01, for the first key of the pairs first; the key stands at the slot's first token, and is scored there.
    - All other tokens are filler, uniform in 0 .. V-1: also the one behind a query, so the answer is not shown. A key may stand
      there by chance.

    Zoology trains on sequences of several lengths and numbers of pairs, and evaluates on others. `mixture` and `tests` name
    them, "64/4*5,128/8" for two: five times as many of 64 tokens with 4 pairs as of 128 with 8. Where they are empty, all have
    seq_len and num_pairs. Each of the tests counts the same.

    Zoology wants an even seq_len below vocab_size; here any will do. `Mqar` is the paper's form of it: all its queries stand at
    the end, at equal distances.
    """

    seq_len: int = other_default(Task, "seq_len", 256)
    vocab_size: int = other_default(Task, "vocab_size", 8192)
    num_pairs: int = setting(16, "key-value pairs", least=1)
    mixture: str = setting(
        "", "training sequences as `length/pairs*weight`, such as `64/4*5,128/8`; empty: one kind only"
    )
    tests: str = setting(
        "", "validation and test sequences as `length/pairs`, such as `64/4,128/8`; empty: one kind only"
    )

    TITLE = "Zoology's MQAR"
    AXIS = ("num_pairs", "kv", "key-value pairs")

    @property
    def first_query(self):  # of a mixture, in the sequences that are looked at
        return 2 * (self.trained_on.longest_part if self.mixture else self).num_pairs

    def marks(self):
        return {"pairs end": self.first_query}

    @property
    def unread(self):
        return {"seq_len", "num_pairs"} if self.mixture and self.tests else set()

    @property
    def untold(self):
        return self.unread | ({"tests"} if self.tests == self.mixture else set())

    def check(self) -> None:
        if not self.unread:
            check_length(self.seq_len, self.num_pairs)
            check_distinct_keys(self.vocab_size, self.num_pairs)
        if "*" in self.tests:
            raise SettingError(f"task.tests has no weights, as each test counts the same, got {self.tests!r}")
        for name, mixture in (("mixture", self.trained_on), ("tests", self.evaluated_on)):
            if getattr(self, name):
                mixture.check(f"task.{name}")

    @property
    def trained_on(self):
        return self._mixture("mixture")

    @property
    def evaluated_on(self):
        return self._mixture("tests")

    def _mixture(self, name: str) -> Mixture:
        text = getattr(self, name)
        if not text:
            return Mixture.of(dataclasses.replace(self, mixture="", tests=""))
        found = [re.fullmatch(r"(\d+)/(\d+)(?:\*(\d+))?", part.strip(), re.ASCII) for part in text.split(",")]
        if not all(found):
            raise SettingError(f"task.{name} must be like 64/4*5,128/8 (length/pairs*weight), got {text!r}")
        sizes = [tuple(int(number or 1) for number in part.groups()) for part in found]
        return Mixture(
            parts=tuple(
                dataclasses.replace(self, seq_len=length, num_pairs=pairs, mixture="", tests="")
                for length, pairs, _ in sizes
            ),
            weights=tuple(weight for *_, weight in sizes),
            names=tuple(f"{length}/{pairs}" for length, pairs, _ in sizes),
        )

    def sample(self, key, num):
        pairs, half = self.num_pairs, self.vocab_size // 2
        key_keys, key_values, key_slots, key_filler = jax.random.split(key, 4)
        keys = 1 + distinct_of_many(key_keys, num, pairs, half - 1)
        values = half + distinct_of_many(key_values, num, pairs, self.vocab_size - half)
        places = self.query_places(key_slots, num)
        filler = jax.random.randint(key_filler, (num, self.seq_len), 0, self.vocab_size, jnp.int32)

        rows = jnp.arange(num)[:, None]
        tokens = filler.at[:, 0 : 2 * pairs : 2].set(keys).at[:, 1 : 2 * pairs : 2].set(values)
        tokens = tokens.at[rows, places].set(keys)
        targets = jnp.full_like(tokens, -1).at[rows, places].set(values)
        return tokens, targets


TASK = ZoologyMqar
