"""The public function: its checks, and the choice of a form."""

from __future__ import annotations

from typing import Literal, Unpack, overload

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

import pallas_kernels
from loglinear_jax import fenwick
from loglinear_jax.fenwick import FenwickState, capacity
from loglinear_jax.ops.bucket_scores import chunkwise, pallas, parallel, recurrent
from loglinear_jax.ops.checks import (
    Implementation,
    Options,
    check_attention_settings,
    check_num_levels,
    check_options,
    check_shapes,
    check_start,
)
from loglinear_jax.ops.continuation import Start, nan_beyond, start_arguments, with_more_levels
from loglinear_jax.ops.decays import decay_since_start
from loglinear_jax.ops.dispatch import choose_form, compile_operation, run_form
from loglinear_jax.ops.dtypes import to_common_dtypes
from loglinear_jax.ops.heads import dot, merge_heads, split_heads
from loglinear_jax.ops.levels import pad_to
from loglinear_jax.ops.segments import beginnings
from loglinear_jax.ops.sequence_parallel import (
    Exchange,
    check_pieces,
    decay_over,
    own_state,
    starts_in_piece,
)


@overload
def bucket_scores(
    q: Array, k: Array, log_decay: Array, *, num_levels: int | None = ...,
    segment_ids: Array | None = ..., first_position: int | Array = ...,
    initial_state: FenwickState | None = ..., return_state: Literal[False] = ..., axis_name: str | None = ...,
    **options: Unpack[Options],
) -> Array: ...  # fmt: skip


@overload
def bucket_scores(
    q: Array, k: Array, log_decay: Array, *, num_levels: int | None = ...,
    segment_ids: Array | None = ..., first_position: int | Array = ...,
    initial_state: FenwickState | None = ..., return_state: Literal[True], **options: Unpack[Options],
) -> tuple[Array, FenwickState]: ...  # fmt: skip


@overload
def bucket_scores(
    q: Array, k: Array, log_decay: Array, *, num_levels: int | None = ...,
    segment_ids: Array | None = ..., first_position: int | Array = ...,
    initial_state: FenwickState | None = ..., return_state: bool, axis_name: str | None = ...,
    **options: Unpack[Options],
) -> Array | tuple[Array, FenwickState]: ...  # fmt: skip


