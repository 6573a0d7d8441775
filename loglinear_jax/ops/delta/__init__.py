"""The gated delta rule, whose states overwrite what they hold under a key: one a level of a Fenwick tree, or a single one."""

from loglinear_jax.ops.delta.api import gated_delta_attention, log_linear_delta_attention, log_linear_delta_step

__all__ = ["gated_delta_attention", "log_linear_delta_attention", "log_linear_delta_step"]
