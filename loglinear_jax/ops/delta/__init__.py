"""The gated delta rule: attention whose states forget what they held under a key before they write there, with a state a level
of a Fenwick tree, or one state."""

from loglinear_jax.ops.delta.api import gated_delta_attention, log_linear_delta_attention, log_linear_delta_step

__all__ = ["gated_delta_attention", "log_linear_delta_attention", "log_linear_delta_step"]