@pallas_kernels.with_standard_promotion
def bucket_scores(
    q: Float[Array, "B T G K"],
    k: Float[Array, "B T G K"],
    log_decay: Float[Array, "B T H"],
    *,
    num_levels: int | None = None,
    segment_ids: Int[Array, "B T"] | None = None,
    first_position: int | Int[Array, "*B"] = 0,
    initial_state: FenwickState | None = None,
    return_state: bool = False,
    axis_name: str | None = None,
    chunk_size: int | None = None,
    implementation: Implementation | None = None,
    precision: jax.lax.PrecisionLike = None,
) -> Float[Array, "B T H L"] | tuple[Float[Array, "B T H L"], FenwickState]:
    """Score of each query against each bucket of its past: q times the decayed sum of the bucket's keys.

        s_t[ℓ] = Σ over s in bucket ℓ of t of exp(Σ_{s<r≤t} log_decay_r) (q_t · k_s)

    with the buckets of `log_linear_attention`: level(t, s) = bit_length(t XOR s), s in t's segment. 0 where a bucket has no
    such tokens; `occupied_levels` says where. A content-aware λ is computed from these scores. They are the derivative of
    `log_linear_attention` by λ, for values of 1. O(T log T) time. Differentiable in q, k, log_decay and the initial state. NaN
    and inf spread as in `log_linear_attention`.

    Args:
      q, k, log_decay, segment_ids, first_position, return_state, axis_name, precision: as in `log_linear_attention`.
      num_levels: L, at least fenwick.num_levels(position of the last token + 1), with axis_name that of all pieces. None: just
        as many, and no fewer than the initial state's; the initial state's (and at least fenwick.num_levels(T)) where its
        position is traced.
      initial_state: a FenwickState [B, H, L, K, 1], as for values of 1: the sums of the keys of earlier tokens. A traced
        position can't be refused: tokens beyond the levels get NaN.
      chunk_size: tokens per chunk of the chunkwise forms, a power of two; None: 16, or up to 32 in the GPU kernel. The result
        does not depend on it.
      implementation: "parallel" (O(T²), the definition), "recurrent" (a scan over tokens), "xla" (chunkwise, O(T log T), any
        backend), "pallas" (chunkwise, by a GPU kernel; K from 16 to 256, float32 or bfloat16, reverse-mode gradients only), or
        None for the best that works here.

    Returns:
      scores [B, T, H, L], float32 or wider; with return_state, (scores, FenwickState [B, H, L, K, 1]), whose L is the larger of
        the scores' and the initial state's.

    Raises:
      ValueError: as in `log_linear_attention`, and for a num_levels that is too small.

    Examples:
      >>> import jax.numpy as jnp
      >>> from loglinear_jax import bucket_scores
      >>> q = k = jnp.ones((1, 4, 1, 16)) / 4  # unit vectors, [B, T, G, K]
      >>> print(bucket_scores(q, k, jnp.zeros((1, 4, 1)))[0, 3, 0])  # token 3 has buckets of 1, 1 and 2 tokens
      [1. 1. 2.]
    """
    check_shapes(q=(q, "B T G K"), k=(k, "B T G K"), log_decay=(log_decay, "B T H"))
    check_attention_settings(chunk_size, implementation)
    check_options(return_state, precision)
    sizes = *log_decay.shape, q.shape[-1], 1
    pieces = check_pieces(axis_name, q.shape[1], first_position, initial_state, return_state)
    end, what = check_start(initial_state, first_position, segment_ids, *sizes)
    end, what = pieces * end, f"{what} on each of {pieces} devices" if pieces > 1 else what
    if num_levels is None:
        num_levels = max(fenwick.num_levels(end), 1 if initial_state is None else initial_state.levels.shape[2])
    check_num_levels(num_levels, end, what)
    scores, state = _score(
        q, k, log_decay, start_arguments(initial_state, first_position, segment_ids),
        levels=num_levels, axis_name=axis_name if pieces > 1 else None, return_state=return_state,
        chunk_size=chunk_size, precision=precision,
        implementation=choose_form(implementation, pallas.is_best, q, k, chunk_size, precision),
    )  # fmt: skip
    return (scores, state) if return_state else scores


_FORMS = {"parallel": parallel.score, "recurrent": recurrent.score, "xla": chunkwise.score, "pallas": pallas.score}


@compile_operation("levels", "axis_name", "return_state", "chunk_size", "implementation", "precision")
def _score(q, k, log_decay, where, *, levels, axis_name, return_state, chunk_size, implementation, precision):
    log_decay, q, k = to_common_dtypes(log_decay, q, k)
    if axis_name is not None:
        options = dict(implementation=implementation, chunk_size=chunk_size, precision=precision)
        return _score_piece(q, k, log_decay, where[-1], axis_name, levels, **options), None
    start = Start.of(*where)
    wanted = levels
    start, levels = with_more_levels(start, levels, log_decay.dtype)
    options = dict(levels=levels, return_state=return_state, precision=precision)
    scores, state = run_form(_FORMS, implementation, q, k, log_decay, start=start, chunk_size=chunk_size, **options)
    return nan_beyond(capacity(wanted), start, scores[..., :wanted]), state


def _score_piece(q, k, log_decay, segment_ids, axis_name, levels, *, implementation, chunk_size, precision):
    """The scores of one piece of a sequence, in its own buckets and in earlier pieces (see `ops.sequence_parallel`)."""
    inside, groups = fenwick.num_levels(q.shape[1]), q.shape[2]
    starts = starts_in_piece(segment_ids, axis_name)
    options = dict(levels=inside, return_state=False, chunk_size=chunk_size, precision=precision)
    scores, _ = run_form(_FORMS, implementation, q, k, log_decay, start=Start(starts=starts), **options)

    ones = jnp.ones((*log_decay.shape, 1), k.dtype)
    sums = Exchange(axis_name)(own_state(k, ones, log_decay, starts, precision), decay_over(log_decay, starts)).states[
        ..., 0
    ]
    sums = sums.reshape(len(q), groups, -1, *sums.shape[2:])
    since = decay_since_start(split_heads(log_decay, groups), beginnings(starts))[..., None]
    beyond = merge_heads(since * dot("btgk,bgruk->bgrtu", q, sums, precision))
    return pad_to(jnp.concatenate([scores, beyond], axis=3), levels, axis=3)
