"""What tasks share in which a query looks up the value of its key."""

from __future__ import annotations

import dataclasses

import jax
import numpy as np
from jaxtyping import Array, Bool, Int

from loglinear_jax.settings import SettingError
from loglinear_jax.tasks.base import Task
from loglinear_jax.tasks.draws import by_power_law

POWER = 0.01  # Zoology's power_a


@dataclasses.dataclass(frozen=True)
class QueriesInSlots(Task):
    """Tasks of Zoology with num_pairs keys: each key once more at the beginning of a slot of two tokens, most of them early."""

    ROLES = ("key", "value", "filler", "query")
    ANSWERS = ("value",)

    @property
    def first_query(self) -> int:
        """Where the slots of queries begin."""
        raise NotImplementedError(f"{type(self).__name__} has no property first_query")

    @property
    def scored(self):
        return slice(self.first_query, self.seq_len - 1, 2)

    @property
    def num_scored(self):
        return self.num_pairs

    def roles(self, tokens):
        """A key that stands in a slot by chance counts as a query too."""
        at = np.arange(tokens.shape[1])
        is_query = (at % 2 == 0) & (last_places(tokens, self._is_key(at)) >= 0)
        return np.where(at < self.first_query, at % 2, np.where(is_query, 3, 2))

    def sources(self, tokens, targets):
        return values_behind(tokens, targets, self._is_key(np.arange(tokens.shape[1])))

    def _is_key(self, at):
        return (at < self.first_query) & (at % 2 == 0)

    def query_places(self, key: jax.Array, num: int) -> Int[Array, "num P"]:
        """Where each of the keys stands again: slot i = 1, 2, .. in proportion to i^(POWER - 1), without replacement."""
        num_slots = (self.seq_len - self.first_query) // 2
        return self.first_query + 2 * by_power_law(key, num, self.num_pairs, num_slots, POWER)


def check_length(seq_len: int, num_pairs: int) -> None:
    """Raises SettingError for sequences too short for so many pairs of key and value, and as many queries of two tokens."""
    if seq_len < 4 * num_pairs:
        raise SettingError(
            f"task.seq_len={seq_len} is too short for num_pairs={num_pairs}: it takes at least {4 * num_pairs}"
        )


def check_distinct_keys(vocab_size: int, num_pairs: int) -> None:
    """Raises SettingError for a vocabulary whose lower half, without 0, has fewer tokens than there are keys."""
    if vocab_size // 2 - 1 < num_pairs:
        raise SettingError(
            f"task.vocab_size={vocab_size} is too small for num_pairs={num_pairs} distinct keys: it takes at least "
            f"{2 * num_pairs + 2}"
        )


def last_places(tokens: Int[np.ndarray, "num T"], among: Bool[np.ndarray, "... T"]) -> Int[np.ndarray, "num T"]:
    """For each token, the last of the positions `among` at which its sequence holds the same token; -1 if there is none."""
    places = np.full((len(tokens), tokens.max() + 1), -1, np.int32)
    rows, columns = np.nonzero(np.broadcast_to(among, tokens.shape))
    np.maximum.at(places, (rows, tokens[rows, columns]), columns.astype(np.int32))
    return np.take_along_axis(places, tokens, axis=1)


def values_behind(
    tokens: Int[np.ndarray, "num T"], targets: Int[np.ndarray, "num T"], keys: Bool[np.ndarray, "... T"]
) -> Int[np.ndarray, "num T"]:
    """`BaseTask.sources` where each query repeats a key: the position behind the key's last place among `keys`."""
    return np.where(targets >= 0, last_places(tokens, keys) + 1, np.int32(-1))


def previous_places(tokens: Int[np.ndarray, "num T"], among: Bool[np.ndarray, "num T"]) -> Int[np.ndarray, "num T"]:
    """For each token, the last position before it, of those `among`, at which its sequence holds the same token; or -1."""
    rows = np.arange(len(tokens))
    latest = np.full((len(tokens), tokens.max() + 1), -1, np.int32)
    found = np.empty(tokens.shape, np.int32)
    for place, column in enumerate(tokens.T):
        found[:, place] = latest[rows, column]
        latest[rows[among[:, place]], column[among[:, place]]] = place
    return found
