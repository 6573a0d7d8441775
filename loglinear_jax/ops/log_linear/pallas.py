"""The chunkwise form by the GPU kernels of pallas_kernels, and what they leave to plain JAX: states in and out."""

from __future__ import annotations

import functools
import warnings

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

import pallas_kernels
from loglinear_jax.fenwick import fenwick_level
from loglinear_jax.ops import common
from loglinear_jax.ops.decays import decay_to_end


def is_best(q, k, v, chunk_size=None, precision=None) -> bool:
    """Whether `pallas` is the form to choose: on a GPU, unless it cannot run, of which there is one warning for each reason."""
    if pallas_kernels.interpreting() or not pallas_kernels.runs_on_gpu():
        return False
    dtype = jnp.result_type(q, k, v)
    reason = pallas_kernels.why_unsupported(q.shape[-1], v.shape[-1], dtype, chunk_size, precision)
    if reason is not None:
        _warn_once(reason)
    return reason is None


@functools.cache
def _warn_once(reason: str) -> None:
    warnings.warn(f"log_linear_attention falls back to implementation='xla', which is slower: {reason}", stacklevel=4)


def pallas(q, k, v, log_decay, lam, *, initial_state, return_state, chunk_size=None, precision=None):
    """Shapes and errors as in `log_linear_attention`, whose arguments these are after its checks."""

    def aligned(q, k, v, log_decay, lam, last):
        out = pallas_kernels.fenwick_attention(q, k, v, log_decay, lam, chunk_size=chunk_size, precision=precision)
        return out, levels_after(last, k, v, log_decay, lam.shape[-1], precision) if return_state else None

    return common.run_from(initial_state, (q, k, v, log_decay, lam), aligned, return_state, precision)


def levels_after(
    last,
    k: Float[Array, "B T G K"],
    v: Float[Array, "B T H V"],
    log_decay: Float[Array, "B T H"],
    levels: int,
    precision=None,
) -> Float[Array, "B H L K V"]:
    """Levels of the partition after token `last` (an int, or traced) of a sequence from position 0."""
    groups = k.shape[2]
    seen = jnp.arange(v.shape[1]) <= last
    decay = jnp.swapaxes(decay_to_end(jnp.swapaxes(jnp.where(seen[:, None], log_decay, 0.0), 1, 2)), 1, 2)
    values = jnp.where(seen[:, None], decay, 0.0)[..., None] * v

    def bucket(k, values):
        state = common.dot(
            "bsgk,bsgrv->bgrkv", k, values.reshape(*values.shape[:2], groups, -1, values.shape[-1]), precision
        )
        return state.reshape(v.shape[0], v.shape[2], *state.shape[3:])

    if isinstance(last, int):
        empty = jnp.zeros((v.shape[0], v.shape[2], k.shape[-1], v.shape[-1]), log_decay.dtype)
        states = [bucket(k[:, last : last + 1], values[:, last : last + 1])] + [empty] * (levels - 1)
        for height in range(last.bit_length()):
            if last >> height & 1:
                end = last >> height << height
                tokens = slice(end - (1 << height), end)
                states[height + 1] = bucket(k[:, tokens], values[:, tokens])
        return jnp.stack(states, axis=2)
    level_of = fenwick_level(last, jnp.arange(v.shape[1], dtype=jnp.int32))
    states = jax.lax.map(
        lambda level: bucket(k, jnp.where((level_of == level)[:, None, None], values, 0.0)), jnp.arange(levels)
    )
    return jnp.moveaxis(states, 0, 2)
