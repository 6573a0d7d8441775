"""Interleaved multi-query associative recall: pairs and queries stand in any order, so that answers stand near and far."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int

from loglinear_jax.settings import setting
from loglinear_jax.tasks.base import Task
from loglinear_jax.tasks.draws import distinct, distinct_of_many
from loglinear_jax.tasks.lookup import check_distinct_keys, check_length, last_places, values_behind


@dataclasses.dataclass(frozen=True)
class Interleaved(Task):
    """k keys among filler, each with its value and later once more: answer the second with the value behind the first.

    A sequence has T // 2 slots of two tokens (of an odd T the last token is filler). For each key two slots are drawn: the
    earlier holds the key and its value, the later the key again, which is the query, and filler. The 2k slots of a sequence
    are drawn without replacement and paired at random. Its keys are drawn without replacement from 1 .. V/2-1, values and
    filler with replacement from V/2 .. V-1, so no key stands anywhere by chance. Scored at the queries only.

    A task of this project. In `Mqar` every answer is at one Fenwick level; here the level differs from query to query, and
    neither the query nor its position says which it is.
    """

    num_pairs: int = setting(24, "key-value pairs", least=1)

    TITLE = "Interleaved MQAR"
    AXIS = ("num_pairs", "kv", "key-value pairs")

    ROLES = ("key", "value", "filler", "query")
    ANSWERS = ("value",)

    @property
    def scored(self):
        return slice(2, self.seq_len - 1, 2)

    @property
    def num_scored(self):
        return self.num_pairs

    def roles(self, tokens):
        is_key = self._is_key(tokens)
        is_query = is_key & (last_places(tokens, is_key) == np.arange(tokens.shape[1]))
        is_value = np.pad(is_key & ~is_query, [(0, 0), (1, 0)])[:, :-1]
        return np.select(
            [is_query, is_key, is_value], [self.ROLES.index(name) for name in ("query", "key", "value")], 2
        )

    def sources(self, tokens, targets):
        return values_behind(tokens, targets, self._is_key(tokens) & (targets < 0))

    def _is_key(self, tokens):
        return (tokens >= 1) & (tokens < self.vocab_size // 2)

    def check(self) -> None:
        check_length(self.seq_len, self.num_pairs)
        check_distinct_keys(self.vocab_size, self.num_pairs)

    def slots(self, key: jax.Array, num: int) -> Int[Array, "num P 2"]:
        """The two slots of each pair, in any order."""
        return distinct(key, num, 2 * self.num_pairs, self.seq_len // 2).reshape(num, self.num_pairs, 2)

    def sample(self, key, num):
        pairs, half = self.num_pairs, self.vocab_size // 2
        key_keys, key_slots, key_others = jax.random.split(key, 3)
        keys = 1 + distinct_of_many(key_keys, num, pairs, half - 1)
        slots = 2 * self.slots(key_slots, num)
        others = jax.random.randint(key_others, (num, self.seq_len), half, self.vocab_size, jnp.int32)

        rows, pair, query = jnp.arange(num)[:, None], slots.min(-1), slots.max(-1)
        tokens = others.at[rows, pair].set(keys).at[rows, query].set(keys)
        targets = jnp.full_like(tokens, -1).at[rows, query].set(others[rows, pair + 1])
        return tokens, targets


TASK = Interleaved
