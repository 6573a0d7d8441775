"""The public functions over sequences: what they take, and the choice of a form."""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import ModuleType
from typing import Any, Literal, TypedDict, Unpack, overload

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from loglinear_jax import fenwick
from loglinear_jax.fenwick import FenwickState, capacity
from loglinear_jax.ops import delta, gated_delta, gated_linear, log_linear, scores, softmax
from loglinear_jax.ops.checks import (
    Implementation,
    check_attention_settings,
    check_implementation,
    check_levels,
    check_segment_ids,
    check_shapes,
    check_start,
    check_step_state,
)
from loglinear_jax.ops.continuation import Start, nan_beyond, over_rows, take_step, with_more_levels
from loglinear_jax.ops.decays import to_common_dtypes
from loglinear_jax.ops.levels import pad_to
from loglinear_jax.ops.sequence_parallel import check_pieces, starts_in_piece
from loglinear_jax.ops.sharding import over_explicit_axes
from pallas_kernels import interpreting, with_standard_promotion

CHUNKED = ("xla", "pallas")  # forms that take a chunk_size
AXES = {"q": "B T G K", "k": "B T G K", "v": "B T H V", "log_decay": "B T H", "beta": "B T H", "lam": "B T H L"}


class Options(TypedDict, total=False):
    """Keyword arguments of every operation with states, for overloads."""

    segment_ids: Array | None
    axis_name: str | None
    chunk_size: int | None
    implementation: Implementation | None
    precision: jax.lax.PrecisionLike


class LevelOptions(Options, total=False):
    """Those of an operation with a state for each level."""

    first_position: int | Array
    initial_state: FenwickState | None


class OneStateOptions(Options, total=False):
    """Those of an operation with one state."""

    initial_state: Array | None


@overload
def log_linear_attention(
    q: Array, k: Array, v: Array, log_decay: Array, lam: Array, *,
    return_state: Literal[False] = ..., **options: Unpack[LevelOptions],
) -> Array: ...  # fmt: skip


@overload
def log_linear_attention(
    q: Array, k: Array, v: Array, log_decay: Array, lam: Array, *,
    return_state: Literal[True], **options: Unpack[LevelOptions],
) -> tuple[Array, FenwickState]: ...  # fmt: skip


