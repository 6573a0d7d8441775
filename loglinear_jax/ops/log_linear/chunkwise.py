"""The chunkwise form in plain JAX: quadratic inside chunks of C tokens, a binary tree between them. O(T log T).

Chunk c reads, for each set bit i of c, the state of one left sibling: chunks [((c >> i) - 1) << i, (c >> i) << i). So
only left children of the perfect binary tree over the chunks are ever read; they are built bottom-up, with no scan
over time. Runs on any backend; differentiated by JAX.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from loglinear_jax.fenwick import fenwick_level, left_sibling, num_levels, right_siblings, tree_heights
from loglinear_jax.ops import common
from loglinear_jax.ops.decays import decay_matrix, decay_to_end

DEFAULT_CHUNK = 64
# Elements of each C x C intermediate at a time: what fits a CPU's cache; on others, what is small beside their memory.
MAX_SCORES_CPU, MAX_SCORES = 1 << 19, 1 << 26
# On a CPU, sequences of a batch are taken so many at a time that their values have at most this many elements.
MAX_VALUES_CPU = 1 << 21


def fitting_chunk_size(length: int, chunk_size: int | None = None) -> int:
    """chunk_size, or DEFAULT_CHUNK, but at most the smallest power of two that holds the sequence."""
    return min(chunk_size or DEFAULT_CHUNK, 1 << (num_levels(length) - 1))


def chunkwise(q, k, v, log_decay, lam, *, initial_state, return_state, chunk_size=None, precision=None):
    """Shapes and errors as in `log_linear_attention`, whose arguments these are after its checks."""
    length, groups = q.shape[1:3]
    chunk_size = fitting_chunk_size(length, chunk_size)

    def aligned(q, k, v, log_decay, lam, last):
        q, k = (jnp.moveaxis(x, 1, 2) for x in (q, k))
        v, log_decay, lam = (common.split_heads(x, groups) for x in (v, log_decay, lam))
        out, levels = _aligned(q, k, v, log_decay, lam, last, chunk_size, return_state, precision)
        if levels is not None:
            levels = levels.reshape(levels.shape[0], -1, *levels.shape[3:])
        return common.merge_heads(out), levels

    tokens = q, k, v, log_decay, lam
    return common.run_from(initial_state, tokens, aligned, return_state, precision)


def _aligned(q, k, v, log_decay, lam, last, chunk_size, return_state, precision):
    """Outputs of tokens at positions 0 .. T-1 and, if asked, the levels after token `last` (an int, or traced).

    q, k [B, G, T, K]; v [B, G, R, T, V]; log_decay [B, G, R, T]; lam [B, G, R, T, L].
    """

    def sequences(q, k, v, log_decay, lam):
        return _aligned_at_once(q, k, v, log_decay, lam, last, chunk_size, return_state, precision)

    at_once = max(MAX_VALUES_CPU // v[0].size, 1)
    if jax.default_backend() != "cpu" or v.shape[0] <= at_once:
        return sequences(q, k, v, log_decay, lam)

    def one_sequence(inputs):
        return jax.tree.map(lambda x: x[0], sequences(*(x[None] for x in inputs)))

    return jax.lax.map(one_sequence, (q, k, v, log_decay, lam), batch_size=at_once)


def _aligned_at_once(q, k, v, log_decay, lam, last, chunk_size, return_state, precision):
    """`_aligned`, with intermediates of the whole batch in memory."""
    length = q.shape[2]
    num_chunks = -(-length // chunk_size)

    def into_chunks(x, axis):
        pad = [(0, 0)] * x.ndim
        pad[axis] = (0, num_chunks * chunk_size - length)
        return jnp.pad(x, pad).reshape(*x.shape[:axis], num_chunks, chunk_size, *x.shape[axis + 1 :])

    q, k = into_chunks(q, 2), into_chunks(k, 2)
    v, log_decay, lam = into_chunks(v, 3), into_chunks(log_decay, 3), into_chunks(lam, 3)
    levels_inside = min(num_levels(chunk_size), lam.shape[-1])

    out = _inside_chunks(q, k, v, log_decay, lam[..., :levels_inside], precision)
    if num_chunks == 1 and not return_state:
        return out.reshape(*out.shape[:3], chunk_size, -1)[:, :, :, :length], None

    values = decay_to_end(log_decay)[..., None] * v
    state = common.dot("bgnsk,bgrnsv->bgrnkv", k, values.astype(v.dtype), precision)
    chunk_decay = jnp.sum(log_decay, axis=-1)
    from_chunk = jnp.cumsum(log_decay, axis=-1)
    since_sibling = jnp.zeros_like(chunk_decay)  # log decay from the end of the left sibling to the chunk's start
    node_decay = chunk_decay
    states, since_siblings = [], []
    heights = tree_heights(num_chunks)
    # A split, whose gradient is one concatenation, not a padded sum for each level.
    lam_between = jax.lax.split(lam[..., levels_inside : levels_inside + heights], [1] * heights, axis=-1)
    for height in range(heights):
        read = jax.checkpoint(functools.partial(_read_left_siblings, height=height, precision=precision))
        out = out + read(q, lam_between[height][..., 0], since_sibling, from_chunk, state)
        states.append(state)
        since_siblings.append(since_sibling)
        # One level up: parent = right child + what is left of the left child after it.
        nodes = state.shape[3] // 2
        left, right = (state[:, :, :, side : 2 * nodes : 2] for side in (0, 1))
        left_decay, right_decay = (node_decay[..., side : 2 * nodes : 2] for side in (0, 1))
        is_right, sibling = left_sibling(np.arange(num_chunks), height)
        since_sibling = since_sibling + jnp.where(is_right == 1, node_decay[..., sibling], 0)
        state = right + jnp.exp(right_decay)[..., None, None] * left
        node_decay = left_decay + right_decay

    out = out.reshape(*out.shape[:3], num_chunks * chunk_size, -1)[:, :, :, :length]
    if not return_state:
        return out, None
    tree = from_chunk, states, since_siblings
    return out, _levels_after(last, k, v, log_decay, *tree, lam.shape[-1], chunk_size, precision)


def _inside_chunks(q, k, v, log_decay, lam, precision):
    """The quadratic form within each chunk: [B, G, R, N, C, V].

    Its C x C matrices take more memory than everything else. So long sequences go through in segments, each of at most
    MAX_SCORES of their elements; none is kept for the backward pass.
    """
    batch, groups, reps, num_chunks, chunk_size = log_decay.shape
    level = np.arange(chunk_size)
    level = fenwick_level(level[:, None], level)

    @jax.checkpoint
    def attend(q, k, v, log_decay, lam):
        scores = common.dot("bgntk,bgnsk->bgnts", q, k, precision)[:, :, None]
        weights = scores * decay_matrix(log_decay) * common.select_level(lam, level)
        return common.dot("bgrnts,bgrnsv->bgrntv", weights.astype(v.dtype), v, precision)

    max_scores = MAX_SCORES_CPU if jax.default_backend() == "cpu" else MAX_SCORES
    segment = max(max_scores // (batch * groups * reps * chunk_size**2), 1)
    if num_chunks <= segment:
        return attend(q, k, v, log_decay, lam)
    num_segments = -(-num_chunks // segment)

    def split(x, axis):
        pad = [(0, 0)] * x.ndim
        pad[axis] = (0, num_segments * segment - num_chunks)
        x = jnp.pad(x, pad).reshape(*x.shape[:axis], num_segments, segment, *x.shape[axis + 1 :])
        return jnp.moveaxis(x, axis, 0)

    segments = split(q, 2), split(k, 2), split(v, 3), split(log_decay, 3), split(lam, 3)
    out = jnp.moveaxis(jax.lax.map(lambda x: attend(*x), segments), 0, 3)
    return out.reshape(*out.shape[:3], num_segments * segment, *out.shape[5:])[:, :, :, :num_chunks]


def _read_left_siblings(q, lam, since_sibling, from_chunk, state, *, height, precision):
    """What the chunks whose bit `height` is set read from their left sibling's state; 0 for the others.

    q [B, G, N, C, K]; lam, from_chunk [B, G, R, N, C]; since_sibling [B, G, R, N]; state [B, G, R, nodes, K, V]. Returns
    [B, G, R, N, C, V].
    """
    weight = lam * jnp.exp(since_sibling[..., None] + from_chunk)
    num_chunks = q.shape[2]
    block = 1 << height
    pairs, partial = right_siblings(num_chunks, height)

    def read(q, weight, state):
        return weight[..., None] * common.dot("bgpntk,bgrpkv->bgrpntv", q, state, precision)

    def blocks(x, axis, start, count, size):
        x = jax.lax.slice_in_dim(x, start, start + count * size, axis=axis)
        return x.reshape(*x.shape[:axis], count, size, *x.shape[axis + 1 :])

    added = []
    if pairs:
        q_pairs = blocks(q, 2, 0, pairs, 2 * block)[:, :, :, block:]
        weight_pairs = blocks(weight, 3, 0, pairs, 2 * block)[:, :, :, :, block:]
        full = read(q_pairs, weight_pairs, state[:, :, :, : 2 * pairs : 2])
        full = jnp.pad(full, [(0, 0)] * 4 + [(block, 0)] + [(0, 0)] * 2)
        added.append(full.reshape(*full.shape[:3], 2 * block * pairs, *full.shape[5:]))
    if partial:
        start = num_chunks - partial
        last = read(
            blocks(q, 2, start, 1, partial),
            blocks(weight, 3, start, 1, partial),
            state[:, :, :, 2 * pairs : 2 * pairs + 1],
        )[:, :, :, 0]
        added.append(jnp.pad(last, [(0, 0)] * 3 + [(start - 2 * block * pairs, 0)] + [(0, 0)] * 2))
    added = jnp.concatenate(added, axis=3)
    missing = num_chunks - added.shape[3]
    return jnp.pad(added, [(0, 0)] * 3 + [(0, missing)] + [(0, 0)] * 2)


def _levels_after(
    last, k, v, log_decay, from_chunk, states, since_siblings, levels_out, chunk_size, precision
) -> Float[Array, "B G R L K V"]:
    """Levels of the partition after token `last`, an index into the chunked sequence: its chunk's own, then siblings'."""
    acc_dtype = common.accumulation_dtype(k, v)
    chunk, place = last // chunk_size, last % chunk_size

    def at_chunk(x, axis):
        return jax.lax.dynamic_index_in_dim(x, chunk, axis=axis, keepdims=False)

    seen = jnp.arange(chunk_size) <= place
    decay = decay_to_end(jnp.where(seen, at_chunk(log_decay, 3), 0))
    level = jnp.where(seen, fenwick_level(jnp.asarray(place, jnp.int32), jnp.arange(chunk_size, dtype=jnp.int32)), -1)
    in_level = jax.nn.one_hot(level, levels_out, dtype=acc_dtype)
    values = decay[..., None] * at_chunk(v, 3)
    levels = jnp.einsum(
        "sl,bgsk,bgrsv->bgrlkv", in_level, at_chunk(k, 2).astype(acc_dtype), values, precision=precision
    )

    since_chunk = jax.lax.dynamic_index_in_dim(at_chunk(from_chunk, 3), place, axis=3, keepdims=False)
    for height, (state, since_sibling) in enumerate(zip(states, since_siblings, strict=True)):
        is_right, sibling = left_sibling(chunk, height)
        weight = jnp.exp(at_chunk(since_sibling, 3) + since_chunk) * is_right
        sibling_state = jax.lax.dynamic_index_in_dim(state, sibling, axis=3, keepdims=False)
        levels = levels.at[:, :, :, num_levels(chunk_size) + height].add(weight[..., None, None] * sibling_state)
    return levels
