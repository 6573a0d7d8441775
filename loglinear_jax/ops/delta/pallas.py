"""The chunkwise forms by GPU kernels; states in and out are left to plain JAX, except one state."""

from __future__ import annotations

import functools

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

import pallas_kernels
from loglinear_jax.fenwick import num_levels
from loglinear_jax.ops.delta.chunkwise import by_chunks, node_at
from loglinear_jax.ops.delta.transitions import Maps
from loglinear_jax.ops.levels import pad_to
from loglinear_jax.ops.positions import forgetting
from loglinear_jax.ops.sharding import varying_as
from loglinear_jax.ops.tree import fitting_chunk_size
from pallas_kernels import KERNELS


def is_best(q, k, v, chunk_size=None, precision=None) -> bool:
    """As of log-linear attention; and for more than one chunk, where it was faster than plain JAX."""
    dtype, dims = jnp.result_type(q, k, v), (q.shape[-1], v.shape[-1])
    size = _kernel_chunk(q, v, dtype, chunk_size)
    return q.shape[1] > size and KERNELS["delta"].is_best(size, *dims, dtype, precision)


def attend(q, k, v, log_decay, beta, lam, start, *, return_state, chunk_size=None, precision=None):
    chunk_size = _required_chunk(q, v, chunk_size, precision)
    attend = functools.partial(_attend, return_state=return_state)
    return by_chunks(attend, (q, k, v, log_decay, beta, lam), start, return_state, chunk_size, precision)


def one_state(q, k, v, log_decay, beta, start, *, return_state, chunk_size=None, precision=None):
    length, initial_state = q.shape[1], start.state
    chunk_size = _required_chunk(q, v, chunk_size, precision)
    whole = -(-length // chunk_size) * chunk_size
    log_decay = forgetting(log_decay, start.starts)
    q, k, v, log_decay, beta = (pad_to(x, whole, axis=1) for x in (q, k, v, log_decay, beta))
    sizes = dict(chunk_size=chunk_size, precision=precision, segmented=start.starts is not None)
    if initial_state is None:
        shape = len(q), v.shape[2], q.shape[-1], v.shape[-1]
        initial_state = varying_as(q, jnp.zeros(shape, log_decay.dtype))
    out, state = pallas_kernels.delta_scan(q, k, v, log_decay, beta, initial_state, **sizes)
    return out[:, :length], state if return_state else None


def _kernel_chunk(q, v, dtype, chunk_size: int | None) -> int:
    chunk_size = chunk_size or pallas_kernels.delta_chunk(q.shape[-1], v.shape[-1], dtype)
    return max(fitting_chunk_size(q.shape[1], chunk_size), pallas_kernels.MIN_TILE)


def _required_chunk(q, v, chunk_size: int | None, precision) -> int:
    """Tokens a chunk of the kernels. Raises UnsupportedError where they cannot run the inputs."""
    chunk_size = _kernel_chunk(q, v, q.dtype, chunk_size)
    KERNELS["delta"].require(chunk_size, q.shape[-1], v.shape[-1], q.dtype, precision)
    return chunk_size


def _log_decay_of_chunks(log_decay: Float[Array, "B T H"], chunk_size: int) -> Float[Array, "B H N"]:
    by_chunk = log_decay.reshape(len(log_decay), -1, chunk_size, log_decay.shape[2])
    return jnp.swapaxes(jnp.sum(by_chunk, axis=2), 1, 2)


def _attend(
    q, k, v, log_decay, beta, lam, begin, inside: int, heights: int, chunk_size: int, precision, *, return_state: bool
):
    """As `chunkwise._attend`; without return_state no nodes of the tree."""
    if begin is not None:
        starts = begin == np.arange(chunk_size, dtype=np.int32)
        log_decay = forgetting(log_decay, starts.reshape(len(starts), -1))
    lam = pad_to(lam, num_levels(chunk_size) + heights, axis=3)
    options = dict(chunk_size=chunk_size, precision=precision, segmented=begin is not None)
    out, *of_chunks = pallas_kernels.delta_chunks(
        q, k, v, log_decay, beta, lam[..., : num_levels(chunk_size)], **options
    )
    if not heights:
        return out, None
    reads, lost, states = of_chunks
    log_decay, lam = _log_decay_of_chunks(log_decay, chunk_size), lam[..., inside : inside + heights]
    if not return_state:
        return pallas_kernels.read_levels(out, reads, lam, log_decay, lost, states, precision=precision), None
    nodes = pallas_kernels.join_tree(log_decay, lost, states, precision=precision)
    out = pallas_kernels.read_tree(out, reads, lam, *nodes, precision=precision)
    decay, lost, states = (x.reshape(len(q), q.shape[2], -1, *x.shape[2:]) for x in nodes)

    def left_node_of(chunk):
        return lambda height: node_at((Maps(decay, lost), states), jnp.maximum((chunk >> height << height) - 1, 0))

    return out, left_node_of
