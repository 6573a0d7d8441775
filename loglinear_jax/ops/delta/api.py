"""The public functions: their checks, and the choice of a form."""

from __future__ import annotations

from typing import Literal, Unpack, overload

import jax
from jaxtyping import Array, Float, Int

import pallas_kernels
from loglinear_jax.fenwick import FenwickState, capacity, num_levels
from loglinear_jax.ops.checks import (
    Implementation,
    Options,
    check_attention_settings,
    check_levels,
    check_options,
    check_segment_ids,
    check_shapes,
    check_start,
    check_step_state,
)
from loglinear_jax.ops.continuation import Start, nan_beyond, start_arguments, take_step, with_all_levels
from loglinear_jax.ops.delta import chunkwise, pallas, parallel, recurrent
from loglinear_jax.ops.delta.pieces import read, states_before
from loglinear_jax.ops.dispatch import choose_form, compile_operation, run_form
from loglinear_jax.ops.dtypes import to_common_dtypes
from loglinear_jax.ops.sequence_parallel import check_pieces, starts_in_piece


@overload
def log_linear_delta_attention(
    q: Array, k: Array, v: Array, log_decay: Array, beta: Array, lam: Array, *,
    segment_ids: Array | None = ..., first_position: int | Array = ...,
    initial_state: FenwickState | None = ..., return_state: Literal[False] = ..., axis_name: str | None = ...,
    **options: Unpack[Options],
) -> Array: ...  # fmt: skip


@overload
def log_linear_delta_attention(
    q: Array, k: Array, v: Array, log_decay: Array, beta: Array, lam: Array, *,
    segment_ids: Array | None = ..., first_position: int | Array = ...,
    initial_state: FenwickState | None = ..., return_state: Literal[True], **options: Unpack[Options],
) -> tuple[Array, FenwickState]: ...  # fmt: skip


@overload
def log_linear_delta_attention(
    q: Array, k: Array, v: Array, log_decay: Array, beta: Array, lam: Array, *,
    segment_ids: Array | None = ..., first_position: int | Array = ...,
    initial_state: FenwickState | None = ..., return_state: bool, axis_name: str | None = ...,
    **options: Unpack[Options],
) -> Array | tuple[Array, FenwickState]: ...  # fmt: skip


@pallas_kernels.with_standard_promotion
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
    arrays = dict(q=(q, "B T G K"), k=(k, "B T G K"), v=(v, "B T H V"), log_decay=(log_decay, "B T H"))
    check_shapes(**arrays, beta=(beta, "B T H"), lam=(lam, "B T H L"))
    check_attention_settings(chunk_size, implementation)
    check_options(return_state, precision)
    sizes = *v.shape[:3], q.shape[-1], v.shape[-1]
    pieces = check_pieces(axis_name, v.shape[1], first_position, initial_state, return_state)
    end, what = check_start(initial_state, first_position, segment_ids, *sizes)
    check_levels(lam, pieces * end, f"{what} on each of {pieces} devices" if pieces > 1 else what)
    out, state = _attend(
        q, k, v, log_decay, beta, lam, start_arguments(initial_state, first_position, segment_ids),
        axis_name=axis_name if pieces > 1 else None, return_state=return_state, chunk_size=chunk_size, precision=precision,
        implementation=choose_form(implementation, pallas.is_best, q, k, v, chunk_size, precision),
    )  # fmt: skip
    return (out, state) if return_state else out


_FORMS = {
    "parallel": parallel.attend,
    "recurrent": recurrent.attend,
    "xla": chunkwise.attend,
    "pallas": pallas.attend,
}
_FORMS_OF_ONE_STATE = {
    "parallel": parallel.one_state,
    "recurrent": recurrent.one_state,
    "xla": chunkwise.one_state,
    "pallas": pallas.one_state,
}