@with_standard_promotion
def log_linear_attention(
    q: Float[Array, "B T G K"],
    k: Float[Array, "B T G K"],
    v: Float[Array, "B T H V"],
    log_decay: Float[Array, "B T H"],
    lam: Float[Array, "B T H L"],
    *,
    segment_ids: Int[Array, "B T"] | None = None,
    first_position: int | Int[Array, "*B"] = 0,
    initial_state: FenwickState | None = None,
    return_state: bool = False,
    axis_name: str | None = None,
    chunk_size: int | None = None,
    implementation: Implementation | None = None,
    precision: jax.lax.PrecisionLike = None,
) -> Float[Array, "B T H V"] | tuple[Float[Array, "B T H V"], FenwickState]:
    """Log-linear attention: linear attention whose past is split into buckets, each with a weight λ of its own.

        o_t = Σ_{s≤t} λ_t[level(t, s)] · exp(Σ_{s<r≤t} log_decay_r) · (q_t · k_s) · v_s

    with level(t, s) = bit_length(t XOR s), over the tokens s of t's segment (Guo et al. 2026, arXiv 2506.04761). O(T log T).
    Nothing is scaled or normalised: divide q by √K beforehand if you want that. Differentiable in every array and in the
    initial state.

    NaN or inf in a token's arguments shows in the outputs that depend on it. Where matrices are multiplied it also reaches
    earlier tokens, for 0 · NaN is NaN, as in softmax attention: from k or v, the tokens of its chunk (with "parallel", of the
    sequence); with "pallas" from log_decay, too; never from q or lam, never with "recurrent", and never an earlier chunk,
    another sequence of the batch, or heads of another group. In the initial state it reaches every token of its head.
    Gradients are kept apart less: from a later q, log_decay or lam, NaN reaches those of every earlier k, v and log_decay of
    its heads, in every form, even if the loss is of earlier tokens alone; with "pallas", of its chunk's later log_decay, too.

    Args:
      q, k: queries and keys, [B, T, G, K], for G groups; head h uses group h // (H / G). float32, bfloat16, float16
        or (under x64) float64.
      v: values, [B, T, H, V], H a multiple of G.
      log_decay: natural log of the decay, [B, T, H], one scalar per token and head; above 0 it counts as 0, and -inf forgets
        everything before the token. Called g in flash-linear-attention. Used in float32 or wider.
      lam: λ, the weight of each level, [B, T, H, L] with L ≥ num_levels(position of the last token + 1). Called
        level_scales in flash-linear-attention. Used in float32 or wider.
      segment_ids: integers [B, T], where several documents are packed into a sequence: a token whose id differs from that of
        the token before starts a new segment, which reads nothing of those before. Levels stay those of positions in the
        sequence, so a document in the pack equals the document alone with first_position. None: one segment.
      first_position: position of the first token, which has no past: an integer, or [B] for rows that start at different ones;
        may be traced.
      initial_state: state after earlier tokens, which belongs to the first segment; these tokens then start at
        initial_state.position, which may be traced, and [B] for rows at different positions.
        A traced position can't be refused. Then every token beyond the levels of `lam` gets NaN, and those before keep their
        outputs and gradients; at a negative position, or one beyond the state's own levels, all tokens get NaN.
      return_state: also return the state after the last token, which is that of the last segment.
      axis_name: the mesh axis over which the sequence is cut, inside `jax.shard_map`: each device has one of equal pieces, in
        order. T is then the length of a piece, a power of two, and L ≥ num_levels(tokens of all pieces). Segments may continue
        from piece to piece. Devices exchange one state for each head, in one all-gather, and one reduce-scatter for the
        gradients. Not together with first_position, initial_state or return_state.
      chunk_size: tokens per chunk of the chunkwise forms, a power of two; chosen from the shapes if None. The result
        does not depend on it.
      implementation: "parallel" (O(T²), the definition), "recurrent" (a scan over tokens), "xla" (chunkwise,
        O(T log T), any backend), "pallas" (chunkwise by GPU kernels; K and V from 16 to 256, float32 or bfloat16,
        reverse-mode gradients only), or None for the best that works here: "pallas" on a GPU that can run
        it, else "xla".
      precision: of the matrix products, as in jax.lax.dot; None follows jax.default_matmul_precision.

    Returns:
      o: [B, T, H, V] in v's dtype; with return_state, (o, FenwickState) whose L is lam's (or the initial state's, if
        that has more).

    Raises:
      ValueError: ranks or sizes that do not fit, H not a multiple of G, too few levels, a dtype that is not floating,
        a chunk_size that is not a power of two, an unknown implementation, a first_position beside an initial_state, with
        axis_name a T that is not a power of two or an argument that it excludes, or, for "pallas", what its kernels cannot run
        (pallas_kernels.UnsupportedError).

    Examples:
      >>> import jax.numpy as jnp
      >>> from loglinear_jax import log_linear_attention, num_levels
      >>> q = k = jnp.ones((2, 100, 1, 16)) / 4  # [B, T, G, K]
      >>> v = jnp.ones((2, 100, 4, 32))  # [B, T, H, V]
      >>> log_decay = jnp.full((2, 100, 4), -0.1)
      >>> lam = jnp.ones((2, 100, 4, num_levels(100)))
      >>> log_linear_attention(q, k, v, log_decay, lam).shape
      (2, 100, 4, 32)
    """
    return _operate(
        log_linear, dict(q=q, k=k, v=v, log_decay=log_decay, lam=lam), segment_ids, first_position, initial_state, return_state,
        axis_name, chunk_size, implementation, precision,
    )  # fmt: skip


