"""Log-linear attention with adaptive λ, in JAX."""

from loglinear_jax.fenwick import FenwickState, fenwick_level, init_fenwick_state, num_levels
from loglinear_jax.ops import fenwick_step, gated_linear_attention, log_linear_attention

__all__ = [
    "FenwickState",
    "fenwick_level",
    "fenwick_step",
    "gated_linear_attention",
    "init_fenwick_state",
    "log_linear_attention",
    "num_levels",
]
