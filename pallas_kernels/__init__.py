"""GPU kernels with their gradients and batching rules, one folder an operation: log-linear attention and a step of decoding,
the delta rule, bucket scores; and pointwise ones: λ, the short convolution, SwiGLU, cross-entropy.

`KERNELS` says of each whether it can run here, whether it is the best, and if not, why. Nothing outside knows which lowering a
kernel uses.
"""

from pallas_kernels.attention.api import chunk_of_attention, fenwick_attention
from pallas_kernels.attention.step import fenwick_step
from pallas_kernels.common.launch import with_standard_promotion
from pallas_kernels.common.support import UnsupportedError, interpret, interpreting, runs_on_gpu
from pallas_kernels.common.tiles import MIN_TILE
from pallas_kernels.delta.chunks import delta_chunks
from pallas_kernels.delta.levels import read_levels
from pallas_kernels.delta.one_state import delta_scan
from pallas_kernels.delta.tiles import delta_chunk
from pallas_kernels.delta.tree import join_tree, read_tree
from pallas_kernels.pointwise.causal_conv import causal_conv
from pallas_kernels.pointwise.content_lam import content_lam
from pallas_kernels.pointwise.cross_entropy import cross_entropy
from pallas_kernels.pointwise.lam_mlp import lam_mlp
from pallas_kernels.pointwise.swiglu import swiglu
from pallas_kernels.registry import KERNELS, Kernel
from pallas_kernels.scores.api import chunk_scores
from pallas_kernels.scores.tiles import chunk_of_scores

__all__ = [
    "KERNELS",
    "MIN_TILE",
    "Kernel",
    "UnsupportedError",
    "causal_conv",
    "chunk_of_attention",
    "chunk_of_scores",
    "chunk_scores",
    "content_lam",
    "cross_entropy",
    "delta_chunk",
    "delta_chunks",
    "delta_scan",
    "fenwick_attention",
    "fenwick_step",
    "interpret",
    "interpreting",
    "join_tree",
    "lam_mlp",
    "read_levels",
    "read_tree",
    "runs_on_gpu",
    "swiglu",
    "with_standard_promotion",
]
