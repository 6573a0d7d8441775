"""The chunkwise form and a decoding step by GPU kernels, and what they leave to plain JAX."""

from __future__ import annotations

import jax
import jax.numpy as jnp

import pallas_kernels
from loglinear_jax.fenwick import FenwickState, num_levels
from loglinear_jax.ops.continuation import run_from
from loglinear_jax.ops.levels import levels_after, pad_to
from loglinear_jax.ops.log_linear import recurrent
from loglinear_jax.ops.positions import advanced, beginnings, forgetting
from loglinear_jax.ops.sequence_parallel import Exchange, decay_over, own_state
from pallas_kernels import KERNELS


def is_best(q, k, v, chunk_size=None, precision=None) -> bool:
    """Whether this is the form to choose: on a GPU, unless it cannot run, of which there is one warning for each reason."""
    dtype = jnp.result_type(q, k, v)
    return KERNELS["log_linear_attention"].is_best(q.shape[-1], v.shape[-1], dtype, chunk_size, precision)


def attend(q, k, v, log_decay, lam, start, *, return_state, chunk_size=None, precision=None):
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
    fits = reads_past(q, v, chunk_size, precision)
    return run_from(start, tokens, aligned, return_state, precision, with_past=with_past if fits else None)


def reads_past(q, v, chunk_size=None, precision=None) -> bool:
    """Whether the kernels themselves read what tokens that begin a window find beyond it: unless a chunk is longer."""
    return pallas_kernels.chunk_of_attention(q, v, chunk_size, precision) <= 1 << num_levels(q.shape[1]) - 1


def attend_piece(q, k, v, log_decay, lam, starts, axis_name: str, chunk_size, precision):
    """Of at least one chunk: the kernels make the state that the piece leaves, and read those of earlier pieces."""
    chunk = pallas_kernels.chunk_of_attention(q, v, chunk_size, precision)
    last_starts = None if starts is None else starts[:, -chunk:]
    own = own_state(k[:, -chunk:], v[:, -chunk:], log_decay[:, -chunk:], last_starts, precision)
    return pallas_kernels.fenwick_attention(
        q, k, v, forgetting(log_decay, starts), lam,
        chunk_size=chunk_size, precision=precision, segmented=starts is not None,
        exchange=Exchange(axis_name), own=own.astype(jnp.float32), over=decay_over(log_decay, starts),
    )  # fmt: skip


def can_step(state: FenwickState) -> bool:
    return KERNELS["fenwick_step"].is_best(*state.levels.shape[2:], state.levels.dtype)


def step(state: FenwickState, q, k, v, log_decay, lam):
    """As `recurrent.step`, whose derivatives are this one's too."""
    out, levels = _step(state.levels, state.position, q, k, v, log_decay, lam)
    return out, FenwickState(levels=levels, position=advanced(state.position, 1))


@jax.custom_jvp
def _step(levels, position, *inputs):
    return pallas_kernels.fenwick_step(levels, jnp.broadcast_to(position, levels.shape[:1]), *inputs)


@_step.defjvp
def _step_derivative(primals, tangents):
    levels, position, *inputs = primals

    def plain(levels, *inputs):
        out, state = recurrent.step(FenwickState(levels, position), *inputs)
        return out, state.levels

    return jax.jvp(plain, (levels, *inputs), (tangents[0], *tangents[2:]))
