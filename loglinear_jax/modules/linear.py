"""Several linear maps of the same features."""

from __future__ import annotations

from collections.abc import Sequence

import flax.linen as nn
import jax.numpy as jnp
import numpy as np
from flax.typing import Dtype
from jaxtyping import Array, Float


class LinearMaps(nn.Module):
    """Linear maps without biases, to `sizes` features each, their weights side by side in one matrix `kernel`, as in Mamba-2.

    Each map is a matrix product of its own: with one product for all, training would write their gradients a second time, to
    put them together. With `in_one`, it is one product, which is faster for few tokens.
    """

    sizes: Sequence[int]
    kernel_init: nn.initializers.Initializer
    dtype: Dtype | None = None

    @nn.compact
    def __call__(self, x: Float[Array, "*B D"], in_one: bool = False) -> list[Float[Array, "*B F"]]:
        kernel = self.param("kernel", self.kernel_init, (x.shape[-1], sum(self.sizes)))
        x, kernel = nn.dtypes.promote_dtype(x, kernel, dtype=self.dtype)
        ends = np.cumsum(self.sizes[:-1])
        if in_one:
            return jnp.split(jnp.dot(x, kernel), ends, axis=-1)
        return [jnp.dot(x, weights) for weights in jnp.split(kernel, ends, axis=-1)]