@compile_operation("axis_name", "return_state", "chunk_size", "implementation", "precision")
def _attend(q, k, v, log_decay, beta, lam, where, *, axis_name, return_state, chunk_size, implementation, precision):
    """What both functions compute: with lam None, one state."""
    out_dtype, room = v.dtype, None if lam is None else capacity(lam.shape[-1])
    log_decay, q, k, v = to_common_dtypes(log_decay, q, k, v)
    dtype = log_decay.dtype
    inputs = [q, k, v, log_decay, beta.astype(dtype)]
    if axis_name is not None:
        options = dict(implementation=implementation, chunk_size=chunk_size, precision=precision)
        return _attend_piece(inputs, lam, where[-1], axis_name, **options).astype(out_dtype), None
    start = Start.of(*where)
    if lam is not None:
        lam, start = with_all_levels(lam.astype(dtype), start)
        inputs.append(lam)
    elif start.state is not None:
        start = start._replace(state=start.state.astype(dtype))
    forms = _FORMS_OF_ONE_STATE if lam is None else _FORMS
    options = dict(start=start, chunk_size=chunk_size, return_state=return_state, precision=precision)
    out, state = run_form(forms, implementation, *inputs, **options)
    out = out.astype(out_dtype)
    return out if lam is None else nan_beyond(room, start, out), state


def _attend_piece(inputs, lam, segment_ids, axis_name, *, implementation, chunk_size, precision):
    """The outputs of one piece of a sequence, from its own tokens and from earlier pieces."""
    starts = starts_in_piece(segment_ids, axis_name)
    piece = chunkwise.as_one_node(*inputs, starts, chunk_size=chunk_size, precision=precision)
    states = states_before(piece, axis_name, lam is not None, precision)
    options = dict(chunk_size=chunk_size, return_state=False, precision=precision)
    if lam is None:
        start = Start(states.reshape(len(states), -1, *states.shape[4:]), starts=starts)
        return run_form(_FORMS_OF_ONE_STATE, implementation, *inputs, start=start, **options)[0]
    inside, lam = num_levels(inputs[0].shape[1]), lam.astype(states.dtype)
    out, _ = run_form(_FORMS, implementation, *inputs, lam[..., :inside], start=Start(starts=starts), **options)
    return out + read(piece, states, lam[..., inside : inside + states.shape[3]], axis_name, precision)


@pallas_kernels.with_standard_promotion
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
    arrays = dict(q=(q, "B G K"), k=(k, "B G K"), v=(v, "B H V"), log_decay=(log_decay, "B H"))
    check_shapes(**arrays, beta=(beta, "B H"), lam=(lam, "B H L"))
    batch, heads, value_dim = v.shape
    check_step_state(state, lam, batch, heads, q.shape[-1], value_dim)
    return take_step(recurrent.step, state, q, k, v, log_decay, beta, lam)


@overload
def gated_delta_attention(
    q: Array, k: Array, v: Array, log_decay: Array, beta: Array, *,
    segment_ids: Array | None = ...,
    initial_state: Array | None = ..., return_state: Literal[False] = ..., axis_name: str | None = ...,
    **options: Unpack[Options],
) -> Array: ...  # fmt: skip


@overload
def gated_delta_attention(
    q: Array, k: Array, v: Array, log_decay: Array, beta: Array, *,
    segment_ids: Array | None = ...,
    initial_state: Array | None = ..., return_state: Literal[True], **options: Unpack[Options],
) -> tuple[Array, Array]: ...  # fmt: skip


@overload
def gated_delta_attention(
    q: Array, k: Array, v: Array, log_decay: Array, beta: Array, *,
    segment_ids: Array | None = ...,
    initial_state: Array | None = ..., return_state: bool, axis_name: str | None = ...,
    **options: Unpack[Options],
) -> Array | tuple[Array, Array]: ...  # fmt: skip


@pallas_kernels.with_standard_promotion
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
    arrays = dict(q=(q, "B T G K"), k=(k, "B T G K"), v=(v, "B T H V"), log_decay=(log_decay, "B T H"))
    arrays["beta"] = (beta, "B T H")
    if initial_state is not None:
        arrays["initial_state"] = (initial_state, "B H K V")
    check_shapes(**arrays)
    check_attention_settings(chunk_size, implementation)
    check_options(return_state, precision)
    check_segment_ids(segment_ids, *v.shape[:2])
    pieces = check_pieces(axis_name, v.shape[1], 0, initial_state, return_state)
    out, state = _attend(
        q, k, v, log_decay, beta, None, start_arguments(initial_state, 0, segment_ids),
        axis_name=axis_name if pieces > 1 else None, return_state=return_state, chunk_size=chunk_size, precision=precision,
        implementation=choose_form(implementation, pallas.is_best, q, k, v, chunk_size, precision),
    )  # fmt: skip
    return (out, state) if return_state else out
