"""The forms of log-linear attention: one state a level of a Fenwick tree over the past (Guo et al. 2026).

Each takes what `log_linear_attention` has checked, and returns its outputs and its last state. `parallel` is the definition,
`recurrent` what decoding does, `xla` is quadratic inside chunks of C tokens with a binary tree between them (`ops/tree.py`),
O(T log T) in plain JAX, `pallas` the same by GPU kernels.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np

import pallas_kernels
from loglinear_jax.fenwick import FenwickState, merge_for_token, num_levels, occupied_levels, tree_heights
from loglinear_jax.ops.continuation import InitialState, Start, run_from, scan_tokens, state_at
from loglinear_jax.ops.decays import accumulation_dtype, decay_matrix, decay_to_end, decayed
from loglinear_jax.ops.levels import dot, level_of_pairs, levels_after, merge_heads, pad_to, select_level, split_heads
from loglinear_jax.ops.positions import (
    advanced,
    beginnings,
    beginnings_in_chunks,
    forgetting,
    reads_left_sibling,
)
from loglinear_jax.ops.sequence_parallel import Exchange, decay_over, own_state
from loglinear_jax.ops.tree import climb, fitting_chunk_size, in_pieces, into_parts, read_left_siblings
from pallas_kernels import KERNELS


def parallel(q, k, v, log_decay, lam, start, *, return_state, precision=None):
    """o_t = Σ_{s≤t} λ_t[level(t, s)] · exp(Σ_{s<r≤t} g_r) · (q_t · k_s) · v_s as a masked matrix, in O(T²) time and memory."""
    groups = q.shape[2]
    first, begin = 0 if start.position is None else start.position, beginnings(start.starts)
    tokens = k, v, log_decay
    q, k = (jnp.moveaxis(x, 1, 2) for x in (q, k))
    v, log_decay, lam = (split_heads(x, groups) for x in (v, log_decay, lam))
    position = first + jnp.arange(q.shape[2], dtype=jnp.int32)

    scores = dot("bgtk,bgsk->bgts", q, k, precision)[:, :, None]
    weights = scores * decay_matrix(log_decay, begin) * select_level(lam, level_of_pairs(position))
    out = dot("bgrts,bgrsv->bgrtv", weights.astype(v.dtype), v, precision)
    if start.state is not None:
        old = InitialState(start.state, log_decay, lam.shape[-1], start.starts)
        out += old.read(q, lam, precision)
    out = merge_heads(out)
    if not return_state:
        return out, None
    end = first + q.shape[2]
    levels = levels_after(end - 1, *tokens, lam.shape[-1], first=first, begin=begin, precision=precision)
    if start.state is not None:
        levels += old.at_end()
    return out, FenwickState(levels=levels, position=advanced(first, q.shape[2]))


def step(state: FenwickState, q, k, v, log_decay, lam, precision=None):
    """One token. q, k [B, G, K]; v [B, H, V]; log_decay [B, H]; lam [B, H, L]. Returns (o [B, H, V], new state)."""
    heads, dtype = v.shape[1], state.levels.dtype
    q, k = (jnp.repeat(x, heads // x.shape[1], axis=1).astype(dtype) for x in (q, k))
    written = k[..., :, None] * v.astype(dtype)[..., None, :]
    levels = decayed(merge_for_token(state.levels, state.position), log_decay[..., None])
    levels += jnp.where(jnp.arange(levels.shape[2])[:, None, None] == 0, written[:, :, None], 0)  # empty until now
    # q first: XLA reads every level where it writes it.
    read = jnp.einsum("bhk,bhlkv->bhlv", q, levels, precision=precision)
    lam = jnp.where(occupied_levels(state.position[..., None], levels.shape[2]), lam, 0)  # 0 · inf is NaN
    out = jnp.sum(lam[..., None] * read, axis=2)
    return out, FenwickState(levels=levels, position=advanced(state.position, 1))


def recurrent(q, k, v, log_decay, lam, start, *, return_state, precision=None):
    sizes = len(v), v.shape[2], q.shape[-1], v.shape[-1], lam.shape[-1]
    state = state_at(start, *sizes, accumulation_dtype(q, k, v))
    out, state = scan_tokens(step, state, (q, k, v, log_decay, lam), precision, start.starts)
    return out, state if return_state else None


# --- Chunkwise in plain JAX -----------------------------------------------------------------------------------------


def xla(q, k, v, log_decay, lam, start, *, return_state, chunk_size=None, precision=None):
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

    def attend(q, k, v, log_decay, lam, begin):
        scores = dot("bgntk,bgnsk->bgnts", q, k, precision)[:, :, None]
        weights = scores * decay_matrix(log_decay, begin) * select_level(lam, level)
        return dot("bgrnts,bgrnsv->bgrntv", weights.astype(v.dtype), v, precision)

    by_chunk = [(q, 2), (k, 2), (v, 3), (log_decay, 3), (lam, 3), (begin, 3)]
    return in_pieces(attend, by_chunk, log_decay.size * chunk_size)


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


# --- By GPU kernels -------------------------------------------------------------------------------------------------


def kernels_are_best(q, k, v, chunk_size=None, precision=None) -> bool:
    """Whether `pallas` is the form to choose: on a GPU, unless it cannot run, of which there is one warning for each reason."""
    dtype = jnp.result_type(q, k, v)
    return KERNELS["log_linear_attention"].is_best(q.shape[-1], v.shape[-1], dtype, chunk_size, precision)


def pallas(q, k, v, log_decay, lam, start, *, return_state, chunk_size=None, precision=None):
    chunk = pallas_kernels.chunk_of_attention(q, v, chunk_size, precision)

    def run(q, k, v, log_decay, lam, starts, **options):
        return pallas_kernels.fenwick_attention(
            q, k, v, forgetting(log_decay, starts), lam,
            chunk_size=chunk_size, precision=precision, segmented=starts is not None, **options,
        )  # fmt: skip

    def with_past(q, k, v, log_decay, lam, starts, past=None, occupied=None):
        """As of `run_from`; of past levels, if there are none, None."""
        options = dict(initial=past, occupied=occupied)
        if not return_state:
            return run(q, k, v, log_decay, lam, starts, **options), None
        out, end = run(q, k, v, log_decay, lam, starts, return_end=True, **options)
        last = (q.shape[1] - 1) % chunk
        *tokens, starts = (None if x is None else x[:, -last - 1 :] for x in (k, v, log_decay, starts))
        inside = levels_after(last, *tokens, num_levels(chunk), begin=beginnings(starts), precision=precision)
        levels = jnp.concatenate([inside, end.astype(inside.dtype)], axis=2)
        return out, pad_to(levels, lam.shape[-1], axis=2)[:, :, : lam.shape[-1]]

    def aligned(q, k, v, log_decay, lam, starts, last):
        if isinstance(last, int):
            return with_past(q, k, v, log_decay, lam, starts)
        out = run(q, k, v, log_decay, lam, starts)
        if not return_state:
            return out, None
        options = dict(begin=beginnings(starts), precision=precision)
        return out, levels_after(last, k, v, log_decay, lam.shape[-1], **options)

    tokens = q, k, v, log_decay, lam
    fits = _kernels_read_past(q, v, chunk_size, precision)
    return run_from(start, tokens, aligned, return_state, precision, with_past=with_past if fits else None)


def _kernels_read_past(q, v, chunk_size=None, precision=None) -> bool:
    """Whether the kernels themselves read what tokens that begin a window find beyond it: unless a chunk is longer."""
    return pallas_kernels.chunk_of_attention(q, v, chunk_size, precision) <= 1 << num_levels(q.shape[1]) - 1


def kernel_can_step(state: FenwickState) -> bool:
    return KERNELS["fenwick_step"].is_best(*state.levels.shape[2:], state.levels.dtype)


def kernel_step(state: FenwickState, q, k, v, log_decay, lam):
    """As `step`, whose derivatives are this one's too."""
    out, levels = _kernel_step(state.levels, state.position, q, k, v, log_decay, lam)
    return out, FenwickState(levels=levels, position=advanced(state.position, 1))


