"""Heads that share a key come in groups; their products multiply in the inputs' dtype and accumulate in float32 or wider."""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Float

from loglinear_jax.ops.dtypes import accumulation_dtype


def dot(subscripts: str, x: Array, y: Array, precision=None) -> Array:
    """einsum that multiplies in x's dtype and accumulates in float32 (float64 for float64)."""
    out_dtype = accumulation_dtype(x, y)
    return jnp.einsum(subscripts, x, y.astype(x.dtype), precision=precision, preferred_element_type=out_dtype)


def split_heads(x: Float[Array, "B T H ..."], groups: int) -> Float[Array, "B G R T ..."]:
    """Heads split into groups of R = H/G that share a key, and brought before time."""
    batch, length, heads = x.shape[:3]
    x = x.reshape(batch, length, groups, heads // groups, *x.shape[3:])
    return jnp.moveaxis(x, 1, 3)


def merge_heads(x: Float[Array, "B G R T ..."]) -> Float[Array, "B T H ..."]:
    """The inverse of `split_heads`."""
    x = jnp.moveaxis(x, 3, 1)
    return x.reshape(*x.shape[:2], -1, *x.shape[4:])
