"""Operations over sequences, one folder each: `api` has the public functions, and each form has a module of its own.

Beside them is what they share: the choice of a form in `dispatch`, `checks`, `decays`, `levels`, `positions`, the chunks'
`tree`, the `continuation` of a sequence from an initial state, and how one is cut over devices, `sequence_parallel`.
"""

from loglinear_jax.ops.bucket_scores import bucket_scores
from loglinear_jax.ops.checks import Implementation, check_attention_settings
from loglinear_jax.ops.delta import gated_delta_attention, log_linear_delta_attention, log_linear_delta_step
from loglinear_jax.ops.gated_linear import gated_linear_attention
from loglinear_jax.ops.log_linear import fenwick_step, log_linear_attention
from loglinear_jax.ops.softmax import softmax_attention

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
