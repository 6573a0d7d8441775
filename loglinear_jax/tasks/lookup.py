"""Where tokens stand in drawn sequences; NumPy, on the host."""

from __future__ import annotations

import numpy as np
from jaxtyping import Bool, Int


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
