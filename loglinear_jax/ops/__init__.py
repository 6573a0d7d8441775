"""Operations over sequences: one folder each, with one module for each form of it; what they share beside them."""

from loglinear_jax.ops.checks import check_attention_settings
from loglinear_jax.ops.gated_linear import gated_linear_attention
from loglinear_jax.ops.log_linear import fenwick_step, log_linear_attention
from loglinear_jax.ops.softmax import softmax_attention

__all__ = [
    "check_attention_settings",
    "fenwick_step",
    "gated_linear_attention",
    "log_linear_attention",
    "softmax_attention",
]
