"""Flax modules that the models share besides the token mixer."""

from loglinear_jax.modules.convolution import CausalConv
from loglinear_jax.modules.embedding import Embed
from loglinear_jax.modules.linear import Dense, LinearMaps, RMSNorm, Scaled, is_one_token_on_gpu, swiglu

__all__ = ["CausalConv", "Dense", "Embed", "LinearMaps", "RMSNorm", "Scaled", "is_one_token_on_gpu", "swiglu"]