@with_standard_promotion
def fenwick_step(
    state: FenwickState,
    q: Float[Array, "B G K"],
    k: Float[Array, "B G K"],
    v: Float[Array, "B H V"],
    log_decay: Float[Array, "B H"],
    lam: Float[Array, "B H L"],
    *,
    implementation: Implementation | None = None,
) -> tuple[Float[Array, "B H V"], FenwickState]:
    """Decode one token of log-linear attention: its output and the next state, in O(log T) time and memory.

    Buckets that merge at this token are added, every level is multiplied by exp(log_decay), k vᵀ is written to level 0, and
    o = qᵀ Σ_ℓ lam[ℓ] S_ℓ. Computed in the state's dtype: give init_fenwick_state dtype=float64 for float64.

    Args:
      state: the state after the earlier tokens, from init_fenwick_state, log_linear_attention or this function.
      q, k, v, log_decay, lam: as in `log_linear_attention`, without the time axis.
      implementation: as in `log_linear_attention`. With None and "pallas" a kernel updates the states in one pass where it
        can run (on a GPU, float32, K and V powers of two); otherwise it is plain JAX.

    Returns:
      (o [B, H, V] in v's dtype, the next state, of the same shape and dtype as `state`).

    Raises:
      ValueError: as in `log_linear_attention`; also if the state's (concrete) position has outgrown its levels, or
        lam's. A traced position can't be refused: then o is NaN, and stays so for every later token of a state that has
        outgrown its levels. Size the state by init_fenwick_state's max_length.

    Examples:
      >>> import jax.numpy as jnp
      >>> from loglinear_jax import fenwick_step, init_fenwick_state
      >>> state = init_fenwick_state(batch=2, heads=4, key_dim=16, value_dim=32, max_length=100)
      >>> q = k = jnp.ones((2, 1, 16)) / 4  # [B, G, K]
      >>> v, log_decay, lam = jnp.ones((2, 4, 32)), jnp.full((2, 4), -0.1), jnp.ones((2, 4, 8))
      >>> o, state = fenwick_step(state, q, k, v, log_decay, lam)
      >>> o.shape, int(state.position)
      ((2, 4, 32), 1)
    """
    check_implementation(implementation, Implementation)
    tokens = _checked_token(state, q=q, k=k, v=v, log_decay=log_decay, lam=lam)
    by_kernel = implementation in (None, "pallas") and log_linear.kernel_can_step(state)
    return take_step(log_linear.kernel_step if by_kernel else log_linear.step, state, *tokens)


@overload
def log_linear_delta_attention(
    q: Array, k: Array, v: Array, log_decay: Array, beta: Array, lam: Array, *,
    return_state: Literal[False] = ..., **options: Unpack[LevelOptions],
) -> Array: ...  # fmt: skip


@overload
def log_linear_delta_attention(
    q: Array, k: Array, v: Array, log_decay: Array, beta: Array, lam: Array, *,
    return_state: Literal[True], **options: Unpack[LevelOptions],
) -> tuple[Array, FenwickState]: ...  # fmt: skip


