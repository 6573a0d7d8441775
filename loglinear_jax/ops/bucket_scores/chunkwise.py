"""The chunkwise form in plain JAX: quadratic inside chunks of C tokens, sums of keys in a binary tree between them. O(T log T).

A sum of keys is a vector, not a matrix as the attention's states are. So every chunk takes a copy of all that it reads, and
reads it in one product; what is left is quadratic in C, which is why chunks are shorter here.
"""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from loglinear_jax.fenwick import num_levels
from loglinear_jax.ops.bucket_scores.continuation import run_from
from loglinear_jax.ops.decays import decay_matrix, decay_to_end
from loglinear_jax.ops.heads import dot, merge_heads, split_heads
from loglinear_jax.ops.levels import level_of_pairs, pad_to, sum_by_level
from loglinear_jax.ops.segments import beginnings_in_chunks, reads_left_sibling
from loglinear_jax.ops.tree import climb, fitting_chunk_size, in_pieces, into_parts

DEFAULT_CHUNK = 16


def score(q, k, log_decay, start, *, levels, return_state, chunk_size=None, precision=None):
    """Shapes and errors as in `bucket_scores`, whose arguments these are after its checks."""
    chunk_size = fitting_chunk_size(q.shape[1], chunk_size or DEFAULT_CHUNK)

    def aligned(q, k, log_decay, starts, levels):
        return _aligned(q, k, log_decay, beginnings_in_chunks(starts, chunk_size), levels, chunk_size, precision)

    return run_from(start, (q, k, log_decay), aligned, levels, return_state, precision)


def _aligned(q, k, log_decay, begin, levels, chunk_size, precision):
    """Scores [B, T, H, levels] of tokens at positions 0 .. T-1."""
    length, groups = q.shape[1:3]
    q, k = (into_parts(jnp.moveaxis(x, 1, 2), 2, chunk_size) for x in (q, k))
    log_decay = into_parts(split_heads(log_decay, groups), 3, chunk_size)
    scores = [_inside_chunks(q, k, log_decay, begin, precision)]
    if q.shape[2] > 1:
        scores.append(_between_chunks(q, k, log_decay, begin, precision))
    scores = jnp.concatenate(scores, axis=-1)
    scores = scores.reshape(*scores.shape[:3], -1, scores.shape[-1])[:, :, :, :length]
    return pad_to(merge_heads(scores), levels, axis=3)[..., :levels]


def _inside_chunks(q, k, log_decay, begin, precision) -> Float[Array, "B G R N C levels"]:
    chunk_size = log_decay.shape[-1]
    level = level_of_pairs(np.arange(chunk_size))

    def score(q, k, log_decay, begin):
        scores = dot("bgntk,bgnsk->bgnts", q, k, precision)[:, :, None]
        return sum_by_level(scores * decay_matrix(log_decay, begin), level, num_levels(chunk_size))

    return in_pieces(score, [(q, 2), (k, 2), (log_decay, 3), (begin, 3)], log_decay.size * chunk_size)


def _between_chunks(q, k, log_decay, begin, precision) -> Float[Array, "B G R N C heights"]:
    nodes, since = zip(*sums_to_read(k, log_decay, begin, precision), strict=True)
    read = jnp.stack([_copy_to_readers(x, height, q.shape[2]) for height, x in enumerate(nodes)], axis=4)
    weight = jnp.exp(jnp.stack(since, axis=4)[..., None, :] + jnp.cumsum(log_decay, axis=-1)[..., None])
    if begin is not None:
        weight = jnp.where(
            jnp.stack([reads_left_sibling(begin, height) for height in range(len(nodes))], axis=-1), weight, 0
        )
    return weight * dot("bgntk,bgrnik->bgrnti", q, read, precision)


def sums_to_read(
    k: Float[Array, "B G N C K"],
    log_decay: Float[Array, "B G R N C"],
    begin: Int[Array, "B 1 1 N C"] | None,
    precision=None,
):
    """For each height of the tree over the chunks, (the sums of keys [B, G, R, nodes, K] of its left nodes, which are
    those that are read; the log decay [B, G, R, N] from the end of the one that a chunk reads to the chunk)."""
    kept = decay_to_end(log_decay, begin)
    of_chunks = dot("bgnsk,bgrns->bgrnk", k, kept.astype(k.dtype), precision)[..., None]
    for sums, since in climb(of_chunks, jnp.sum(log_decay, axis=-1), begin):
        yield sums[:, :, :, ::2, :, 0], since


def _copy_to_readers(left: Float[Array, "B G R nodes K"], height: int, num_chunks: int) -> Float[Array, "B G R N K"]:
    """What each chunk reads of the left nodes at a height, 0 if nothing. No gather: so its gradient adds up in order, too."""
    left = left[:, :, :, :, None, None]
    read = jnp.concatenate([jnp.zeros_like(left), left], axis=4)  # [B, G, R, nodes, 2, 1, K]
    read = jnp.broadcast_to(read, (*read.shape[:5], 1 << height, read.shape[6]))
    read = read.reshape(*read.shape[:3], -1, read.shape[6])[:, :, :, :num_chunks]
    return pad_to(read, num_chunks, axis=3)
