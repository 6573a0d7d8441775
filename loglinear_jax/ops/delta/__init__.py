from loglinear_jax.ops.delta.api import gated_delta_attention, log_linear_delta_attention, log_linear_delta_step

__all__ = ["gated_delta_attention", "log_linear_delta_attention", "log_linear_delta_step"]
