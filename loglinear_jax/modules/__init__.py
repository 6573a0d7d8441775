"""Flax modules that the models share besides the token mixer."""

from loglinear_jax.modules.activation import swiglu
from loglinear_jax.modules.convolution import CausalConv
from loglinear_jax.modules.embedding import Embed
from loglinear_jax.modules.linear import LinearMaps
from loglinear_jax.modules.norm import Dense, RMSNorm, Scaled, is_one_token_on_gpu

__all__ = ["CausalConv", "Dense", "Embed", "LinearMaps", "RMSNorm", "Scaled", "is_one_token_on_gpu", "swiglu"]