@with_standard_promotion
def log_linear_delta_attention(
    q: Float[Array, "B T G K"],
    k: Float[Array, "B T G K"],
    v: Float[Array, "B T H V"],
    log_decay: Float[Array, "B T H"],
    beta: Float[Array, "B T H"],
    lam: Float[Array, "B T H L"],
    *,
    segment_ids: Int[Array, "B T"] | None = None,
    first_position: int | Int[Array, "*B"] = 0,
    initial_state: FenwickState | None = None,
    return_state: bool = False,
    axis_name: str | None = None,
    chunk_size: int | None = None,
    implementation: Implementation | None = None,
    precision: jax.lax.PrecisionLike = None,
) -> Float[Array, "B T H V"] | tuple[Float[Array, "B T H V"], FenwickState]:
    """Log-linear Gated DeltaNet: log-linear attention whose states overwrite what they hold under a key (Guo et al. 2026).

        o_t = Σ_{s≤t} λ_t[level(t, s)] · q_tᵀ [Π_{s<r≤t} exp(log_decay_r) (I - β_r k_r k_rᵀ)] β_s k_s v_sᵀ

    with level(t, s) = bit_length(t XOR s), over the tokens s of t's segment, and later factors of the product on the left
    (the gated delta rule, Yang, Kautz and Hatamizadeh 2025). With λ ≡ 1 it is `gated_delta_attention`. Keys must have length 1
    at most: with β |k|² above 2 the states grow without bound. A content-aware λ takes its `bucket_scores` from the decayed
    sums of keys, which the delta rule does not change.

    Differentiable in every array and in the initial state. NaN and inf spread as in `log_linear_attention`, from beta and
    log_decay as from k.

    Args:
      q, k, v, log_decay, lam, segment_ids, first_position, return_state, axis_name, chunk_size, precision: as in
        `log_linear_attention`. With axis_name devices also exchange how each piece changes a state, [K, K] for each head.
      beta: β, how much is overwritten, [B, T, H], from 0 to 1, or to 2 for negative eigenvalues (not checked). Used in float32
        or wider.
      initial_state: as in `log_linear_attention`, from this function or `log_linear_delta_step`.
      implementation: "parallel" (O(T²) memory, the definition), "recurrent" (a scan over tokens), "xla" (chunkwise,
        O(T log T), any backend), "pallas" (the same by GPU kernels; K and V to 128 in bfloat16, to 64 in float32; reverse-mode
        gradients only), or None: on a GPU "pallas" in bfloat16 and TF32 for such K and V; "xla" elsewhere.

    Returns:
      o [B, T, H, V] in v's dtype; with return_state, (o, FenwickState) whose L is lam's (or the initial state's, if that has
      more).

    Raises:
      ValueError: as `log_linear_attention`; also for a beta that does not fit.

    Examples:
      >>> import jax.numpy as jnp
      >>> from loglinear_jax import log_linear_delta_attention, num_levels
      >>> q = k = jnp.ones((2, 100, 1, 16)) / 4  # unit vectors, [B, T, G, K]
      >>> v = jnp.ones((2, 100, 4, 32))  # [B, T, H, V]
      >>> log_decay, beta = jnp.full((2, 100, 4), -0.1), jnp.full((2, 100, 4), 0.5)
      >>> lam = jnp.ones((2, 100, 4, num_levels(100)))
      >>> log_linear_delta_attention(q, k, v, log_decay, beta, lam).shape
      (2, 100, 4, 32)
    """
    return _operate(
        delta, dict(q=q, k=k, v=v, log_decay=log_decay, beta=beta, lam=lam), segment_ids, first_position, initial_state,
        return_state, axis_name, chunk_size, implementation, precision,
    )  # fmt: skip


