"""Forgetting multi-query associative recall (HazyResearch/zoology, zoology/data/forgetting_mqar.py)."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from loglinear_jax.settings import SettingError, other_default, setting
from loglinear_jax.tasks.base import Task
from loglinear_jax.tasks.draws import distinct, distinct_of_many
from loglinear_jax.tasks.lookup import QueriesInSlots, check_distinct_keys


@dataclasses.dataclass(frozen=True)
class Forgetting(QueriesInSlots):
    """k key-value pairs, then u of the keys again with new values, then each key once more: answer with its last value.

    Definition and defaults are Zoology's (HazyResearch/zoology, zoology/data/forgetting_mqar.py):

    - Positions 0 .. 2k-1 hold the pairs, keys distinct in 1 .. V/2-1, values distinct in V/2 .. V-1. Positions 2k .. 2k+2u-1
      hold the updates: u distinct keys of the k in random order, each with a value other than its first.
    - The rest is slots of two tokens. Slots are drawn without replacement, slot i = 1, 2, .. in proportion to i^(a-1) with
      a = 0.01, for the first key of the pairs first; the key stands at the slot's first token, and is scored there.
    - All other tokens are filler: `random`, uniform in 0 .. V-1, so that a key may stand there by chance, or `zero`.

    With num_updates=0 it is `ZoologyMqar`.

    Left open there, and chosen here: their text wants a new value that differs from the key's first; their code compares it
    with the first value of another key, so that about 2 of V updates change nothing. Here every update is one. They want an
    even seq_len below vocab_size; here any will do.
    """

    vocab_size: int = other_default(Task, "vocab_size", 8192)
    num_pairs: int = setting(8, "key-value pairs", least=1)
    num_updates: int = setting(4, "keys that get a second value", least=0)
    filler: str = setting("random", "tokens at all other positions: `random` or `zero`", choices=("random", "zero"))

    TITLE = "Forgetting MQAR"
    AXIS = ("num_pairs", "kv", "key-value pairs")

    ROLES = (*QueriesInSlots.ROLES, "updated key", "new value")
    ANSWERS = ("value", "new value")

    @property
    def first_query(self):
        return 2 * (self.num_pairs + self.num_updates)

    def roles(self, tokens):
        at = np.arange(tokens.shape[1])
        is_update = (at >= 2 * self.num_pairs) & (at < self.first_query)
        return np.where(is_update, 4 + at % 2, super().roles(tokens))

    def marks(self):
        return {"pairs end": 2 * self.num_pairs, "updates end": self.first_query}

    def check(self) -> None:
        pairs, updates = self.num_pairs, self.num_updates
        if updates > pairs:
            raise SettingError(f"task.num_updates must be at most num_pairs={pairs}, got {updates}")
        if self.seq_len < 4 * pairs + 2 * updates:
            raise SettingError(
                f"task.seq_len={self.seq_len} is too short for num_pairs={pairs} and num_updates={updates}: it takes at "
                f"least {4 * pairs + 2 * updates}"
            )
        check_distinct_keys(self.vocab_size, pairs)

    def sample(self, key, num):
        pairs, updates, half = self.num_pairs, self.num_updates, self.vocab_size // 2
        key_keys, key_values, key_updated, key_steps, key_slots, key_filler = jax.random.split(key, 6)
        num_values = self.vocab_size - half
        keys = 1 + distinct_of_many(key_keys, num, pairs, half - 1)
        first = distinct_of_many(key_values, num, pairs, num_values)
        updated = distinct(key_updated, num, updates, pairs)
        # A step from one value to any other, round in a circle.
        steps = jax.random.randint(key_steps, (num, updates), 1, num_values, jnp.int32)
        new = (jnp.take_along_axis(first, updated, axis=1) + steps) % num_values
        rows = jnp.arange(num)[:, None]
        answers = half + first.at[rows, updated].set(new)
        places = self.query_places(key_slots, num)

        pair_end, end = 2 * pairs, self.first_query
        tokens = jnp.zeros((num, self.seq_len), jnp.int32)
        if self.filler == "random":
            tokens = jax.random.randint(key_filler, tokens.shape, 0, self.vocab_size, jnp.int32)
        tokens = tokens.at[:, 0:pair_end:2].set(keys).at[:, 1:pair_end:2].set(half + first)
        tokens = tokens.at[:, pair_end:end:2].set(jnp.take_along_axis(keys, updated, axis=1))
        tokens = tokens.at[:, pair_end + 1 : end : 2].set(half + new)
        tokens = tokens.at[rows, places].set(keys)
        targets = jnp.full_like(tokens, -1).at[rows, places].set(answers)
        return tokens, targets


TASK = Forgetting
