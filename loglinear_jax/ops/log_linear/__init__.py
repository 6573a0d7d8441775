"""Log-linear attention: one state a level of a Fenwick tree over the past (Guo et al. 2025)."""

from loglinear_jax.ops.log_linear.api import fenwick_step, log_linear_attention

__all__ = ["fenwick_step", "log_linear_attention"]
