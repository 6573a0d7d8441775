"""GPU kernels by Pallas, with their gradients: of log-linear attention and of a step of decoding, the delta rule, bucket
scores, λ, the short convolution and SwiGLU; and of cross-entropy by Triton.

Nothing outside knows which Pallas lowering they use.
"""

from pallas_kernels.attention.api import fenwick_attention
from pallas_kernels.attention.step import fenwick_step, why_step_unsupported
from pallas_kernels.common.launch import with_standard_promotion
from pallas_kernels.common.support import (
    UnsupportedError,
    are_best,
    chooses_kernel,
    interpret,
    interpreting,
    runs_on_gpu,
    why_unsupported,
)
from pallas_kernels.common.tiles import MIN_TILE
from pallas_kernels.delta.carry import carry_state
from pallas_kernels.delta.chunks import delta_chunks, delta_kernels_pay, why_delta_unsupported
from pallas_kernels.delta.tiles import delta_chunk
from pallas_kernels.delta.tree import join_tree, read_tree
from pallas_kernels.pointwise.causal_conv import causal_conv, why_causal_conv_unsupported
from pallas_kernels.pointwise.content_lam import content_lam, why_content_lam_unsupported
from pallas_kernels.pointwise.cross_entropy import cross_entropy, why_cross_entropy_unsupported
from pallas_kernels.pointwise.lam_mlp import lam_mlp, why_lam_mlp_unsupported
from pallas_kernels.pointwise.swiglu import swiglu, why_swiglu_unsupported
from pallas_kernels.scores.api import chunk_scores
from pallas_kernels.scores.tiles import chunk_of_scores

__all__ = [
    "MIN_TILE",
    "UnsupportedError",
    "are_best",
    "carry_state",
    "causal_conv",
    "chooses_kernel",
    "chunk_of_scores",
    "chunk_scores",
    "content_lam",
    "cross_entropy",
    "delta_chunk",
    "delta_chunks",
    "delta_kernels_pay",
    "fenwick_attention",
    "fenwick_step",
    "interpret",
    "interpreting",
    "join_tree",
    "lam_mlp",
    "read_tree",
    "runs_on_gpu",
    "swiglu",
    "why_causal_conv_unsupported",
    "why_content_lam_unsupported",
    "why_cross_entropy_unsupported",
    "why_delta_unsupported",
    "why_lam_mlp_unsupported",
    "why_step_unsupported",
    "why_swiglu_unsupported",
    "why_unsupported",
    "with_standard_promotion",
]
