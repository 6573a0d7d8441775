"""The chunkwise form by the GPU kernels of pallas_kernels, and what they leave to plain JAX: states in and out."""

from __future__ import annotations

import jax.numpy as jnp

import pallas_kernels
from loglinear_jax.ops.continuation import run_from
from loglinear_jax.ops.levels import levels_after


def is_best(q, k, v, chunk_size=None, precision=None) -> bool:
    """Whether `pallas` is the form to choose: on a GPU, unless it cannot run, of which there is one warning for each reason."""
    dtype = jnp.result_type(q, k, v)
    return pallas_kernels.are_best(
        "log_linear_attention",
        lambda: pallas_kernels.why_unsupported(q.shape[-1], v.shape[-1], dtype, chunk_size, precision),
    )


def pallas(q, k, v, log_decay, lam, *, initial_state, return_state, chunk_size=None, precision=None):
    """Shapes and errors as in `log_linear_attention`, whose arguments these are after its checks."""

    def aligned(q, k, v, log_decay, lam, last):
        out = pallas_kernels.fenwick_attention(q, k, v, log_decay, lam, chunk_size=chunk_size, precision=precision)
        if not return_state:
            return out, None
        return out, levels_after(last, k, v, log_decay, lam.shape[-1], precision=precision)

    return run_from(initial_state, (q, k, v, log_decay, lam), aligned, return_state, precision)
