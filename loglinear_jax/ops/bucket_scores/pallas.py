"""The chunkwise form by GPU kernels of pallas_kernels, and what they leave to plain JAX: chunks' sums of keys, and states."""

from __future__ import annotations

import jax.numpy as jnp

import pallas_kernels
from loglinear_jax.ops.bucket_scores.chunkwise import sums_of_chunks, sums_to_read
from loglinear_jax.ops.bucket_scores.continuation import run_from
from loglinear_jax.ops.heads import split_heads
from loglinear_jax.ops.levels import pad_to
from loglinear_jax.ops.tree import into_parts


def is_best(q, k, chunk_size=None, precision=None) -> bool:
    """Whether `pallas` is the form to choose: on a GPU, unless it cannot run, of which there is one warning for each reason."""
    dtype = jnp.result_type(q, k)
    return pallas_kernels.are_best(
        "bucket_scores", lambda: pallas_kernels.why_unsupported(q.shape[-1], None, dtype, chunk_size, precision)
    )


def pallas(q, k, log_decay, *, levels, initial_state, return_state, chunk_size=None, precision=None):
    """Shapes and errors as in `bucket_scores`, whose arguments these are after its checks."""

    def aligned(q, k, log_decay, levels):
        length, groups = q.shape[1:3]
        size = chunk_size or pallas_kernels.chunk_of_scores(length)
        q, k, log_decay = (pad_to(x, -(-length // size) * size, axis=1) for x in (q, k, log_decay))
        chunks = into_parts(jnp.moveaxis(k, 1, 2), 2, size), into_parts(split_heads(log_decay, groups), 3, size)
        sums = _tree(*chunks, q.dtype, precision) if q.shape[1] > size else None
        scores = pallas_kernels.chunk_scores(q, k, log_decay, sums, chunk_size=size, precision=precision)
        return pad_to(scores[:, :length], levels, axis=3)[..., :levels]

    return run_from(initial_state, (q, k, log_decay), aligned, levels, return_state, precision)


def _tree(k, log_decay, dtype, precision):
    """The `sums` of chunk_scores, of more than one chunk; k [B, G, N, C, K], log_decay [B, G, R, N, C]."""
    num_chunks = log_decay.shape[3]
    if pallas_kernels.why_join_keys_unsupported(num_chunks) is None:
        return pallas_kernels.join_keys(*map(_of_heads, sums_of_chunks(k, log_decay, precision)), dtype)
    whole = 1 << (num_chunks - 1).bit_length()
    # The kernels have their own sums of decays.
    of_heights = [_of_heads(sums) for sums, _ in sums_to_read(k, log_decay, precision)]
    return jnp.concatenate([pad_to(x, whole >> (i + 1), axis=2) for i, x in enumerate(of_heights)], axis=2).astype(
        dtype
    )


def _of_heads(x):
    """[B, G, R, ...] to [B, H, ...]."""
    return x.reshape(x.shape[0], -1, *x.shape[3:])
