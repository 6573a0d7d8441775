"""The short causal convolution of Mamba-2."""

from __future__ import annotations

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from flax.typing import Dtype
from jaxtyping import Array, Bool, Float, Int

import pallas_kernels
from loglinear_jax.ops.positions import beginnings_in_rows, segment_starts
from loglinear_jax.ops.sequence_parallel import from_piece_before, starts_in_piece


class CausalConv(nn.Module):
    """Depthwise convolution over time with bias and SiLU: y_t = silu(b + Σ_j w_j x_{t - width + 1 + j}).

    window: the inputs of the width - 1 tokens before, if there are any, which belong to the first segment. segment_ids: as in
    `log_linear_attention`; only a token's own segment is summed over. Returns (y, the window after these tokens, with zeros for
    what is not of the last one's segment).

    implementation: that of the attention beside it. "pallas" takes a kernel, and None does on a GPU. With any other, where
    there are tokens before, or where the kernel cannot run, it is plain JAX.

    axis_name: that of `log_linear_attention`, for one piece of a sequence. Each device sends its last width - 1 inputs to the
    next one. The window that is returned is the piece's.

    Raises ValueError for a window together with axis_name, and for a piece of fewer than width - 1 tokens.
    """

    width: int = 4
    use_bias: bool = True
    implementation: str | None = None
    param_dtype: Dtype = jnp.float32
    axis_name: str | None = None

    @nn.compact
    def __call__(
        self,
        x: Float[Array, "B T C"],
        window: Float[Array, "B W C"] | None = None,
        segment_ids: Int[Array, "B T"] | None = None,
    ) -> tuple[Float[Array, "B T C"], Float[Array, "B W C"]]:
        length, channels = x.shape[1:]
        bound = self.width**-0.5  # as PyTorch starts a depthwise convolution
        uniform = lambda key, shape, dtype: jax.random.uniform(key, shape, dtype, -bound, bound)  # noqa: E731
        kernel = self.param("kernel", uniform, (self.width, channels), self.param_dtype)
        bias = self.param("bias", uniform, (channels,), self.param_dtype) if self.use_bias else jnp.zeros((channels,))
        by_kernel = window is None
        by_kernel &= pallas_kernels.KERNELS["causal_conv"].is_chosen(self.implementation, self.width, x.dtype)
        axis_name = None if self.is_initializing() else self.axis_name  # parameters are made outside of shard_map
        if axis_name is None:
            starts = segment_starts(segment_ids)
        else:
            starts = starts_in_piece(segment_ids, axis_name)
            window = self._window_of_piece_before(x, window, starts, axis_name)
        before = self.width - 1
        if window is None:
            window = jnp.zeros((x.shape[0], before, channels), x.dtype)
        if not by_kernel:
            return _convolve(x, window, kernel, bias, starts)
        own = None
        if starts is not None:
            own = jnp.minimum(jnp.arange(length) - jnp.maximum(beginnings_in_rows(starts), 0), before)
        y = pallas_kernels.causal_conv(x, kernel, bias, own)
        if axis_name is not None:
            of_first = None if starts is None else starts[:, :before]
            first, _ = _convolve(x[:, :before].astype(jnp.float32), window, kernel, bias, of_first)
            y = y.at[:, :before].set(first.astype(y.dtype))
        return y, _window_after(jnp.concatenate([window.astype(x.dtype), x], axis=1), self.width, starts)

    def _window_of_piece_before(
        self, x: Float[Array, "B T C"], window: Any, starts: Bool[Array, "B T"] | None, axis_name: str
    ) -> Float[Array, "B W C"]:
        if window is not None:
            raise ValueError(f"window is given: expected None with axis_name = {axis_name!r}")
        if x.shape[1] < self.width - 1:
            raise ValueError(
                f"x has shape {x.shape} with T = {x.shape[1]} tokens on each device: expected at least width - 1 = "
                f"{self.width - 1} with axis_name = {axis_name!r}"
            )
        return from_piece_before(_window_after(x, self.width, starts), axis_name)


def _convolve(
    x: Float[Array, "B T C"],
    window: Float[Array, "B W C"],
    kernel: Float[Array | np.ndarray, "J C"],
    bias: Float[Array | np.ndarray, " C"],
    starts: Bool[Array, "B T"] | None = None,
) -> tuple[Float[Array, "B T C"], Float[Array, "B W C"]]:
    """(y, the window after these tokens) in plain JAX."""
    length, width = x.shape[1], kernel.shape[0]
    padded = jnp.concatenate([window.astype(x.dtype), x], axis=1)
    begin = None if starts is None else beginnings_in_rows(starts)
    places = jnp.arange(length) - width + 1
    taps = (_of_segment(padded[:, j : j + length], places + j, begin) for j in range(width))
    y = sum(kernel[j].astype(x.dtype) * tap for j, tap in enumerate(taps))
    return nn.silu(y + bias.astype(x.dtype)), _window_after(padded, width, starts)


def _window_after(
    inputs: Float[Array, "B S C"], width: int, starts: Bool[Array, "B T"] | None
) -> Float[Array, "B W C"]:
    """The window after these inputs, the last of them those of tokens that start segments or do not."""
    window = inputs[:, inputs.shape[1] - width + 1 :]
    if starts is None:
        return window
    length = starts.shape[1]
    return _of_segment(window, jnp.arange(length - width + 1, length), beginnings_in_rows(starts)[:, -1:])


def _of_segment(
    inputs: Float[Array, "B T C"], place: Int[Array, " T"], begin: Int[Array, "B _"] | None
) -> Float[Array, "B T C"]:
    """The inputs at these places (negative ones before the sequence), 0 where the segment that begins at `begin` has none."""
    if begin is None:
        return inputs
    return jnp.where(((begin < 0) | (begin <= place))[:, :, None], inputs, 0)
