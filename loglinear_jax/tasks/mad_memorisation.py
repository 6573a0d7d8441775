"""Memorisation of MAD (Poli et al. 2024; athms/mad-lab, mad/data/instances.py)."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Int

from loglinear_jax.settings import SettingError, other_default, setting
from loglinear_jax.tasks.base import Task


@dataclasses.dataclass(frozen=True)
class MadMemorisation(Task):
    """Keys, each followed by an insert token: output there the key's value, which stands in no sequence and never changes.

    The definition is MAD's (athms/mad-lab, mad/data/instances.py, memorization): T / 2 keys, uniform with replacement in the
    lower half of the ids 0 .. V-2, each before the insert token (V-1), at which its value is scored. Keys have values of their
    own from the upper half, by a map drawn at random from map_seed alone: the same in all sequences, of training and of test,
    and for all seeds. Parameters must hold it, for no context shows it.
    """

    seq_len: int = other_default(Task, "seq_len", 32)
    vocab_size: int = other_default(Task, "vocab_size", 256)
    map_seed: int = setting(12345, "seed of the map from keys to values", least=0)

    TITLE = "MAD memorisation"
    AXIS = ("vocab_size", "vocab", "token ids")

    ROLES = ("key", "insert")
    ANSWERS = ()  # no token is one

    @property
    def num_keys(self) -> int:
        return (self.vocab_size - 1) // 2

    @property
    def scored(self):
        return slice(1, None, 2)

    def roles(self, tokens):
        return np.where(tokens == self.vocab_size - 1, 1, 0)

    def check(self) -> None:
        if self.seq_len % 2:
            raise SettingError(f"task.seq_len must be even, got {self.seq_len}")
        if self.vocab_size < 3:
            raise SettingError(
                f"task.vocab_size must be at least 3, for a key, its value and the insert token, got {self.vocab_size}"
            )

    def sample(self, key, num):
        keys = jax.random.randint(key, (num, self.seq_len // 2), 0, self.num_keys, jnp.int32)
        tokens = jnp.stack([keys, jnp.full_like(keys, self.vocab_size - 1)], axis=-1).reshape(num, -1)
        values = jnp.asarray(values_of_keys(self.num_keys, self.vocab_size - 1, self.map_seed))
        targets = jnp.full_like(tokens, -1).at[:, self.scored].set(values[keys])
        return tokens, targets


@functools.cache
def values_of_keys(num_keys: int, end: int, seed: int) -> Int[np.ndarray, " keys"]:
    """Of each key a value of its own, from num_keys .. end-1."""
    return np.random.default_rng(seed).permutation(np.arange(num_keys, end, dtype=np.int32))[:num_keys]


TASK = MadMemorisation
