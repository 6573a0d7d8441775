"""RMSNorm, whose factor can wait for the matrix product that reads it."""

from __future__ import annotations

from typing import NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax.typing import Dtype
from jaxtyping import Array, Float

from pallas_kernels import runs_on_gpu


class Scaled(NamedTuple):
    """values · factor, with one factor for all features of a token: what is linear may multiply by it last."""

    values: Float[Array, "B T D"]
    factor: Float[Array, "B T 1"]


class RMSNorm(nn.Module):
    """RMSNorm over each of `groups` equal parts of the features, to `dtype`.

    deferred: one token on a GPU is left Scaled. The matrix product that reads it need not wait for the sum of squares, nor XLA
    write the features to memory between the two: in decoding, a layer's time is its number of kernels.
    """

    groups: int = 1
    epsilon: float = 1e-5
    deferred: bool = False
    dtype: Dtype = jnp.float32
    param_dtype: Dtype = jnp.float32

    @nn.compact
    def __call__(self, x: Float[Array, "*B D"]) -> Float[Array, "*B D"] | Scaled:
        scale = self.param("scale", nn.initializers.ones, (x.shape[-1],), self.param_dtype)
        parts = x.astype(jnp.float32).reshape(*x.shape[:-1], self.groups, -1)
        factor = jax.lax.rsqrt(jnp.mean(parts**2, axis=-1, keepdims=True) + self.epsilon)
        if self.deferred and self.groups == 1 and is_one_token_on_gpu(x):
            return Scaled((parts.reshape(x.shape) * scale).astype(self.dtype), factor[..., 0])
        return ((parts * factor).reshape(x.shape) * scale).astype(self.dtype)


def is_one_token_on_gpu(x: Float[Array, "*B D"]) -> bool:
    """Whether x is a single token's features, on a GPU."""
    return x.size == x.shape[-1] and runs_on_gpu()


class Dense(nn.Dense):
    """A matrix product, also of what is Scaled."""

    def __call__(self, x: Float[Array, "*B D"] | Scaled) -> Float[Array, "*B F"]:
        if isinstance(x, Scaled):
            return (super().__call__(x.values) * x.factor).astype(self.dtype)
        return super().__call__(x)
