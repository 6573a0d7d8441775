"""The short causal convolution of Mamba-2."""

from __future__ import annotations

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax.typing import Dtype
from jaxtyping import Array, Float, Int

import pallas_kernels
from loglinear_jax.ops.segments import beginnings_in_rows, segment_starts


class CausalConv(nn.Module):
    """Depthwise convolution over time with bias and SiLU: y_t = silu(b + Σ_j w_j x_{t - width + 1 + j}).

    window: the inputs of the width - 1 tokens before, if there are any, which belong to the first segment. segment_ids: as in
    `log_linear_attention`; only a token's own segment is summed over. Returns (y, the window after these tokens, with zeros for
    what is not of the last one's segment).

    implementation: that of the attention beside it. "pallas" takes a kernel, and None does on a GPU. With any other, where
    there are tokens before or several segments, or where the kernel cannot run, it is plain JAX.
    """

    width: int = 4
    use_bias: bool = True
    implementation: str | None = None
    param_dtype: Dtype = jnp.float32

    @nn.compact
    def __call__(
        self,
        x: Float[Array, "B T C"],
        window: Float[Array, "B W C"] | None = None,
        segment_ids: Int[Array, "B T"] | None = None,
    ) -> tuple[Float[Array, "B T C"], Float[Array, "B W C"]]:
        channels = x.shape[2]
        bound = self.width**-0.5  # as PyTorch starts a depthwise convolution
        uniform = lambda key, shape, dtype: jax.random.uniform(key, shape, dtype, -bound, bound)  # noqa: E731
        kernel = self.param("kernel", uniform, (self.width, channels), self.param_dtype)
        bias = self.param("bias", uniform, (channels,), self.param_dtype) if self.use_bias else jnp.zeros((channels,))
        if window is None:
            window = jnp.zeros((x.shape[0], self.width - 1, channels), x.dtype)
            chosen = pallas_kernels.KERNELS["causal_conv"].is_chosen(self.implementation, self.width, x.dtype)
            if chosen and segment_ids is None:
                return pallas_kernels.causal_conv(x, kernel, bias), _last(window, x)
        padded = jnp.concatenate([window.astype(x.dtype), x], axis=1)
        length = x.shape[1]
        begin = None if segment_ids is None else beginnings_in_rows(segment_starts(segment_ids))
        places = jnp.arange(length) - self.width + 1
        taps = (_of_segment(padded[:, j : j + length], places + j, begin) for j in range(self.width))
        y = sum(kernel[j].astype(x.dtype) * tap for j, tap in enumerate(taps))
        window = padded[:, length:]
        if begin is not None:
            window = _of_segment(window, jnp.arange(length - self.width + 1, length), begin[:, -1:])
        return nn.silu(y + bias.astype(x.dtype)), window


def _of_segment(
    inputs: Float[Array, "B T C"], place: Int[Array, " T"], begin: Int[Array, "B _"] | None
) -> Float[Array, "B T C"]:
    """The inputs at these places (negative ones before the sequence), 0 where the segment that begins at `begin` has none."""
    if begin is None:
        return inputs
    return jnp.where(((begin < 0) | (begin <= place))[:, :, None], inputs, 0)


def _last(window: Float[Array, "B W C"], inputs: Float[Array, "B T C"]) -> Float[Array, "B W C"]:
    """The window after these inputs."""
    kept = min(inputs.shape[1], window.shape[1])
    return jnp.concatenate([window[:, kept:], inputs[:, inputs.shape[1] - kept :]], axis=1)
