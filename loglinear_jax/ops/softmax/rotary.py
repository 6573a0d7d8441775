"""Rotary position embedding."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int


def rotate_by_position(
    x: Float[Array, "B T G K"], first_position: Int[Array, "*B"] | int = 0, base: float = 10000.0
) -> Float[Array, "B T G K"]:
    """Rotary position embedding (Su et al. 2021) over the two halves of K; an odd last feature stays as it is."""
    half = x.shape[-1] // 2
    frequency = jnp.asarray(base ** (-np.arange(half) / half), jnp.float32)
    angle = (jnp.asarray(first_position)[..., None] + jnp.arange(x.shape[1]))[..., None] * frequency
    cos, sin = (f(angle)[..., None, :].astype(x.dtype) for f in (jnp.cos, jnp.sin))
    first, second, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin, rest], axis=-1)
