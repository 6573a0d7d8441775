"""The short causal convolution of Mamba-2."""

from __future__ import annotations

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float


class CausalConv(nn.Module):
    """Depthwise convolution over time with bias and SiLU: y_t = silu(b + Σ_j w_j x_{t - width + 1 + j}).

    window: the inputs of the width - 1 tokens before, if there are any. Returns (y, the window after these tokens).
    """

    width: int = 4
    use_bias: bool = True

    @nn.compact
    def __call__(
        self, x: Float[Array, "B T C"], window: Float[Array, "B W C"] | None = None
    ) -> tuple[Float[Array, "B T C"], Float[Array, "B W C"]]:
        bound = self.width**-0.5  # as PyTorch starts a depthwise convolution
        uniform = lambda key, shape: jax.random.uniform(key, shape, jnp.float32, -bound, bound)  # noqa: E731
        kernel = self.param("kernel", uniform, (self.width, x.shape[2]))
        if window is None:
            window = jnp.zeros((x.shape[0], self.width - 1, x.shape[2]), x.dtype)
        x = jnp.concatenate([window.astype(x.dtype), x], axis=1)
        length = x.shape[1] - self.width + 1
        y = sum(kernel[j].astype(x.dtype) * x[:, j : j + length] for j in range(self.width))
        if self.use_bias:
            y += self.param("bias", uniform, (x.shape[2],)).astype(x.dtype)
        return nn.silu(y), x[:, length:]
