"""Fuzzy in-context recall of MAD (Poli et al. 2024; athms/mad-lab, mad/data/instances.py)."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int

from loglinear_jax.settings import SettingError, other_default, setting
from loglinear_jax.tasks.base import Task
from loglinear_jax.tasks.draws import distinct_of_many
from loglinear_jax.tasks.lookup import previous_places


@dataclasses.dataclass(frozen=True)
class MadFuzzy(Task):
    """Pairs of a key and its value, each of one or several tokens: answer each key that was there before with its whole value.

    The definition is MAD's (athms/mad-lab, mad/data/instances.py, fuzzy in-context recall with multi_query):

    - The lower half of the ids 0 .. V-2 is for keys, the upper for values; V-1 is padding. A key or a value is a *motif*:
      distinct tokens in an order, all motifs of a length equally likely. In training keys have 1 .. key_motif tokens, in
      validation and test key_motif; values have 1 .. value_motif. All lengths are equally likely.
    - A sequence is pairs, drawn independently, but for the value of a key that was there before: it is the same again. One
      more pair, the probe, stands at the end and once before: where the first pair begins from a position on that is drawn
      uniformly, unless its key has come up before by chance. Pairs are added as long as there is room for any pair and the
      probe. Padding stands in front.
    - Scored at every token of the value of a key that was there before, each at the token before it. Of the probe's value at
      the end, the last token is only a target.

    MAD draws that position from 0 .. T - 2 · (the probe's length) - 1, and a sequence with a late one may end before it: then
    the key at the end was never there. Here no position is so late.
    """

    vocab_size: int = other_default(Task, "vocab_size", 16)
    key_motif: int = setting(3, "tokens of the longest key", least=1)
    value_motif: int = setting(3, "tokens of the longest value", least=1)

    TITLE = "MAD fuzzy recall"
    AXIS = ("vocab_size", "vocab", "token ids")

    ROLES = ("key", "value", "padding")
    ANSWERS = ("value",)

    @property
    def num_keys(self) -> int:
        """Ids for keys; for values as many, or one more."""
        return (self.vocab_size - 1) // 2

    @property
    def longest(self) -> int:
        """Tokens of the longest pair."""
        return self.key_motif + self.value_motif

    def roles(self, tokens):
        return np.select([tokens < self.num_keys, tokens == self.vocab_size - 1], [0, 2], 1)

    def sources(self, tokens, targets):
        """The latest of the places at which the token stands in the key's value."""
        at, is_key = np.arange(tokens.shape[1]), tokens < self.num_keys
        last = np.maximum.accumulate(np.where(is_key, at, -1), axis=1)  # where the key ends to which a token belongs
        first = 1 + np.maximum.accumulate(np.where(is_key, -1, at), axis=1)  # of a key's token: where the key begins
        back = at[:, None] - np.arange(self.key_motif)
        motifs = np.where(back >= first[..., None], tokens[:, np.maximum(back, 0)], -1)
        numbers = np.unique(motifs.reshape(-1, self.key_motif), axis=0, return_inverse=True)[1].reshape(tokens.shape)
        ends = is_key & ~np.pad(is_key, [(0, 0), (0, 1)])[:, 1:]
        earlier = np.take_along_axis(previous_places(numbers, ends), np.maximum(last, 0), axis=1)
        return np.where(targets >= 0, earlier + 1 + at - last, -1).astype(np.int32)

    def check(self) -> None:
        if self.seq_len < 3 * self.longest:
            raise SettingError(
                f"task.seq_len={self.seq_len} is too short for key_motif={self.key_motif} and value_motif="
                f"{self.value_motif}: it takes at least {3 * self.longest}"
            )
        smallest = 1 + max(2 * self.key_motif, 2 * self.value_motif - 1)
        if self.vocab_size < smallest:
            raise SettingError(
                f"task.vocab_size={self.vocab_size} is too small for motifs of distinct tokens, key_motif={self.key_motif} and "
                f"value_motif={self.value_motif}: it takes at least {smallest}"
            )

    def sample(self, key, num):
        return self._sample(key, num, shortest_key=1)

    def sample_evaluation(self, key, num):
        return self._sample(key, num, shortest_key=self.key_motif)

    def _sample(self, key, num, shortest_key):
        key_keys, key_values, key_place = jax.random.split(key, 3)
        # The probe, and as many pairs as fit if all are the shortest.
        shape = num, 1 + -(-(self.seq_len - self.longest) // (shortest_key + 1))
        keys = motifs(key_keys, shape, shortest_key, self.key_motif, 0, self.num_keys)
        values = motifs(key_values, shape, 1, self.value_motif, self.num_keys, self.vocab_size - 1)
        return jax.vmap(self._lay_out)(keys, values, jax.random.uniform(key_place, (num,)))

    def _lay_out(self, keys, values, place):
        """One sequence of pairs of motifs, of which number 0 is the probe. place: the probe's, as a share of those allowed."""
        number, name = jnp.arange(len(keys), dtype=jnp.int32), first_equal(keys)  # pairs of one key have one name
        pairs = jnp.concatenate([keys, values[name]], axis=1)
        sizes = (pairs >= 0).sum(1)
        room = self.seq_len - sizes[0] - self.longest  # pairs begin before this position, but for the last

        place = jnp.floor(place * (room - self.longest + 1))
        before = jnp.sum(jnp.cumsum(sizes[1:]) - sizes[1:] < place)  # pairs that begin before the probe's place
        by_chance = jnp.any((name[1:] == 0) & (number[:-1] < before))
        order = jnp.where(by_chance | (number < before), number + 1, jnp.where(number == before, 0, number))[:-1]
        is_there = jnp.append(jnp.cumsum(sizes[order]) - sizes[order] < room, True)
        order = jnp.append(order, 0)
        is_known = first_equal(name[order][:, None]) < number

        # One token more than there are positions: the last is only a target.
        is_token = (pairs[order] >= 0) & is_there[:, None]
        behind = (
            jnp.cumsum(is_token.ravel()).reshape(is_token.shape) - 1 - jnp.sum(is_token)
        )  # from the end, -1 is the last
        places = jnp.where(is_token, self.seq_len + 1 + behind, self.seq_len + 1)
        is_answer = is_known[:, None] & (jnp.arange(self.longest) >= self.key_motif)
        padding = jnp.full(self.seq_len + 1, self.vocab_size - 1)
        tokens = padding.at[places].set(pairs[order], mode="drop")
        answers = jnp.full_like(padding, -1).at[places].set(jnp.where(is_answer, pairs[order], -1), mode="drop")
        return tokens[:-1], answers[1:]


def motifs(
    key: jax.Array, shape: tuple[int, int], shortest: int, longest: int, first: int, end: int
) -> Int[Array, "A B longest"]:
    """Distinct integers of first .. end-1 in random order, shortest .. longest of them, then -1 where there are fewer."""
    key_tokens, key_lengths = jax.random.split(key)
    tokens = first + distinct_of_many(key_tokens, shape[0] * shape[1], longest, end - first).reshape(*shape, longest)
    lengths = jax.random.randint(key_lengths, (*shape, 1), shortest, longest + 1, jnp.int32)
    return jnp.where(jnp.arange(longest) < lengths, tokens, -1)


def first_equal(rows: Int[Array, "N W"]) -> Int[Array, " N"]:
    """For each row, the number of the first one that equals it."""
    return jnp.argmax(functools.reduce(jnp.logical_and, [x[:, None] == x for x in rows.T]), axis=1)


TASK = MadFuzzy
