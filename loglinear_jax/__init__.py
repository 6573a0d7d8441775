"""Log-linear attention with adaptive λ, in JAX."""

from loglinear_jax.attention import fenwick_step, gated_linear_attention, log_linear_attention
from loglinear_jax.fenwick import FenwickState, fenwick_level, init_fenwick_state, num_levels

__all__ = [
    "FenwickState",
    "fenwick_level",
    "fenwick_step",
    "gated_linear_attention",
    "init_fenwick_state",
    "log_linear_attention",
    "num_levels",
]
