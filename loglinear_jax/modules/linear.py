"""Linear maps, RMSNorm, whose factor can wait for the matrix product that reads it, and the gated activation of an MLP."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from flax.typing import Dtype
from jaxtyping import Array, Float

import pallas_kernels
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
        parts = x.astype(jnp.float32).reshape(*x.shape[:-1], self.groups, x.shape[-1] // self.groups)
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


class LinearMaps(nn.Module):
    """Linear maps without biases, to `sizes` features each, their weights side by side in one matrix `kernel`, as in Mamba-2.

    Each map is a matrix product of its own: with one product for all, training would write the maps' gradients a second time,
    to put them together. That pays where each map's gradient comes whole, not in parts that are put together anyway.

    apart: keep XLA from making one product of them after all, which it does where they are large.
    """

    sizes: Sequence[int]
    kernel_init: nn.initializers.Initializer
    dtype: Dtype | None = None
    apart: bool = False
    param_dtype: Dtype = jnp.float32

    @nn.compact
    def __call__(self, x: Float[Array, "*B D"]) -> list[Float[Array, "*B F"]]:
        kernel = self.param("kernel", self.kernel_init, (x.shape[-1], sum(self.sizes)), self.param_dtype)
        x, kernel = nn.dtypes.promote_dtype(x, kernel, dtype=self.dtype)
        operands = [(x, weights) for weights in jnp.split(kernel, np.cumsum(self.sizes[:-1]), axis=-1)]
        if self.apart:
            operands = [jax.lax.optimization_barrier(pair) for pair in operands]
        return [jnp.dot(*pair) for pair in operands]


def swiglu(
    gate: Float[Array, "*B F"], up: Float[Array, "*B F"], implementation: str | None = None
) -> Float[Array, "*B F"]:
    """silu(gate) · up.

    implementation: that of the attention beside it. With "pallas", and with None on a GPU, a kernel computes the gradients
      where it can run.
    """
    if pallas_kernels.KERNELS["swiglu"].is_chosen(implementation, gate.size, gate.dtype):
        return pallas_kernels.swiglu(gate, up)
    return nn.silu(gate) * up
