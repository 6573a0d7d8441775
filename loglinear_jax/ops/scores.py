"""The forms of bucket scores: how well a query matches the decayed sum of the keys in each bucket of the Fenwick partition.

Each takes what `bucket_scores` has checked, and returns its scores and its last state. A sum of keys is a vector, not a matrix
as the attention's states are. So in the chunkwise forms every chunk takes a copy of all that it reads, and reads it in one
product; what is left is quadratic in C, which is why chunks are shorter here.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

import pallas_kernels
from loglinear_jax.fenwick import FenwickState, merge_for_token, num_levels
from loglinear_jax.ops.continuation import InitialState, Start, Windows, scan_tokens, state_at
from loglinear_jax.ops.decays import accumulation_dtype, decay_matrix, decay_since_start, decay_to_end, decayed
from loglinear_jax.ops.levels import (
    dot,
    level_of_pairs,
    levels_after,
    merge_heads,
    pad_to,
    split_heads,
    sum_by_level,
)
from loglinear_jax.ops.positions import advanced, beginnings, beginnings_in_chunks, forgetting, reads_left_sibling
from loglinear_jax.ops.sequence_parallel import Exchange, decay_over, own_state
from loglinear_jax.ops.tree import climb, fitting_chunk_size, in_pieces, into_parts
from pallas_kernels import KERNELS

DEFAULT_CHUNK = 16


def parallel(q, k, log_decay, start, *, levels, return_state, precision=None):
    """The definition as a masked matrix, in O(T²) time and memory."""
    first = 0 if start.position is None else start.position
    position = first + jnp.arange(q.shape[1], dtype=jnp.int32)
    decay = decay_matrix(split_heads(log_decay, q.shape[2]), beginnings(start.starts))
    weights = dot("bgtk,bgsk->bgts", *(jnp.moveaxis(x, 1, 2) for x in (q, k)), precision)[:, :, None] * decay
    scores = merge_heads(sum_by_level(weights, level_of_pairs(position), levels))
    return _with_initial_state(scores, q, k, log_decay, levels, start, return_state, precision)


def recurrent(q, k, log_decay, start, *, levels, return_state, precision=None):
    batch, _, heads = log_decay.shape
    state = state_at(start, batch, heads, q.shape[-1], 1, levels, accumulation_dtype(q, k))
    scores, state = scan_tokens(_step, state, (q, k, log_decay), precision, start.starts)
    return scores, state if return_state else None


def _step(state: FenwickState, q, k, log_decay, precision=None):
    """One token. q, k [B, G, K]; log_decay [B, H]. Returns (scores [B, H, L], new state)."""
    dtype = state.levels.dtype
    q, k = (jnp.repeat(x, log_decay.shape[1] // x.shape[1], axis=1).astype(dtype) for x in (q, k))
    levels = decayed(merge_for_token(state.levels, state.position), log_decay[..., None])
    levels = levels.at[:, :, 0].set(k[..., None])
    scores = jnp.einsum("bhk,bhlk->bhl", q, levels[..., 0], precision=precision)
    return scores, FenwickState(levels=levels, position=advanced(state.position, 1))


def xla(q, k, log_decay, start, *, levels, return_state, chunk_size=None, precision=None):
    chunk_size = fitting_chunk_size(q.shape[1], chunk_size or DEFAULT_CHUNK)

    def aligned(q, k, log_decay, starts, levels):
        return _of_chunks(q, k, log_decay, beginnings_in_chunks(starts, chunk_size), levels, chunk_size, precision)

    return _run_from(start, (q, k, log_decay), aligned, levels, return_state, precision)


def kernels_are_best(q, k, chunk_size=None, precision=None) -> bool:
    """As of log-linear attention."""
    return KERNELS["bucket_scores"].is_best(q.shape[-1], jnp.result_type(q, k), chunk_size, precision)


def pallas(q, k, log_decay, start, *, levels, return_state, chunk_size=None, precision=None):
    """Chunkwise by GPU kernels; states by plain JAX."""

    def aligned(q, k, log_decay, starts, levels):
        length = q.shape[1]
        size = chunk_size or pallas_kernels.chunk_of_scores(length)
        padded = (pad_to(x, -(-length // size) * size, axis=1) for x in (q, k, forgetting(log_decay, starts)))
        options = dict(chunk_size=size, precision=precision, segmented=starts is not None)
        scores = pallas_kernels.chunk_scores(*padded, **options)
        return pad_to(scores[:, :length], levels, axis=3)[..., :levels]

    return _run_from(start, (q, k, log_decay), aligned, levels, return_state, precision)


def piece(run, inputs, starts, axis_name, *, levels, precision, **_):
    """The scores of one piece of a sequence, in its own buckets and in earlier pieces (see `ops.sequence_parallel`).

    run: function of inputs, a number of levels and a Start to scores and None.
    """
    q, k, log_decay = inputs
    scores, _ = run(*inputs, levels=num_levels(q.shape[1]), start=Start(starts=starts))
    ones = jnp.ones((*log_decay.shape, 1), k.dtype)
    root = own_state(k, ones, log_decay, starts, precision)
    sums = Exchange(axis_name)(root, decay_over(log_decay, starts)).states[..., 0]
    sums = sums.reshape(len(q), q.shape[2], -1, *sums.shape[2:])
    since = decay_since_start(split_heads(log_decay, q.shape[2]), beginnings(starts))[..., None]
    beyond = merge_heads(since * dot("btgk,bgruk->bgrtu", q, sums, precision))
    return pad_to(jnp.concatenate([scores, beyond], axis=3), levels, axis=3)


# --- Chunks ---------------------------------------------------------------------------------------------------------


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


# --- From an initial state ------------------------------------------------------------------------------------------


def _run_from(start: Start, tokens: tuple, aligned: Callable, levels: int, return_state: bool, precision):
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
    return _with_initial_state(scores, q, k, log_decay, levels, start, return_state, precision)


def _with_initial_state(
    scores: Float[Array, "B T H L"],
    q: Float[Array, "B T G K"],
    k: Float[Array, "B T G K"],
    log_decay: Float[Array, "B T H"],
    levels: int,
    start: Start,
    return_state: bool,
    precision,
) -> tuple[Float[Array, "B T H L"], FenwickState | None]:
    """(the scores with those of the initial state's buckets, if there is one; the state after the last token)."""
    first: int | Int[Array, ""] = 0 if start.position is None else start.position
    old = None
    if start.state is not None:
        old = InitialState(start.state, split_heads(log_decay, q.shape[2]), levels, start.starts)
        found = dot("btgk,bgrlk->bgrtl", q, old.states[..., 0], precision) * old.since[..., None]
        moved = jax.nn.one_hot(old.found_at, levels, dtype=found.dtype)
        scores += merge_heads(jnp.einsum("bgrtl,tlm->bgrtm", found, moved, precision="highest"))
    if not return_state:
        return scores, None
    ones = jnp.ones((*log_decay.shape, 1), log_decay.dtype)
    length, begin = log_decay.shape[1], beginnings(start.starts)
    sums = levels_after(first + length - 1, k, ones, log_decay, levels, first=first, begin=begin, precision=precision)
    return scores, FenwickState(sums if old is None else sums + old.at_end(), advanced(first, length))
