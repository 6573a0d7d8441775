"""In-context recall and noisy recall of MAD (Poli et al. 2024; athms/mad-lab, mad/data/instances.py)."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from loglinear_jax.settings import SettingError, other_default, setting
from loglinear_jax.tasks.base import Task
from loglinear_jax.tasks.lookup import previous_places


@dataclasses.dataclass(frozen=True)
class MadRecall(Task):
    """Pairs of a key and its value, keys coming again and again: answer each key that was there before with its value.

    The definition is MAD's (athms/mad-lab, mad/data/instances.py, in-context recall and noisy recall with multi_query):

    - A sequence is T / 2 pairs. Of the V - noise_vocab_size lowest ids the lower half are keys, the others values. A key is
      drawn uniformly with replacement; its value is drawn uniformly at its first pair and is the same in all that follow. The
      last pair's key is drawn uniformly from those that were there before.
    - With noise, each pair but the last is two tokens of noise (uniform in the noise_vocab_size highest ids) with probability
      frac_noise, except one of them, drawn uniformly, that never is. (MAD may draw the last pair for it, and then every other
      one may be noise.)
    - Scored at every key that was there before.

    The last token, the last pair's value, is not scored and answers nothing: MAD's sequences leave it out.
    """

    vocab_size: int = other_default(Task, "vocab_size", 16)
    frac_noise: float = setting(0.0, "share of pairs that are noise, below 1", least=0.0)
    noise_vocab_size: int = setting(0, "token ids, the highest, that are noise", least=0)

    TITLE = "MAD recall"
    AXIS = ("vocab_size", "vocab", "token ids")

    ROLES = ("key", "value", "noise", "query")
    ANSWERS = ("value",)

    @property
    def num_keys(self) -> int:
        """Ids of keys; of values as many, or one more."""
        return (self.vocab_size - self.noise_vocab_size) // 2

    @property
    def first_noise(self) -> int:
        return self.vocab_size - self.noise_vocab_size

    @property
    def scored(self):
        return slice(2, self.seq_len - 1, 2)

    def roles(self, tokens):
        """A query is a key that was there before."""
        is_key = tokens < self.num_keys
        is_query = is_key & (previous_places(tokens, is_key) >= 0)
        return np.select([is_query, is_key, tokens >= self.first_noise], [3, 0, 2], 1)

    def sources(self, tokens, targets):
        """The latest of the places at which the value stands behind its key."""
        return np.where(targets >= 0, previous_places(tokens, tokens < self.num_keys) + 1, np.int32(-1))

    def check(self) -> None:
        if self.seq_len % 2 or self.seq_len < 4:
            raise SettingError(f"task.seq_len must be even and at least 4, got {self.seq_len}")
        if self.frac_noise >= 1:
            raise SettingError(f"task.frac_noise must be below 1, got {self.frac_noise}")
        if self.frac_noise and not self.noise_vocab_size:
            raise SettingError(f"task.frac_noise={self.frac_noise} needs a noise_vocab_size of at least 1, got 0")
        if self.num_keys < 1:
            raise SettingError(
                f"task.vocab_size={self.vocab_size} is too small for noise_vocab_size={self.noise_vocab_size}: it takes at "
                f"least {self.noise_vocab_size + 2}"
            )

    def sample(self, key, num):
        num_keys, pairs = self.num_keys, self.seq_len // 2 - 1  # those before the last
        key_keys, key_values, key_last, key_is_noise, key_spared, key_noise = jax.random.split(key, 6)
        rows, number = jnp.arange(num)[:, None], jnp.arange(pairs)
        keys = jax.random.randint(key_keys, (num, pairs), 0, num_keys, jnp.int32)
        values = jax.random.randint(key_values, (num, num_keys), num_keys, self.first_noise, jnp.int32)  # of each key
        spared = jax.random.randint(key_spared, (num, 1), 0, pairs, jnp.int32)
        is_noise = jax.random.bernoulli(key_is_noise, self.frac_noise, (num, pairs)) & (number != spared)

        first = jnp.full((num, num_keys), pairs).at[rows, jnp.where(is_noise, num_keys, keys)].min(number, mode="drop")
        last = jax.random.categorical(key_last, jnp.where(first < pairs, 0.0, -jnp.inf))[:, None]
        is_query = ~is_noise & (first[rows, keys] < number)

        tokens = jnp.stack([keys, values[rows, keys]], axis=-1)
        if self.noise_vocab_size:
            noise = jax.random.randint(key_noise, tokens.shape, self.first_noise, self.vocab_size, jnp.int32)
            tokens = jnp.where(is_noise[:, :, None], noise, tokens)
        tokens = jnp.concatenate([tokens.reshape(num, -1), last, values[rows, last]], axis=1)
        queried = jnp.pad(is_query, [(0, 0), (0, 1)], constant_values=True)
        targets = jnp.full_like(tokens, -1).at[:, ::2].set(jnp.where(queried, tokens[:, 1::2], -1))
        return tokens, targets


TASK = MadRecall
