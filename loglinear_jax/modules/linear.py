"""Several linear maps of the same features."""

from __future__ import annotations

from collections.abc import Sequence

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from flax.typing import Dtype
from jaxtyping import Array, Float


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
