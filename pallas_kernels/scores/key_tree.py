"""The binary tree of sums of keys over a sequence's chunks by one kernel, with its gradient: a program has some columns of all
chunks of a head, and builds all heights of the tree from them. XLA has trees of more than MAX_CHUNKS, a height after the other.

Names and shapes inside, N chunks, up to a power of two ("whole"), padded with zeros:

  of_chunks  [B, H, N, K] float32: sums of a chunk's keys, decayed until its end
  decay      [B, H, N] float32: the log2 decay over a chunk
  sums       [B, H, M, K]: of the left node of every pair of nodes, height after height from the chunks up, M = N - 1
"""

from __future__ import annotations

import functools
import math

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from pallas_kernels.common.launch import HeadAxes, call, fold_mapped_axes, pad
from pallas_kernels.common.support import interpreting, why_cannot_run
from pallas_kernels.common.tiles import MIN_TILE, Launch

MAX_CHUNKS = 1024
ELEMENTS = 4096  # of all chunks that a program has, where that leaves it columns enough
ELEMENTS_A_WARP = 2048


def join_keys(
    of_chunks: Float[Array, "B H N K"], decay: Float[Array, "B H N"], dtype: DTypeLike
) -> Float[Array, "B H M K"]:
    """Sums of keys of the nodes that are read in the tree over the chunks.

    Args:
      of_chunks: [B, H, N, K] float32, of each chunk, decayed until its end; K a power of two of at least 16, N ≥ 2.
      decay: [B, H, N] float32, the log2 decay over each chunk, ≤ 0 and finite.
      dtype: of the result; sums are float32.

    Returns sums [B, H, M, K], M = N - 1 for N rounded up to a power of two: of chunks [2j · 2^i, (2j + 1) · 2^i) for
    j = 0, 1, ..., for one height i after the other. Differentiable in reverse mode, and batched by vmap, to any depth.
    """
    whole = 1 << (of_chunks.shape[2] - 1).bit_length()
    of_chunks, decay = pad(of_chunks, (2, whole)), pad(decay, (2, whole))
    if whole > MAX_CHUNKS or why_cannot_run() is not None:
        return _join_by_xla(of_chunks, decay).astype(dtype)
    return _differentiable(of_chunks.shape[1], str(jnp.dtype(dtype)), interpreting())(of_chunks, decay)


def _join_by_xla(of_chunks, decay):
    nodes, sums = of_chunks, []
    while nodes.shape[2] > 1:
        left, right = (nodes[:, :, side::2] for side in (0, 1))
        left_decay, right_decay = (decay[:, :, side::2] for side in (0, 1))
        sums.append(left)
        nodes, decay = right + jnp.exp2(right_decay)[..., None] * left, left_decay + right_decay
        # Else XLA puts several heights into one kernel, and their gradients, which computes lower ones again and again.
        nodes, decay = lax.optimization_barrier((nodes, decay))
    return jnp.concatenate(sums, axis=2)


@functools.cache
def _differentiable(heads: int, dtype: str, interpret: bool):
    """The function (of_chunks, decay) -> sums."""
    forward = fold_mapped_axes(functools.partial(_forward, dtype=dtype, interpret=interpret), heads=HeadAxes(heads))
    backward = fold_mapped_axes(functools.partial(_backward, interpret=interpret), heads=HeadAxes(heads))

    def forward_and_keep(of_chunks, decay):
        sums = forward(of_chunks, decay)
        return sums, (sums, decay)

    apply = jax.custom_vjp(forward)
    apply.defvjp(forward_and_keep, lambda kept, d_sums: tuple(backward(*kept, d_sums)))
    return apply