@with_standard_promotion
def log_linear_delta_step(
    state: FenwickState,
    q: Float[Array, "B G K"],
    k: Float[Array, "B G K"],
    v: Float[Array, "B H V"],
    log_decay: Float[Array, "B H"],
    beta: Float[Array, "B H"],
    lam: Float[Array, "B H L"],
) -> tuple[Float[Array, "B H V"], FenwickState]:
    """Decode one token of log-linear Gated DeltaNet: its output and the next state, in O(log T) time and memory.

    Buckets that merge at this token are added, every level S becomes exp(log_decay) (I - β k kᵀ) S, β k vᵀ is written to
    level 0, and o = qᵀ Σ_ℓ lam[ℓ] S_ℓ.

    Args:
      state, q, k, v, log_decay, lam: as in `fenwick_step`.
      beta: β, [B, H], as in `log_linear_delta_attention`.

    Returns:
      (o [B, H, V] in v's dtype, the next state).

    Raises:
      ValueError: as `fenwick_step`; also for a beta that does not fit.

    Examples:
      >>> import jax.numpy as jnp
      >>> from loglinear_jax import init_fenwick_state, log_linear_delta_step
      >>> state = init_fenwick_state(batch=2, heads=4, key_dim=16, value_dim=32, max_length=100)
      >>> q = k = jnp.ones((2, 1, 16)) / 4  # unit vectors, [B, G, K]
      >>> v, log_decay, beta = jnp.ones((2, 4, 32)), jnp.full((2, 4), -0.1), jnp.full((2, 4), 0.5)
      >>> o, state = log_linear_delta_step(state, q, k, v, log_decay, beta, jnp.ones((2, 4, 8)))
      >>> o.shape
      (2, 4, 32)
    """
    tokens = _checked_token(state, q=q, k=k, v=v, log_decay=log_decay, beta=beta, lam=lam)
    return take_step(delta.step, state, *tokens)


@overload
def gated_linear_attention(
    q: Array, k: Array, v: Array, log_decay: Array, *,
    return_state: Literal[False] = ..., **options: Unpack[OneStateOptions],
) -> Array: ...  # fmt: skip


@overload
def gated_linear_attention(
    q: Array, k: Array, v: Array, log_decay: Array, *,
    return_state: Literal[True], **options: Unpack[OneStateOptions],
) -> tuple[Array, Array]: ...  # fmt: skip


@with_standard_promotion
def gated_linear_attention(
    q: Float[Array, "B T G K"],
    k: Float[Array, "B T G K"],
    v: Float[Array, "B T H V"],
    log_decay: Float[Array, "B T H"],
    *,
    segment_ids: Int[Array, "B T"] | None = None,
    initial_state: Float[Array, "B H K V"] | None = None,
    return_state: bool = False,
    axis_name: str | None = None,
    chunk_size: int | None = None,
    precision: jax.lax.PrecisionLike = None,
    implementation: Implementation | None = None,
) -> Float[Array, "B T H V"] | tuple[Float[Array, "B T H V"], Float[Array, "B H K V"]]:
    """Gated linear attention with a single state for each head, as in Mamba-2 (SSD, Dao & Gu 2024).

        o_t = Σ_{s≤t} exp(Σ_{s<r≤t} log_decay_r) (q_t · k_s) v_s

    It equals `log_linear_attention` with λ ≡ 1, in O(T) time. Differentiable in every array. NaN and inf spread as in
    `log_linear_attention`.

    Args:
      q, k, v, log_decay, segment_ids, return_state, axis_name, chunk_size, precision: as in `log_linear_attention`.
      initial_state: the state after earlier tokens, one matrix a head, [B, H, K, V], in float32 or wider.
      implementation: "parallel" (O(T²), the definition), "recurrent" (a scan over tokens), "xla" (chunkwise, O(T), any
        backend), "pallas" (the GPU kernels of `log_linear_attention`, O(T log T)), or None: "pallas" on a GPU that can run it,
        else "xla".

    Returns:
      o [B, T, H, V] in v's dtype, or (o, state [B, H, K, V]) with return_state.

    Raises:
      ValueError: ranks or sizes that do not fit, H not a multiple of G, a dtype that is not floating, a chunk_size that is
        not a power of two, an unknown implementation, with axis_name a T that is not a power of two or an argument that it
        excludes, or, for "pallas", what its kernels cannot run.

    Examples:
      >>> import jax.numpy as jnp
      >>> from loglinear_jax import gated_linear_attention
      >>> q = k = jnp.ones((2, 100, 1, 16)) / 4  # [B, T, G, K]
      >>> v = jnp.ones((2, 100, 4, 32))  # [B, T, H, V]
      >>> gated_linear_attention(q, k, v, jnp.full((2, 100, 4), -0.1)).shape
      (2, 100, 4, 32)
    """
    return _operate(
        gated_linear, dict(q=q, k=k, v=v, log_decay=log_decay), segment_ids, 0, initial_state, return_state,
        axis_name, chunk_size, implementation, precision,
    )  # fmt: skip


