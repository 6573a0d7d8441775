"""Some positions of each sequence."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, Shaped

Tokens = Int[Array | np.ndarray, "B T"]
Losses = tuple[Float[Array, "B P"], Bool[Array, "B P"]]  # of tokens, and whether the argmax is right
Positions = slice | Int[Array, "B P"]  # the same of every sequence, or each sequence's own, none of them twice


def at_positions(x: Shaped[Array | np.ndarray, "B T ..."], positions: Positions) -> Shaped[Array, "B P ..."]:
    """x at these positions of its sequences."""
    x = jnp.asarray(x)
    if isinstance(positions, slice):
        return x[:, positions]
    rows = jnp.arange(x.shape[0])[:, None]
    return x.at[rows, positions].get(unique_indices=True, mode="promise_in_bounds")


def first_true(mask: Bool[Array, "B T"], count: int) -> Int[Array, "B count"]:
    """Where the first `count` of each sequence are that hold; of a sequence with fewer, some others too."""
    return jax.lax.top_k(mask.astype(jnp.float32), count)[1]
