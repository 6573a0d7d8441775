"""GPU kernels of log-linear attention, bucket scores and λ by Pallas, with their gradients, and of cross-entropy by Triton.

Nothing outside knows which Pallas lowering they use.
"""

from pallas_kernels.attention import fenwick_attention
from pallas_kernels.bucket_scores import chunk_scores
from pallas_kernels.cross_entropy import cross_entropy, why_cross_entropy_unsupported
from pallas_kernels.lam import lam_mlp, why_lam_mlp_unsupported
from pallas_kernels.support import (
    UnsupportedError,
    are_best,
    interpret,
    interpreting,
    runs_on_gpu,
    why_unsupported,
)
from pallas_kernels.tiles import chunk_of_scores

__all__ = [
    "UnsupportedError",
    "are_best",
    "chunk_of_scores",
    "chunk_scores",
    "cross_entropy",
    "fenwick_attention",
    "interpret",
    "interpreting",
    "lam_mlp",
    "runs_on_gpu",
    "why_cross_entropy_unsupported",
    "why_lam_mlp_unsupported",
    "why_unsupported",
]