@overload
def gated_delta_attention(
    q: Array, k: Array, v: Array, log_decay: Array, beta: Array, *,
    return_state: Literal[False] = ..., **options: Unpack[OneStateOptions],
) -> Array: ...  # fmt: skip


@overload
def gated_delta_attention(
    q: Array, k: Array, v: Array, log_decay: Array, beta: Array, *,
    return_state: Literal[True], **options: Unpack[OneStateOptions],
) -> tuple[Array, Array]: ...  # fmt: skip


@with_standard_promotion
def gated_delta_attention(
    q: Float[Array, "B T G K"],
    k: Float[Array, "B T G K"],
    v: Float[Array, "B T H V"],
    log_decay: Float[Array, "B T H"],
    beta: Float[Array, "B T H"],
    *,
    segment_ids: Int[Array, "B T"] | None = None,
    initial_state: Float[Array, "B H K V"] | None = None,
    return_state: bool = False,
    axis_name: str | None = None,
    chunk_size: int | None = None,
    implementation: Implementation | None = None,
    precision: jax.lax.PrecisionLike = None,
) -> Float[Array, "B T H V"] | tuple[Float[Array, "B T H V"], Float[Array, "B H K V"]]:
    """Gated DeltaNet: linear attention whose single state overwrites what it holds under a key.

        S_t = exp(log_decay_t) (I - β_t k_t k_tᵀ) S_{t-1} + β_t k_t v_tᵀ,    o_t = q_tᵀ S_t

    (Yang, Kautz and Hatamizadeh 2025.) With log_decay 0 it is DeltaNet (Yang et al. 2024). O(T) time.

    Args:
      q, k, v, log_decay, beta, segment_ids, return_state, axis_name, chunk_size, implementation, precision: as in
        `log_linear_delta_attention`.
      initial_state: the state after earlier tokens, one matrix a head, [B, H, K, V], in float32 or wider.

    Returns:
      o [B, T, H, V] in v's dtype, or (o, state [B, H, K, V]) with return_state.

    Raises:
      ValueError: ranks or sizes that do not fit, H not a multiple of G, a dtype that is not floating, a chunk_size that is
        not a power of two, or an unknown implementation; UnsupportedError (a ValueError) where the kernels are asked for and
        cannot run.

    Examples:
      >>> import jax.numpy as jnp
      >>> from loglinear_jax import gated_delta_attention
      >>> q = k = jnp.ones((2, 100, 1, 16)) / 4  # unit vectors, [B, T, G, K]
      >>> v = jnp.ones((2, 100, 4, 32))  # [B, T, H, V]
      >>> log_decay, beta = jnp.full((2, 100, 4), -0.1), jnp.full((2, 100, 4), 0.5)
      >>> gated_delta_attention(q, k, v, log_decay, beta).shape
      (2, 100, 4, 32)
    """
    return _operate(
        gated_delta, dict(q=q, k=k, v=v, log_decay=log_decay, beta=beta), segment_ids, 0, initial_state, return_state,
        axis_name, chunk_size, implementation, precision,
    )  # fmt: skip


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
    return _operate(
        scores, dict(q=q, k=k, log_decay=log_decay), segment_ids, first_position, initial_state, return_state,
        axis_name, chunk_size, implementation, precision, num_levels=num_levels,
    )  # fmt: skip


