"""The chunkwise form: O(T log T), in plain JAX.

A sum of keys is a vector, not a matrix as the attention's states are. So every chunk takes a copy of all that it reads, and
reads it in one product; what is left is quadratic in C, which is why chunks are shorter here.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from loglinear_jax.fenwick import num_levels
from loglinear_jax.ops.bucket_scores.parallel import with_initial_state
from loglinear_jax.ops.continuation import Start, Windows
from loglinear_jax.ops.decays import decay_matrix, decay_to_end
from loglinear_jax.ops.levels import dot, level_of_pairs, merge_heads, pad_to, split_heads, sum_by_level
from loglinear_jax.ops.positions import beginnings_in_chunks, reads_left_sibling
from loglinear_jax.ops.tree import climb, fitting_chunk_size, in_pieces, into_parts

DEFAULT_CHUNK = 16


def score(q, k, log_decay, start, *, levels, return_state, chunk_size=None, precision=None):
    chunk_size = fitting_chunk_size(q.shape[1], chunk_size or DEFAULT_CHUNK)

    def aligned(q, k, log_decay, starts, levels):
        return _of_chunks(q, k, log_decay, beginnings_in_chunks(starts, chunk_size), levels, chunk_size, precision)

    return run_from(start, (q, k, log_decay), aligned, levels, return_state, precision)


def _of_chunks(q, k, log_decay, begin, levels, chunk_size, precision):
    """Scores [B, T, H, levels] of tokens at positions 0 .. T-1."""
    length, groups = q.shape[1:3]
    q, k = (into_parts(jnp.moveaxis(x, 1, 2), 2, chunk_size) for x in (q, k))
    log_decay = into_parts(split_heads(log_decay, groups), 3, chunk_size)
    level = level_of_pairs(np.arange(chunk_size))

    def inside_chunks(q, k, log_decay, begin):
        scores = dot("bgntk,bgnsk->bgnts", q, k, precision)[:, :, None]
        return sum_by_level(scores * decay_matrix(log_decay, begin), level, num_levels(chunk_size))

    by_chunk = [(q, 2), (k, 2), (log_decay, 3), (begin, 3)]
    scores = [in_pieces(inside_chunks, by_chunk, log_decay.size * chunk_size)]
    if q.shape[2] > 1:
        scores.append(_between_chunks(q, k, log_decay, begin, precision))
    scores = jnp.concatenate(scores, axis=-1)
    scores = scores.reshape(*scores.shape[:3], -1, scores.shape[-1])[:, :, :, :length]
    return pad_to(merge_heads(scores), levels, axis=3)[..., :levels]


def _between_chunks(q, k, log_decay, begin, precision) -> Float[Array, "B G R N C heights"]:
    """The scores of the left siblings' sums of keys, of which there is one a height of the tree."""
    kept = decay_to_end(log_decay, begin)
    of_chunks = dot("bgnsk,bgrns->bgrnk", k, kept.astype(k.dtype), precision)[..., None]
    nodes, since = zip(*climb(of_chunks, jnp.sum(log_decay, axis=-1), begin), strict=True)
    read = [_copy_to_readers(x[:, :, :, ::2, :, 0], height, q.shape[2]) for height, x in enumerate(nodes)]
    weight = jnp.exp(jnp.stack(since, axis=4)[..., None, :] + jnp.cumsum(log_decay, axis=-1)[..., None])
    if begin is not None:
        reads = jnp.stack([reads_left_sibling(begin, height) for height in range(len(nodes))], axis=-1)
        weight = jnp.where(reads, weight, 0)
    return weight * dot("bgntk,bgrnik->bgrnti", q, jnp.stack(read, axis=4), precision)


def _copy_to_readers(left: Float[Array, "B G R nodes K"], height: int, num_chunks: int) -> Float[Array, "B G R N K"]:
    """What each chunk reads of the left nodes at a height, 0 if nothing. No gather: so its gradient adds up in order, too."""
    left = left[:, :, :, :, None, None]
    read = jnp.concatenate([jnp.zeros_like(left), left], axis=4)  # [B, G, R, nodes, 2, 1, K]
    read = jnp.broadcast_to(read, (*read.shape[:5], 1 << height, read.shape[6]))
    read = read.reshape(*read.shape[:3], -1, read.shape[6])[:, :, :, :num_chunks]
    return pad_to(read, num_chunks, axis=3)


def run_from(start: Start, tokens: tuple, aligned: Callable, levels: int, return_state: bool, precision):
    """As `continuation.run_from`. aligned: function of q, k and log_decay of tokens at positions 0, 1, ..., of their
    `Start.starts`, and of a number of levels, that returns their scores."""
    q, k, log_decay = tokens
    if start.position is None:
        scores = aligned(*tokens, start.starts, levels)
    else:
        windows = Windows(start.position, tokens[0].shape[1], levels)

        def of_sequence(place: Callable, local: Float[Array, "B T H M"]) -> Float[Array, "B T H L"]:
            return jnp.moveaxis(place(jnp.moveaxis(local, 3, 2)), 2, 3)

        def at_the_beginning():
            return of_sequence(windows.local_levels_at_end, aligned(*tokens, start.starts, windows.top))

        def anywhere():
            laid = (None if x is None else windows.lay(x) for x in (*tokens, start.starts))
            return of_sequence(windows.levels_at_end, windows.take(aligned(*laid, windows.top + 1)))

        scores = jax.lax.cond(windows.offset == 0, at_the_beginning, anywhere)
    return with_initial_state(scores, q, k, log_decay, levels, start, return_state, precision)
