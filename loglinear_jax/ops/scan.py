"""The recurrent forms' loop: one step for each token."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from loglinear_jax.ops.sharding import varying_as


def scan_tokens(
    step: Callable,
    state: Any,
    tokens: Sequence[Float[Array, "B T ..."]],
    precision=None,
    starts: Bool[Array, "B T"] | None = None,
):
    """(outputs [B, T, ...], the state at the end) of step(state, *token, precision) -> (output, state), token by token.

    starts: the tokens that start a segment, before which the state (but for positions) is cleared.
    """

    def body(state, token_and_start):
        token, start = token_and_start
        if start is not None:
            state = jax.tree.map(lambda x: _cleared(x, start) if x.ndim > 1 else x, state)
        out, state = step(state, *token, precision=precision)
        return state, out

    by_time = jax.tree.map(lambda x: jnp.moveaxis(x, 1, 0), (list(tokens), starts))
    state, out = jax.lax.scan(body, varying_as(tokens[0], state), by_time)
    return jnp.moveaxis(out, 0, 1), state


def _cleared(state: Float[Array, "B ..."], start: Bool[Array, " B"]) -> Float[Array, "B ..."]:
    return jnp.where(start.reshape(-1, *[1] * (state.ndim - 1)), 0, state)