@with_standard_promotion
def softmax_attention(
    q: Float[Array, "B T G K"],
    k: Float[Array, "B T G K"],
    v: Float[Array, "B T H V"],
    *,
    segment_ids: Int[Array, "B T"] | None = None,
    window: int | None = None,
    axis_name: str | None = None,
    implementation: Literal["parallel", "recurrent"] | None = None,
) -> Float[Array, "B T H V"]:
    """Softmax attention with rotary positions (Su et al. 2021): o_t = Σ_{s≤t} softmax_s(q̃_t · k̃_s / √K) v_s, ~ for rotated.

    As only differences of positions count, a document in a pack equals the document alone.

    NaN or inf in a token's v also reaches earlier tokens of its sequence, for 0 · NaN is NaN, but not with "recurrent".

    Args:
      q, k: queries and keys, [B, T, G, K], for G groups; head h uses group h // (H / G).
      v: values, [B, T, H, V], H a multiple of G.
      segment_ids: as in `log_linear_attention`.
      window: how many tokens each attends to, the last of them itself; None: all before it, and itself.
      axis_name: as in `log_linear_attention`, for "parallel" alone. Each device gathers the keys and values of all pieces, and
        holds a score for each pair of its T queries and all keys.
      implementation: "parallel" (the whole sequence through jax.nn.dot_product_attention), which None stands for, or
        "recurrent" (a scan over tokens with a cache of every key and value).

    Returns o [B, T, H, V] in q's and k's dtype, the wider if they differ.

    Raises:
      ValueError: ranks or sizes that do not fit, H not a multiple of G, a dtype that is not floating, or an unknown
        implementation, a window below 1, or segment_ids that do not fit; with axis_name a T that is not a power of two, or
        "recurrent".
    """
    check_shapes(q=(q, "B T G K"), k=(k, "B T G K"), v=(v, "B T H V"))
    check_implementation(implementation, Literal["parallel", "recurrent"])
    check_segment_ids(segment_ids, *v.shape[:2])
    widest = jnp.result_type(q, k)
    q, k = q.astype(widest), k.astype(widest)
    if window is not None and window < 1:
        raise ValueError(f"window must be None or at least 1, got {window}")
    form: Callable = softmax.recurrent if implementation == "recurrent" else softmax.parallel
    if axis_name is not None and check_pieces(axis_name, q.shape[1]) > 1:
        if form is softmax.recurrent:
            raise ValueError(
                f"implementation is 'recurrent': expected 'parallel' or None with axis_name = {axis_name!r}"
            )
        form = functools.partial(softmax.parallel_in_piece, axis_name=axis_name)
    form = functools.partial(form, window=window)
    return over_explicit_axes(tokens=2, axis=2)(form)(q, k, v, segment_ids)


# --- What the operations with states share --------------------------------------------------------------------------


def _operate(
    operation: ModuleType, arrays: dict[str, Array], segment_ids, first_position, initial_state, return_state,
    axis_name, chunk_size, implementation, precision, num_levels=None,
) -> Any:  # fmt: skip
    """Checks the arguments of an operation, chooses its form, and runs it. num_levels: of bucket scores."""
    one_state = "lam" not in arrays and operation is not scores
    named = {name: (x, AXES[name]) for name, x in arrays.items()}
    if one_state and initial_state is not None:
        named["initial_state"] = (initial_state, "B H K V")
    check_shapes(**named)
    check_attention_settings(chunk_size, implementation)
    state = None if one_state else initial_state
    batch, length, heads = arrays["log_decay"].shape
    pieces = check_pieces(axis_name, length, first_position, initial_state, return_state)
    sizes = heads, arrays["q"].shape[-1], arrays["v"].shape[-1] if "v" in arrays else 1
    end, what = check_start(state, first_position, segment_ids, batch, length, *sizes)
    end, what = pieces * end, f"{what} on each of {pieces} devices" if pieces > 1 else what
    if "lam" in arrays:
        num_levels = arrays["lam"].shape[-1]
        check_levels(num_levels, end, what, arrays["lam"])
    elif operation is scores:
        if num_levels is None:
            num_levels = max(fenwick.num_levels(end), 1 if state is None else state.levels.shape[2])
        check_levels(num_levels, end, what)
    if implementation is None:
        widths = [x for name, x in arrays.items() if name in "qkv"]
        implementation = "pallas" if operation.kernels_are_best(*widths, chunk_size, precision) else "xla"
    at_zero = isinstance(first_position, int) and first_position == 0
    out, state = _compiled()(
        *arrays.values(), (initial_state, None if at_zero else first_position, segment_ids), operation=operation,
        levels=num_levels, axis_name=axis_name if pieces > 1 else None, return_state=bool(return_state),
        chunk_size=chunk_size, implementation=implementation, precision=precision, interpreted=interpreting(),
    )  # fmt: skip
    return (out, state) if return_state else out


