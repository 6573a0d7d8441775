"""Bucket scores: the public function."""

from __future__ import annotations

from typing import Literal, Unpack, overload

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from loglinear_jax.fenwick import FenwickState, num_levels
from loglinear_jax.ops.bucket_scores import chunkwise, pallas, parallel, recurrent
from loglinear_jax.ops.checks import Implementation
from loglinear_jax.ops.continuation import Start
from loglinear_jax.ops.decays import decay_since_start
from loglinear_jax.ops.dispatch import LevelOptions, Operation, operate
from loglinear_jax.ops.levels import dot, merge_heads, pad_to, split_heads
from loglinear_jax.ops.positions import beginnings
from loglinear_jax.ops.sequence_parallel import Exchange, decay_over, own_state
from pallas_kernels import with_standard_promotion


@overload
def bucket_scores(
    q: Array, k: Array, log_decay: Array, *, num_levels: int | None = ...,
    return_state: Literal[False] = ..., **options: Unpack[LevelOptions],
) -> Array: ...  # fmt: skip


@overload
def bucket_scores(
    q: Array, k: Array, log_decay: Array, *, num_levels: int | None = ...,
    return_state: Literal[True], **options: Unpack[LevelOptions],
) -> tuple[Array, FenwickState]: ...  # fmt: skip


@with_standard_promotion
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

    with the buckets of `log_linear_attention`: level(t, s) = bit_length(t XOR s), s in t's segment. 0 where a bucket
    has no such tokens; `occupied_levels` says which levels have a bucket. A content-aware λ is computed from these
    scores. For values of 1 they are the derivative of `log_linear_attention` with respect to λ. O(T log T) time.
    Differentiable in q, k, log_decay and the initial state. NaN and inf spread as in `log_linear_attention`.

    Args:
      q, k, log_decay, segment_ids, first_position, return_state, axis_name, precision: as in `log_linear_attention`.
      num_levels: L, at least fenwick.num_levels(position of the last token + 1), with axis_name the last of all pieces. None:
        this number, or the initial state's if that is larger; if its position is traced, the initial state's (and at
        least fenwick.num_levels(T)).
      initial_state: a FenwickState [B, H, L, K, 1], as for values of 1: the sums of the keys of earlier tokens. A
        traced position cannot be checked: tokens beyond the levels get NaN.
      chunk_size: tokens per chunk in the chunkwise forms, a power of two; None: 16, or up to 32 in the GPU kernel. It
        does not change the result.
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
    return operate(
        _OPERATION, dict(q=q, k=k, log_decay=log_decay), segment_ids, first_position, initial_state, return_state,
        axis_name, chunk_size, implementation, precision, num_levels=num_levels,
    )  # fmt: skip


def _piece(run, inputs, starts, axis_name, *, levels, precision, **_):
    q, k, log_decay = inputs
    scores, _ = run(*inputs, levels=num_levels(q.shape[1]), start=Start(starts=starts))
    ones = jnp.ones((*log_decay.shape, 1), k.dtype)
    root = own_state(k, ones, log_decay, starts, precision)
    sums = Exchange(axis_name)(root, decay_over(log_decay, starts)).states[..., 0]
    sums = sums.reshape(len(q), q.shape[2], -1, *sums.shape[2:])
    since = decay_since_start(split_heads(log_decay, q.shape[2]), beginnings(starts))[..., None]
    beyond = merge_heads(since * dot("btgk,bgruk->bgrtu", q, sums, precision))
    return pad_to(jnp.concatenate([scores, beyond], axis=3), levels, axis=3)


_OPERATION = Operation(
    parallel.score, recurrent.score, chunkwise.score, pallas.score, _piece, pallas.is_best, has_values=False
)
