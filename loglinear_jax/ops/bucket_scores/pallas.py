"""The chunkwise form by GPU kernels; states by plain JAX."""

from __future__ import annotations

import jax.numpy as jnp

import pallas_kernels
from loglinear_jax.ops.bucket_scores.chunkwise import run_from
from loglinear_jax.ops.levels import pad_to
from loglinear_jax.ops.positions import forgetting
from pallas_kernels import KERNELS


def is_best(q, k, chunk_size=None, precision=None) -> bool:
    """As of log-linear attention."""
    return KERNELS["bucket_scores"].is_best(q.shape[-1], jnp.result_type(q, k), chunk_size, precision)


def score(q, k, log_decay, start, *, levels, return_state, chunk_size=None, precision=None):
    def aligned(q, k, log_decay, starts, levels):
        length = q.shape[1]
        size = chunk_size or pallas_kernels.chunk_of_scores(length)
        padded = (pad_to(x, -(-length // size) * size, axis=1) for x in (q, k, forgetting(log_decay, starts)))
        options = dict(chunk_size=size, precision=precision, segmented=starts is not None)
        scores = pallas_kernels.chunk_scores(*padded, **options)
        return pad_to(scores[:, :length], levels, axis=3)[..., :levels]

    return run_from(start, (q, k, log_decay), aligned, levels, return_state, precision)