@functools.cache
def _compiled() -> Callable:
    """`_run`, compiled as a whole, not each of its steps. A call must not take what was compiled where kernels were
    interpreted, or were not."""
    sharded = over_explicit_axes(tokens=2, axis=2)(_run)

    def attend(*arrays: Any, interpreted: bool, **options: Any) -> Any:
        del interpreted
        return sharded(*arrays, **options)

    names = "operation", "levels", "axis_name", "return_state", "chunk_size", "implementation", "precision"
    return jax.jit(attend, static_argnames=(*names, "interpreted"))


def _run(
    *arrays: Any, operation: ModuleType, levels: int | None, axis_name: str | None, return_state: bool,
    chunk_size: int | None, implementation: str, precision: jax.lax.PrecisionLike,
) -> Any:  # fmt: skip
    """(outputs, the last state or None). arrays: the operation's, and the arguments of `Start.of`. levels: of λ or scores."""
    *tokens, where = arrays
    at = 2 if operation is scores else 3
    # Where the kernels of log-linear attention do all, they bound the decays too.
    by_kernels_alone = operation is log_linear and implementation == "pallas" and not return_state
    bound = not (by_kernels_alone and where[0] is None and axis_name is None)
    log_decay, *first = to_common_dtypes(tokens[at], *tokens[:at], bound=bound)
    inputs = [*first, log_decay, *(x.astype(log_decay.dtype) for x in tokens[at + 1 :])]

    def run(*inputs: Any, start: Start, **options: Any) -> Any:
        """Only the recurrent form takes rows at positions of their own."""
        if implementation in CHUNKED:
            options["chunk_size"] = chunk_size
        form = getattr(operation, implementation)
        form = functools.partial(form, return_state=return_state, precision=precision, **options)
        return form(*inputs, start) if implementation == "recurrent" else over_rows(form, inputs, start)

    out_dtype = log_decay.dtype if operation is scores else tokens[2].dtype
    if axis_name is not None:
        options = dict(levels=levels, implementation=implementation, chunk_size=chunk_size, precision=precision)
        starts = starts_in_piece(where[-1], axis_name)
        return operation.piece(run, inputs, starts, axis_name, **options).astype(out_dtype), None
    start = Start.of(*where)
    if levels is None:
        if start.state is not None:
            start = start._replace(state=start.state.astype(log_decay.dtype))
        out, state = run(*inputs, start=start)
        return out.astype(out_dtype), state
    start, held = with_more_levels(start, levels, log_decay.dtype)
    if operation is scores:
        out, state = run(*inputs, start=start, levels=held)
        out = out[..., :levels]
    else:
        out, state = run(*inputs[:-1], pad_to(inputs[-1], held, axis=3), start=start)
    return nan_beyond(capacity(levels), start, out.astype(out_dtype)), state


def _checked_token(state: FenwickState, **arrays: Array) -> tuple[Array, ...]:
    check_shapes(**{name: (x, AXES[name].replace(" T", "")) for name, x in arrays.items()})
    (batch, heads, value_dim), lam = arrays["v"].shape, arrays["lam"]
    check_step_state(state, lam, batch, heads, arrays["q"].shape[-1], value_dim)
    return tuple(arrays.values())
