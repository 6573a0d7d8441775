"""Log-linear attention: one public function, and one module for each form of it."""

from loglinear_jax.attention.api import fenwick_step, log_linear_attention
from loglinear_jax.attention.checks import check_attention_settings
from loglinear_jax.attention.gated_linear import gated_linear_attention

__all__ = ["check_attention_settings", "fenwick_step", "gated_linear_attention", "log_linear_attention"]
