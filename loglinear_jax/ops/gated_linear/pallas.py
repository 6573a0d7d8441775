"""The chunkwise form by the GPU kernels of log-linear attention."""

from __future__ import annotations

import jax.numpy as jnp

import pallas_kernels
from loglinear_jax.ops.gated_linear.parallel import with_states
from loglinear_jax.ops.positions import forgetting
from pallas_kernels import KERNELS


def is_best(q, k, v, chunk_size=None, precision=None) -> bool:
    """As of log-linear attention."""
    dtype = jnp.result_type(q, k, v)
    return KERNELS["gated_linear_attention"].is_best(q.shape[-1], v.shape[-1], dtype, chunk_size, precision)


def attend(q, k, v, log_decay, start, *, return_state, chunk_size=None, precision=None):
    """Log-linear attention with λ ≡ 1; initial and last states by plain JAX."""
    options = dict(chunk_size=chunk_size, precision=precision, segmented=start.starts is not None)
    out = pallas_kernels.fenwick_attention(q, k, v, forgetting(log_decay, start.starts), None, **options)
    return with_states(out, q, k, v, log_decay, start, return_state, precision)
