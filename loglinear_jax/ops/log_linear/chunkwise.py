"""The chunkwise form: quadratic inside chunks of C tokens, a binary tree (`ops/tree.py`) between them. O(T log T)."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np

from loglinear_jax.fenwick import num_levels, tree_heights
from loglinear_jax.ops.continuation import run_from
from loglinear_jax.ops.decays import decay_matrix, decay_to_end
from loglinear_jax.ops.levels import dot, level_of_pairs, levels_after, merge_heads, select_level, split_heads
from loglinear_jax.ops.positions import beginnings, beginnings_in_chunks, reads_left_sibling
from loglinear_jax.ops.tree import climb, fitting_chunk_size, in_pieces, into_parts, read_left_siblings


def attend(q, k, v, log_decay, lam, start, *, return_state, chunk_size=None, precision=None):
    chunk_size = fitting_chunk_size(q.shape[1], chunk_size)

    def aligned(q, k, v, log_decay, lam, starts, last):
        out = _of_chunks(q, k, v, log_decay, lam, beginnings_in_chunks(starts, chunk_size), chunk_size, precision)
        if not return_state:
            return out, None
        options = dict(begin=beginnings(starts), precision=precision)
        return out, levels_after(last, k, v, log_decay, lam.shape[-1], **options)

    return run_from(start, (q, k, v, log_decay, lam), aligned, return_state, precision)


def _of_chunks(q, k, v, log_decay, lam, begin, chunk_size, precision):
    """Outputs [B, T, H, V] of tokens at positions 0 .. T-1."""
    length, groups = q.shape[1:3]
    q, k = (into_parts(jnp.moveaxis(x, 1, 2), 2, chunk_size) for x in (q, k))
    v, log_decay, lam = (into_parts(split_heads(x, groups), 3, chunk_size) for x in (v, log_decay, lam))
    num_chunks = q.shape[2]
    levels_inside = min(num_levels(chunk_size), lam.shape[-1])
    out = _inside_chunks(q, k, v, log_decay, lam[..., :levels_inside], begin, precision)
    if num_chunks > 1:
        values = decay_to_end(log_decay, begin)[..., None] * v
        states = dot("bgnsk,bgrnsv->bgrnkv", k, values.astype(v.dtype), precision)
        from_chunk = jnp.cumsum(log_decay, axis=-1)
        heights = tree_heights(num_chunks)
        # A split, whose gradient is one concatenation, not a padded sum for each level.
        lam_between = jax.lax.split(lam[..., levels_inside : levels_inside + heights], [1] * heights, axis=-1)
        for height, (state, since_sibling) in enumerate(climb(states, jnp.sum(log_decay, axis=-1), begin)):
            read = jax.checkpoint(functools.partial(_read_left_siblings, height=height, precision=precision))
            reads = None if begin is None else reads_left_sibling(begin, height)
            out = out + read(q, lam_between[height][..., 0], since_sibling, from_chunk, reads, state)
    return merge_heads(out.reshape(*out.shape[:3], num_chunks * chunk_size, -1)[:, :, :, :length])


def _inside_chunks(q, k, v, log_decay, lam, begin, precision):
    """The quadratic form within each chunk: [B, G, R, N, C, V]."""
    chunk_size = log_decay.shape[-1]
    level = level_of_pairs(np.arange(chunk_size))

    def of_piece(q, k, v, log_decay, lam, begin):
        scores = dot("bgntk,bgnsk->bgnts", q, k, precision)[:, :, None]
        weights = scores * decay_matrix(log_decay, begin) * select_level(lam, level)
        return dot("bgrnts,bgrnsv->bgrntv", weights.astype(v.dtype), v, precision)

    by_chunk = [(q, 2), (k, 2), (v, 3), (log_decay, 3), (lam, 3), (begin, 3)]
    return in_pieces(of_piece, by_chunk, log_decay.size * chunk_size)


def _read_left_siblings(q, lam, since_sibling, from_chunk, reads, state, *, height, precision):
    """What the chunks whose bit `height` is set read from their left sibling's state [B, G, R, nodes, K, V]; 0 for the others.

    q [B, G, N, C, K]; lam, from_chunk [B, G, R, N, C]; since_sibling [B, G, R, N]; reads [B, 1, 1, N, C]: the tokens that do,
    or None for all. Returns [B, G, R, N, C, V].
    """
    weight = lam * jnp.exp(since_sibling[..., None] + from_chunk)
    if reads is not None:
        weight = jnp.where(reads, weight, 0)

    def read(q, weight, state):
        return weight[..., None] * dot("bgpntk,bgrpkv->bgrpntv", q, state, precision)

    return read_left_siblings(read, height, [(q, 2), (weight, 3)], state)