def _columns(whole: int, key_dim: int) -> int:
    """Of K, that a program has."""
    return min(max(ELEMENTS // whole, MIN_TILE), key_dim)


def _launch(whole: int, columns: int) -> Launch:
    return Launch(heads=1, warps=max(whole * columns // ELEMENTS_A_WARP, 2), stages=1)


def _matrix(rows: int, columns: int):
    """Some columns of a head's matrix [rows, K]."""
    return pl.BlockSpec((None, None, rows, columns), lambda x, y, z: (z, y, 0, x))


def _chunks_of_head(whole: int):
    return pl.BlockSpec((None, None, whole), lambda x, y, z: (z, y, 0))


def _forward(of_chunks, decay, *, dtype: str, interpret: bool):
    batch, heads, whole, key_dim = of_chunks.shape
    columns = _columns(whole, key_dim)
    return call(
        _forward_kernel,
        "join_keys",
        (key_dim // columns, heads, batch),
        [_matrix(whole, columns), _chunks_of_head(whole)],
        _matrix(whole - 1, columns),
        jax.ShapeDtypeStruct((batch, heads, whole - 1, key_dim), dtype),
        _launch(whole, columns),
        interpret,
    )(of_chunks, decay)


def _backward(sums, decay, d_sums, *, interpret: bool):
    batch, heads, nodes, key_dim = sums.shape
    whole = nodes + 1
    columns = _columns(whole, key_dim)
    blocks = key_dim // columns
    d_of_chunks, d_decay = call(
        _backward_kernel,
        "join_keys_gradients",
        (blocks, heads, batch),
        [_matrix(nodes, columns), _chunks_of_head(whole), _matrix(nodes, columns)],
        [_matrix(whole, columns), pl.BlockSpec((None, None, None, whole), lambda x, y, z: (x, z, y, 0))],
        [
            jax.ShapeDtypeStruct((batch, heads, whole, key_dim), jnp.float32),
            jax.ShapeDtypeStruct((blocks, batch, heads, whole), jnp.float32),
        ],
        _launch(whole, columns),
        interpret,
    )(sums, decay, d_sums)
    return [d_of_chunks, jnp.sum(d_decay, axis=0)]


def _children(x, side: int):
    """The left (0) or right (1) ones of pairs of neighbours [2n, ...]: [n, ...]."""
    pairs = x.reshape(x.shape[0] // 2, 2, *x.shape[1:])
    return jnp.sum(jnp.where(lax.broadcasted_iota(jnp.int32, pairs.shape, 1) == side, pairs, 0.0), axis=1)


def _pairs_of(left, right):
    """The opposite: [n, ...] each to [2n, ...]."""
    side = lax.broadcasted_iota(jnp.int32, (left.shape[0], 2, *left.shape[1:]), 1)
    return jnp.where(side == 0, left[:, None], right[:, None]).reshape(2 * left.shape[0], *left.shape[1:])


def _right_decays(decay_ref) -> list:
    """For each height, the log decays over the right node of every pair."""
    decay, of_heights = decay_ref[:], []
    while decay.shape[0] > 1:
        left, right = (_children(decay, side) for side in (0, 1))
        of_heights.append(right)
        decay = left + right
    return of_heights


def _forward_kernel(of_chunks_ref, decay_ref, sums_ref):
    nodes, first = of_chunks_ref[:, :], 0
    for right_decay in _right_decays(decay_ref):
        pairs = right_decay.shape[0]
        left = _children(nodes, 0)
        sums_ref[pl.ds(first, pairs), :] = left.astype(sums_ref.dtype)
        nodes, first = _children(nodes, 1) + jnp.exp2(right_decay)[:, None] * left, first + pairs


def _backward_kernel(sums_ref, decay_ref, d_sums_ref, d_of_chunks_ref, d_decay_ref):
    first, columns = sums_ref.shape
    d_nodes, d_decay = jnp.zeros((1, columns), jnp.float32), jnp.zeros((1,), jnp.float32)
    for right_decay in reversed(_right_decays(decay_ref)):
        pairs = right_decay.shape[0]
        first -= pairs
        sums, d_sums = (ref[pl.ds(first, pairs), :].astype(jnp.float32) for ref in (sums_ref, d_sums_ref))
        d_left = jnp.exp2(right_decay)[:, None] * d_nodes
        d_decay = _pairs_of(d_decay, d_decay + math.log(2) * jnp.sum(d_left * sums, axis=1))
        d_nodes = _pairs_of(d_left + d_sums, d_nodes)
    d_of_chunks_ref[:, :], d_decay_ref[:] = d_nodes, d_decay
