"""Causal softmax attention with rotary positions."""

from loglinear_jax.ops.softmax.api import softmax_attention
from loglinear_jax.ops.softmax.recurrent import KeyValueCache, attend_to_cache, key_value_cache

__all__ = ["KeyValueCache", "attend_to_cache", "key_value_cache", "softmax_attention"]
