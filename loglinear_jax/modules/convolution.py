"""The short causal convolution of Mamba-2."""

from __future__ import annotations

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax.typing import Dtype
from jaxtyping import Array, Float

import pallas_kernels


class CausalConv(nn.Module):
    """Depthwise convolution over time with bias and SiLU: y_t = silu(b + Σ_j w_j x_{t - width + 1 + j}).

    window: the inputs of the width - 1 tokens before, if there are any. Returns (y, the window after these tokens).

    implementation: that of the attention beside it. "pallas" takes a kernel, and None does on a GPU. With any other, where
    there are tokens before, or where the kernel cannot run, it is plain JAX.
    """

    width: int = 4
    use_bias: bool = True
    implementation: str | None = None
    param_dtype: Dtype = jnp.float32

    @nn.compact
    def __call__(
        self, x: Float[Array, "B T C"], window: Float[Array, "B W C"] | None = None
    ) -> tuple[Float[Array, "B T C"], Float[Array, "B W C"]]:
        channels = x.shape[2]
        bound = self.width**-0.5  # as PyTorch starts a depthwise convolution
        uniform = lambda key, shape, dtype: jax.random.uniform(key, shape, dtype, -bound, bound)  # noqa: E731
        kernel = self.param("kernel", uniform, (self.width, channels), self.param_dtype)
        bias = self.param("bias", uniform, (channels,), self.param_dtype) if self.use_bias else jnp.zeros((channels,))
        if window is None:
            window = jnp.zeros((x.shape[0], self.width - 1, channels), x.dtype)
            if pallas_kernels.KERNELS["causal_conv"].is_chosen(self.implementation, self.width, x.dtype):
                return pallas_kernels.causal_conv(x, kernel, bias), _last(window, x)
        padded = jnp.concatenate([window.astype(x.dtype), x], axis=1)
        length = x.shape[1]
        y = sum(kernel[j].astype(x.dtype) * padded[:, j : j + length] for j in range(self.width))
        return nn.silu(y + bias.astype(x.dtype)), padded[:, length:]


def _last(window: Float[Array, "B W C"], inputs: Float[Array, "B T C"]) -> Float[Array, "B W C"]:
    """The window after these inputs."""
    kept = min(inputs.shape[1], window.shape[1])
    return jnp.concatenate([window[:, kept:], inputs[:, inputs.shape[1] - kept :]], axis=1)
