"""Operations over sequences: `api` has the public functions, and a module for each operation its forms.

Beside them is what they share: `checks`, `decays`, `levels`, `positions`, the chunks' `tree`, the `continuation` of
a sequence from an initial state, and how one is cut over devices, `sequence_parallel`.
"""

from loglinear_jax.ops.api import (
    bucket_scores,
    fenwick_step,
    gated_delta_attention,
    gated_linear_attention,
    log_linear_attention,
    log_linear_delta_attention,
    log_linear_delta_step,
    softmax_attention,
)
from loglinear_jax.ops.checks import Implementation, check_attention_settings

__all__ = [
    "Implementation",
    "bucket_scores",
    "check_attention_settings",
    "fenwick_step",
    "gated_delta_attention",
    "gated_linear_attention",
    "log_linear_attention",
    "log_linear_delta_attention",
    "log_linear_delta_step",
    "softmax_attention",
]
