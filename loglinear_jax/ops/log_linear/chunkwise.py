"""The chunkwise form in plain JAX: quadratic inside chunks of C tokens, a binary tree between them (`ops/tree.py`). O(T log T).

Runs on any backend; differentiated by JAX.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from loglinear_jax.fenwick import fenwick_level, left_sibling, num_levels, tree_heights
from loglinear_jax.ops.continuation import run_from
from loglinear_jax.ops.decays import decay_matrix, decay_to_end
from loglinear_jax.ops.dtypes import accumulation_dtype
from loglinear_jax.ops.heads import dot, merge_heads, split_heads
from loglinear_jax.ops.levels import level_of_pairs, select_level
from loglinear_jax.ops.segments import beginnings_in_chunks, reads_left_sibling
from loglinear_jax.ops.tree import climb, fitting_chunk_size, in_pieces, into_parts, read_left_siblings

# On a CPU, sequences of a batch are taken so many at a time that their values have at most this many elements.
MAX_VALUES_CPU = 1 << 21


def attend(q, k, v, log_decay, lam, start, *, return_state, chunk_size=None, precision=None):
    """Shapes and errors as in `log_linear_attention`, whose arguments these are after its checks."""
    length, groups = q.shape[1:3]
    chunk_size = fitting_chunk_size(length, chunk_size)

    def aligned(q, k, v, log_decay, lam, starts, last):
        q, k = (jnp.moveaxis(x, 1, 2) for x in (q, k))
        v, log_decay, lam = (split_heads(x, groups) for x in (v, log_decay, lam))
        begin = beginnings_in_chunks(starts, chunk_size)
        out, levels = _aligned(q, k, v, log_decay, lam, begin, last, chunk_size, return_state, precision)
        if levels is not None:
            levels = levels.reshape(levels.shape[0], -1, *levels.shape[3:])
        return merge_heads(out), levels

    return run_from(start, (q, k, v, log_decay, lam), aligned, return_state, precision)


def _aligned(q, k, v, log_decay, lam, begin, last, chunk_size, return_state, precision):
    """Outputs of tokens at positions 0 .. T-1 and, if asked, the levels after token `last` (an int, or traced).

    q, k [B, G, T, K]; v [B, G, R, T, V]; log_decay [B, G, R, T]; lam [B, G, R, T, L]; begin [B, 1, 1, N, C] or None.
    """

    def sequences(q, k, v, log_decay, lam, begin):
        return _aligned_at_once(q, k, v, log_decay, lam, begin, last, chunk_size, return_state, precision)

    at_once = max(MAX_VALUES_CPU // v[0].size, 1)
    if jax.default_backend() != "cpu" or v.shape[0] <= at_once:
        return sequences(q, k, v, log_decay, lam, begin)

    def one_sequence(inputs):
        return jax.tree.map(lambda x: x[0], sequences(*jax.tree.map(lambda x: x[None], inputs)))

    return jax.lax.map(one_sequence, (q, k, v, log_decay, lam, begin), batch_size=at_once)


def _aligned_at_once(q, k, v, log_decay, lam, begin, last, chunk_size, return_state, precision):
    """`_aligned`, with intermediates of the whole batch in memory."""
    length = q.shape[2]
    q, k = into_parts(q, 2, chunk_size), into_parts(k, 2, chunk_size)
    v, log_decay, lam = (into_parts(x, 3, chunk_size) for x in (v, log_decay, lam))
    num_chunks = q.shape[2]
    levels_inside = min(num_levels(chunk_size), lam.shape[-1])

    def into_sequence(out):
        return out.reshape(*out.shape[:3], num_chunks * chunk_size, -1)[:, :, :, :length]

    out = _inside_chunks(q, k, v, log_decay, lam[..., :levels_inside], begin, precision)
    if num_chunks == 1 and not return_state:
        return into_sequence(out), None

    values = decay_to_end(log_decay, begin)[..., None] * v
    states = dot("bgnsk,bgrnsv->bgrnkv", k, values.astype(v.dtype), precision)
    chunk_decay = jnp.sum(log_decay, axis=-1)
    from_chunk = jnp.cumsum(log_decay, axis=-1)
    heights = tree_heights(num_chunks)
    # A split, whose gradient is one concatenation, not a padded sum for each level.
    lam_between = jax.lax.split(lam[..., levels_inside : levels_inside + heights], [1] * heights, axis=-1)
    tree = []
    for height, (state, since_sibling) in enumerate(climb(states, chunk_decay, begin)):
        read = jax.checkpoint(functools.partial(_read_left_siblings, height=height, precision=precision))
        reads = None if begin is None else reads_left_sibling(begin, height)
        out = out + read(q, lam_between[height][..., 0], since_sibling, from_chunk, reads, state)
        tree.append((state, since_sibling))
    levels = None
    if return_state:
        levels = _levels_after(last, k, v, log_decay, begin, from_chunk, tree, lam.shape[-1], chunk_size, precision)
    return into_sequence(out), levels


def _inside_chunks(q, k, v, log_decay, lam, begin, precision):
    """The quadratic form within each chunk: [B, G, R, N, C, V].

    Its C x C matrices take more memory than everything else, so long sequences go through in pieces.
    """
    chunk_size = log_decay.shape[-1]
    level = level_of_pairs(np.arange(chunk_size))

    def attend(q, k, v, log_decay, lam, begin):
        scores = dot("bgntk,bgnsk->bgnts", q, k, precision)[:, :, None]
        weights = scores * decay_matrix(log_decay, begin) * select_level(lam, level)
        return dot("bgrnts,bgrnsv->bgrntv", weights.astype(v.dtype), v, precision)

    by_chunk = [(q, 2), (k, 2), (v, 3), (log_decay, 3), (lam, 3), (begin, 3)]
    return in_pieces(attend, by_chunk, log_decay.size * chunk_size)


def _read_left_siblings(q, lam, since_sibling, from_chunk, reads, state, *, height, precision):
    """What the chunks whose bit `height` is set read from their left sibling's state; 0 for the others.

    q [B, G, N, C, K]; lam, from_chunk [B, G, R, N, C]; since_sibling [B, G, R, N]; reads [B, 1, 1, N, C]: the tokens that do,
    or None for all; state [B, G, R, nodes, K, V]. Returns [B, G, R, N, C, V].
    """
    weight = lam * jnp.exp(since_sibling[..., None] + from_chunk)
    if reads is not None:
        weight = jnp.where(reads, weight, 0)

    def read(q, weight, state):
        return weight[..., None] * dot("bgpntk,bgrpkv->bgrpntv", q, state, precision)

    return read_left_siblings(read, height, [(q, 2), (weight, 3)], state)


def _levels_after(
    last, k, v, log_decay, begin, from_chunk, tree, levels_out, chunk_size, precision
) -> Float[Array, "B G R L K V"]:
    """Levels of the partition after token `last`, an index into the chunked sequence: its chunk's own, then siblings'.

    Not `ops.levels.levels_after`, which sums over all tokens again (once a level, if `last` is traced): the siblings' sums are
    in the tree already, and only the last token's chunk is left to sum.
    """
    acc_dtype = accumulation_dtype(k, v)
    chunk, place = last // chunk_size, last % chunk_size

    def at_chunk(x, axis):
        return jax.lax.dynamic_index_in_dim(x, chunk, axis=axis, keepdims=False)

    seen = jnp.arange(chunk_size) <= place
    begin_last = None if begin is None else at_chunk(begin, 3)
    decay = decay_to_end(jnp.where(seen, at_chunk(log_decay, 3), 0), begin_last)
    level = jnp.where(seen, fenwick_level(jnp.asarray(place, jnp.int32), jnp.arange(chunk_size, dtype=jnp.int32)), -1)
    in_level = jax.nn.one_hot(level, levels_out, dtype=acc_dtype)
    values = decay[..., None] * at_chunk(v, 3)
    levels = jnp.einsum(
        "sl,bgsk,bgrsv->bgrlkv", in_level, at_chunk(k, 2).astype(acc_dtype), values, precision=precision
    )

    since_chunk = jax.lax.dynamic_index_in_dim(at_chunk(from_chunk, 3), place, axis=3, keepdims=False)
    for height, (state, since_sibling) in enumerate(tree):
        is_right, sibling = left_sibling(chunk, height)
        weight = jnp.exp(at_chunk(since_sibling, 3) + since_chunk) * is_right
        if begin is not None:
            weight = jnp.where(at_chunk(reads_left_sibling(begin, height), 3)[..., -1], weight, 0)
        sibling_state = jax.lax.dynamic_index_in_dim(state, sibling, axis=3, keepdims=False)
        levels = levels.at[:, :, :, num_levels(chunk_size) + height].add(weight[..., None, None] * sibling_state)
    return levels
