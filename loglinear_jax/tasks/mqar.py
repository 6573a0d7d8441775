"""Multi-query associative recall (Arora et al. 2023), laid out as in the paper's released code."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from loglinear_jax.settings import setting
from loglinear_jax.tasks.base import Task
from loglinear_jax.tasks.draws import distinct
from loglinear_jax.tasks.lookup import check_distinct_keys, check_length, values_behind


@dataclasses.dataclass(frozen=True)
class Mqar(Task):
    """k key-value pairs, then filler, then each key once more: answer every key with its value.

    Positions 0 .. 2k-1 hold the pairs, key before value; keys are distinct in 1 .. V/2-1, values distinct in V/2 .. V-1.
    Of the last 2k positions every second one holds a key, in random order. All other positions are filler, uniform in
    1 .. V-1. Scored at the query keys only.

    As filler is drawn from keys, too, a key may occur again between its pair and its query, with a token behind it that is not
    its value: at T = 128, V = 128 and 8 pairs for more than half of the queries.
    """

    num_pairs: int = setting(8, "key-value pairs", least=1)

    TITLE = "MQAR"
    AXIS = ("num_pairs", "kv", "key-value pairs")

    ROLES = ("key", "value", "filler", "query")
    ANSWERS = ("value",)

    @property
    def first_query(self) -> int:
        return self.seq_len - 2 * self.num_pairs

    @property
    def scored(self):
        return slice(self.first_query, None, 2)

    def roles(self, tokens):
        of_position = np.full(self.seq_len, self.ROLES.index("filler"))
        of_position[0 : 2 * self.num_pairs : 2] = self.ROLES.index("key")
        of_position[1 : 2 * self.num_pairs : 2] = self.ROLES.index("value")
        of_position[self.scored] = self.ROLES.index("query")
        return np.broadcast_to(of_position, tokens.shape)

    def sources(self, tokens, targets):
        in_pairs = np.arange(tokens.shape[1]) < 2 * self.num_pairs
        return values_behind(tokens, targets, in_pairs & (np.arange(tokens.shape[1]) % 2 == 0))

    def marks(self):
        return {"pairs end": 2 * self.num_pairs, "queries": self.first_query}

    def check(self) -> None:
        check_length(self.seq_len, self.num_pairs)
        check_distinct_keys(self.vocab_size, self.num_pairs)

    def sample(self, key, num):
        pairs, half = self.num_pairs, self.vocab_size // 2
        key_keys, key_values, key_order, key_filler = jax.random.split(key, 4)
        keys = 1 + distinct(key_keys, num, pairs, half - 1)
        values = half + distinct(key_values, num, pairs, self.vocab_size - half)
        order = distinct(key_order, num, pairs, pairs)
        queries, answers = (jnp.take_along_axis(x, order, axis=1) for x in (keys, values))
        filler = jax.random.randint(key_filler, (num, self.seq_len), 1, self.vocab_size, jnp.int32)

        tokens = filler.at[:, 0 : 2 * pairs : 2].set(keys).at[:, 1 : 2 * pairs : 2].set(values)
        tokens = tokens.at[:, self.scored].set(queries)
        targets = jnp.full_like(tokens, -1).at[:, self.scored].set(answers)
        return tokens, targets


TASK = Mqar
