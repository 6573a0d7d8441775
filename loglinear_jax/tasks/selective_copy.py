"""Selective copying (Gu & Dao 2023), laid out as in the paper's released code."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from loglinear_jax.settings import SettingError, other_default, setting
from loglinear_jax.tasks.base import Task
from loglinear_jax.tasks.draws import distinct, increasing

SEPARATOR, BLANK, FIRST_DATA = 1, 2, 3


@dataclasses.dataclass(frozen=True)
class SelectiveCopy(Task):
    """Distinct data tokens at random places in noise, then a separator and blanks: output the data tokens in order.

    With n data tokens: seq_len - n - 1 positions of noise (uniform in V/2+3 .. V-1) with data tokens (3 .. V/2+1) in it,
    the separator (1), then n blanks (2). Scored at the separator and the first n-1 blanks.
    """

    seq_len: int = other_default(Task, "seq_len", 256)
    num_tokens: int = setting(16, "data tokens to copy", least=1)

    TITLE = "Selective copying"
    AXIS = ("seq_len", "length", "length")

    ROLES = ("noise", "data", "separator", "blank")
    ANSWERS = ("data",)

    def roles(self, tokens):
        data = (tokens >= FIRST_DATA) & (tokens < FIRST_DATA + self.num_data_ids)
        return np.select([data, tokens == SEPARATOR, tokens == BLANK], [1, 2, 3], 0)

    def sources(self, tokens, targets):
        found = np.full(tokens.shape, -1, np.int32)
        found[targets >= 0] = np.nonzero(self.roles(tokens) == self.ROLES.index("data"))[1]  # both are in order
        return found

    def marks(self):
        return {"copy target": self.context_len}

    @property
    def context_len(self) -> int:
        """Tokens before the separator."""
        return self.seq_len - self.num_tokens - 1

    @property
    def scored(self):
        return slice(self.context_len, self.seq_len - 1)

    @property
    def num_data_ids(self) -> int:
        return self.vocab_size // 2 - 1

    @property
    def first_noise(self) -> int:
        return FIRST_DATA + self.num_data_ids + 1

    def check(self) -> None:
        count = self.num_tokens
        if self.seq_len < 2 * count + 1:
            raise SettingError(
                f"task.seq_len={self.seq_len} is too short for num_tokens={count}: it takes at least {2 * count + 1}"
            )
        smallest = max(2 * (count + 1), 8)
        if self.vocab_size < smallest:
            raise SettingError(
                f"task.vocab_size={self.vocab_size} is too small for num_tokens={count} distinct tokens and noise: "
                f"it takes at least {smallest}"
            )

    def sample(self, key, num):
        count, context = self.num_tokens, self.context_len
        key_noise, key_data, key_place = jax.random.split(key, 3)
        noise = jax.random.randint(key_noise, (num, context), self.first_noise, self.vocab_size, jnp.int32)
        data = FIRST_DATA + distinct(key_data, num, count, self.num_data_ids)
        place = increasing(key_place, num, count, context)

        context_tokens = jax.vmap(lambda row, at, tokens: row.at[at].set(tokens))(noise, place, data)
        separator = jnp.full((num, 1), SEPARATOR, noise.dtype)
        blanks = jnp.full((num, count), BLANK, noise.dtype)
        tokens = jnp.concatenate([context_tokens, separator, blanks], axis=1)
        targets = jnp.full_like(tokens, -1).at[:, self.scored].set(data)
        return tokens, targets


TASK = SelectiveCopy
