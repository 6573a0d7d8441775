"""The gated activation of an MLP."""

from __future__ import annotations

import flax.linen as nn
from jaxtyping import Array, Float

import pallas_kernels


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