@jax.custom_jvp
def _kernel_step(levels, position, *inputs):
    return pallas_kernels.fenwick_step(levels, jnp.broadcast_to(position, levels.shape[:1]), *inputs)


@_kernel_step.defjvp
def _kernel_step_derivative(primals, tangents):
    levels, position, *inputs = primals

    def plain(levels, *inputs):
        out, state = step(FenwickState(levels, position), *inputs)
        return out, state.levels

    return jax.jvp(plain, (levels, *inputs), (tangents[0], *tangents[2:]))


# --- A piece of a sequence ------------------------------------------------------------------------------------------


def piece(run, inputs, starts, axis_name, *, implementation, chunk_size, precision, **_):
    """The outputs of one piece of a sequence, from its own tokens and from earlier pieces (see `ops.sequence_parallel`).

    run: function of inputs and a Start to outputs and None.
    """
    q, k, v, log_decay, lam = inputs
    if implementation == "pallas" and _kernels_read_past(q, v, chunk_size, precision):
        return _piece_by_kernels(*inputs, starts, axis_name, chunk_size, precision)
    root = own_state(k, v, log_decay, starts, precision)
    past = Exchange(axis_name)(root, decay_over(log_decay, starts))
    inside = num_levels(q.shape[1])
    beyond = lam[..., inside : inside + past.states.shape[2]]
    out, _ = run(q, k, v, log_decay, lam[..., :inside], start=Start(starts=starts))
    return out + past.read(q, beyond, log_decay, starts, precision)


def _piece_by_kernels(q, k, v, log_decay, lam, starts, axis_name: str, chunk_size, precision):
    """Of at least one chunk: the kernels make the state that the piece leaves, and read those of earlier pieces."""
    chunk = pallas_kernels.chunk_of_attention(q, v, chunk_size, precision)
    last_starts = None if starts is None else starts[:, -chunk:]
    own = own_state(k[:, -chunk:], v[:, -chunk:], log_decay[:, -chunk:], last_starts, precision)
    return pallas_kernels.fenwick_attention(
        q, k, v, forgetting(log_decay, starts), lam,
        chunk_size=chunk_size, precision=precision, segmented=starts is not None,
        exchange=Exchange(axis_name), own=own.astype(jnp.float32), over=decay_over(log_decay, starts),
    )  # fmt: skip
