"""The binary tree over a sequence's chunks in plain JAX: how it is cut, built from the leaves up, and read.

Chunk c reads, for each set bit i of c, the state of one left sibling: chunks [((c >> i) - 1) << i, (c >> i) << i). So only left
children of the perfect binary tree over the chunks are ever read, and they are built with no scan over time. Arrays here have
their chunks, or a height's nodes, on axis 3, behind [B, G, R].
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from loglinear_jax.fenwick import left_sibling, num_levels, right_siblings, tree_heights
from loglinear_jax.ops.positions import reads_left_sibling

DEFAULT_CHUNK = 64
# Elements of each intermediate of in_pieces at a time: what fits a CPU's cache; on others, what is small beside their memory.
MAX_ELEMENTS_CPU, MAX_ELEMENTS = 1 << 19, 1 << 26


def fitting_chunk_size(length: int, chunk_size: int | None = None) -> int:
    """chunk_size, or DEFAULT_CHUNK, but at most the smallest power of two that holds the sequence."""
    return min(chunk_size or DEFAULT_CHUNK, 1 << (num_levels(length) - 1))


def into_parts(x: Array, axis: int, size: int) -> Array:
    """`axis` cut into two: parts of `size`, the last filled up with zeros, and the place in a part."""
    parts = -(-x.shape[axis] // size)
    pad = [(0, 0)] * x.ndim
    pad[axis] = (0, parts * size - x.shape[axis])
    return jnp.pad(x, pad).reshape(*x.shape[:axis], parts, size, *x.shape[axis + 1 :])


def in_pieces(function: Callable, chunked: Sequence[tuple[Any, int]], elements: int) -> Array:
    """function(*arrays), [B, G, R, N, ...], which treats each chunk by itself, in pieces of so many chunks that intermediates
    have at most MAX_ELEMENTS elements; none of them is kept for the backward pass.

    chunked: the arrays, as (array or None, its axis of chunks), an array first. elements: of an intermediate of all chunks.
    """
    function = jax.checkpoint(function)
    x, axis = chunked[0]
    num_chunks = x.shape[axis]
    most = MAX_ELEMENTS_CPU if jax.default_backend() == "cpu" else MAX_ELEMENTS
    piece = max(most * num_chunks // elements, 1)
    if num_chunks <= piece:
        return function(*(x for x, _ in chunked))
    pieces = [None if x is None else jnp.moveaxis(into_parts(x, axis, piece), axis, 0) for x, axis in chunked]
    out = jnp.moveaxis(jax.lax.map(lambda x: function(*x), pieces), 0, 3)
    return out.reshape(*out.shape[:3], -1, *out.shape[5:])[:, :, :, :num_chunks]


def climb(
    state: Float[Array, "B G R N K V"],
    chunk_decay: Float[Array, "B G R N"],
    begin: Int[Array, "B 1 1 N C"] | None = None,
) -> Iterator[tuple[Float[Array, "B G R nodes K V"], Float[Array, "B G R N"]]]:
    """At each height: (the state of every node there, the log decay from the end of each chunk's left sibling to the chunk).

    state, chunk_decay: of each chunk, the state at its end from its own tokens, and its tokens' log decay in all. begin: where
      the segment of each token begins, if there are several; then states are of the segment that their last token is of.
    """
    chunks = np.arange(chunk_decay.shape[-1])
    since_sibling = jnp.zeros_like(chunk_decay)
    node_decay = chunk_decay
    for height in range(tree_heights(len(chunks))):
        yield state, since_sibling
        # One level up: parent = right child + what is left of the left child after it.
        nodes = state.shape[3] // 2
        left, right = (state[:, :, :, side : 2 * nodes : 2] for side in (0, 1))
        left_decay, right_decay = (node_decay[..., side : 2 * nodes : 2] for side in (0, 1))
        is_right, sibling = left_sibling(chunks, height)
        since_sibling = since_sibling + jnp.where(is_right == 1, node_decay[..., sibling], 0)
        kept = jnp.exp(right_decay)
        if begin is not None:
            last = (2 << height) - 1
            kept = jnp.where(reads_left_sibling(begin, height)[..., last :: 2 << height, -1], kept, 0)
        state = right + kept[..., None, None] * left
        node_decay = left_decay + right_decay


def read_left_siblings(read: Callable, height: int, chunked: Sequence[tuple[Array, int]], state: Array) -> Array:
    """What `read` gives for the chunks whose bit `height` is set; 0 for the others. Returns [B, G, R, N, ...].

    chunked: what `read` takes of each chunk, as (array, its axis of chunks). state [B, G, R, nodes, ...]: of the nodes there.
    read: function of these, in the same order, with the axis of chunks cut into (nodes, chunks of one), and of state; a node's
      chunks read the same state. Returns [B, G, R, nodes, chunks of one, ...].
    """
    x, axis = chunked[0]
    num_chunks = x.shape[axis]
    block = 1 << height
    pairs, partial = right_siblings(num_chunks, height)

    def blocks(x, axis, start, count, size):
        x = jax.lax.slice_in_dim(x, start, start + count * size, axis=axis)
        return x.reshape(*x.shape[:axis], count, size, *x.shape[axis + 1 :])

    added = []
    if pairs:
        right = (
            jax.lax.slice_in_dim(blocks(x, axis, 0, pairs, 2 * block), block, 2 * block, axis=axis + 1)
            for x, axis in chunked
        )
        full = read(*right, state[:, :, :, : 2 * pairs : 2])
        full = jnp.pad(full, [(0, 0)] * 4 + [(block, 0)] + [(0, 0)] * (full.ndim - 5))
        added.append(full.reshape(*full.shape[:3], 2 * block * pairs, *full.shape[5:]))
    if partial:
        start = num_chunks - partial
        right = (blocks(x, axis, start, 1, partial) for x, axis in chunked)
        last = read(*right, state[:, :, :, 2 * pairs : 2 * pairs + 1])[:, :, :, 0]
        added.append(jnp.pad(last, [(0, 0)] * 3 + [(start - 2 * block * pairs, 0)] + [(0, 0)] * (last.ndim - 4)))
    whole = jnp.concatenate(added, axis=3)
    missing = num_chunks - whole.shape[3]
    return jnp.pad(whole, [(0, 0)] * 3 + [(0, missing)] + [(0, 0)] * (whole.ndim - 4))
