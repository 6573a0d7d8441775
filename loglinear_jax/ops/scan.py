"""The recurrent forms' loop: one step for each token."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from loglinear_jax.ops.sharding import varying_as


def scan_tokens(step: Callable, state: Any, tokens: Sequence[Float[Array, "B T ..."]], precision=None):
    """(outputs [B, T, ...], the state at the end) of step(state, *token, precision) -> (output, state), token by token."""

    def body(state, token):
        out, state = step(state, *token, precision=precision)
        return state, out

    state, out = jax.lax.scan(body, varying_as(tokens[0], state), [jnp.moveaxis(x, 1, 0) for x in tokens])
    return jnp.moveaxis(out, 0, 1), state
