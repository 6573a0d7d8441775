"""Selective copying of MAD (Poli et al. 2024; athms/mad-lab, mad/data/instances.py)."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from loglinear_jax.settings import SettingError, other_default, setting
from loglinear_jax.tasks.base import Task


@dataclasses.dataclass(frozen=True)
class MadCopying(Task):
    """Data tokens with blanks in between, then a copy token and blanks: output the data tokens in order.

    The definition is MAD's (athms/mad-lab, mad/data/instances.py, selective copying): n data tokens, uniform in 0 .. V-3 with
    replacement; T - 2n - 1 blanks (V-2), each of which goes before a data token drawn uniformly, so that the last data token
    stands before the copy token (V-1); then n blanks, at which the data are scored in order.

    `SelectiveCopy` is the paper's form of it: distinct data in noise, scored from the separator on.
    """

    seq_len: int = other_default(Task, "seq_len", 256)
    vocab_size: int = other_default(Task, "vocab_size", 16)
    num_tokens: int = setting(16, "data tokens to copy", least=1)

    TITLE = "MAD selective copying"
    AXIS = ("num_tokens", "tokens", "data tokens")

    ROLES = ("blank", "data", "copy")
    ANSWERS = ("data",)

    @property
    def context_len(self) -> int:
        """Tokens before the copy token."""
        return self.seq_len - self.num_tokens - 1

    @property
    def scored(self):
        return slice(self.context_len + 1, None)

    def roles(self, tokens):
        return np.select([tokens < self.vocab_size - 2, tokens == self.vocab_size - 1], [1, 2], 0)

    def sources(self, tokens, targets):
        found = np.full(tokens.shape, -1, np.int32)
        found[targets >= 0] = np.nonzero(tokens < self.vocab_size - 2)[1]  # both are in order
        return found

    def marks(self):
        return {"copy": self.context_len}

    def check(self) -> None:
        count = self.num_tokens
        if self.seq_len < 2 * count + 2:
            raise SettingError(
                f"task.seq_len={self.seq_len} is too short for num_tokens={count}: it takes at least {2 * count + 2}"
            )
        if self.vocab_size < 3:
            raise SettingError(
                f"task.vocab_size must be at least 3, for data, blank and copy token, got {self.vocab_size}"
            )

    def sample(self, key, num):
        count, context = self.num_tokens, self.context_len
        blank, copy = self.vocab_size - 2, self.vocab_size - 1
        key_data, key_blanks = jax.random.split(key)
        data = jax.random.randint(key_data, (num, count), 0, blank, jnp.int32)
        before = jax.random.randint(
            key_blanks, (num, context - count), 0, count
        )  # the data token that a blank precedes
        rows = jnp.arange(num)[:, None]
        blanks = jnp.zeros((num, count), jnp.int32).at[rows, before].add(1)
        places = jnp.arange(count) + jnp.cumsum(blanks, axis=1)

        tokens = jnp.full((num, self.seq_len), blank).at[rows, places].set(data).at[:, context].set(copy)
        targets = jnp.full_like(tokens, -1).at[:, self.scored].set(data)
        return tokens, targets


TASK = MadCopying
