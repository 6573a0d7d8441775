"""Flax modules that the models share besides the token mixer."""

from loglinear_jax.modules.activation import swiglu
from loglinear_jax.modules.convolution import CausalConv
from loglinear_jax.modules.embedding import Embed
from loglinear_jax.modules.linear import LinearMaps

__all__ = ["CausalConv", "Embed", "LinearMaps", "swiglu"]
