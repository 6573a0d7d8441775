"""The delta rule: the public functions, with a state for each level and with one state."""

from __future__ import annotations

from typing import Literal, Unpack, overload

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from loglinear_jax.fenwick import FenwickState, num_levels
from loglinear_jax.ops.checks import Implementation
from loglinear_jax.ops.continuation import Start, take_step
from loglinear_jax.ops.delta import chunkwise, pallas, parallel, recurrent
from loglinear_jax.ops.dispatch import LevelOptions, OneStateOptions, Operation, checked_token, operate
from loglinear_jax.ops.levels import merge_heads, split_heads
from pallas_kernels import with_standard_promotion


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
    """Log-linear Gated DeltaNet: log-linear attention whose states overwrite what they hold under a key (Guo et al. 2025).

        o_t = Σ_{s≤t} λ_t[level(t, s)] · q_tᵀ [Π_{s<r≤t} exp(log_decay_r) (I - β_r k_r k_rᵀ)] β_s k_s v_sᵀ

    with level(t, s) = bit_length(t XOR s), over the tokens s of t's segment; later factors of the product are on the
    left (the gated delta rule, Yang, Kautz and Hatamizadeh 2025). With λ ≡ 1 it is `gated_delta_attention`. Keys must
    have length at most 1: with β |k|² above 2 the states grow without bound. A content-aware λ takes its
    `bucket_scores` from the decayed sums of keys, which the delta rule does not change.

    Differentiable in every array and in the initial state. NaN and inf spread as in `log_linear_attention`; those in
    beta and log_decay spread like those in k.

    Args:
      q, k, v, log_decay, lam, segment_ids, first_position, return_state, axis_name, chunk_size, precision: as in
        `log_linear_attention`. With axis_name, devices also exchange a [K, K] matrix for each head: how their piece
        changes a state.
      beta: β, how much is overwritten, [B, T, H], from 0 to 1, or up to 2 for negative eigenvalues (not checked). Used
        in float32 or wider.
      initial_state: as in `log_linear_attention`, from this function or `log_linear_delta_step`.
      implementation: "parallel" (O(T²) memory, the definition), "recurrent" (a scan over tokens), "xla" (chunkwise,
        O(T log T), any backend), "pallas" (the same by GPU kernels; K and V up to 128 in bfloat16, up to 64 in float32;
        reverse-mode gradients only), or None: on a GPU, "pallas" in bfloat16 and TF32 for such K and V; else "xla".

    Returns:
      o [B, T, H, V] in v's dtype; with return_state, (o, FenwickState) whose L is lam's (or the initial state's, if that has
      more).

    Raises:
      ValueError: as in `log_linear_attention`; also for a beta that does not fit.

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
    return operate(
        _OPERATION, dict(q=q, k=k, v=v, log_decay=log_decay, beta=beta, lam=lam), segment_ids, first_position, initial_state,
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
      ValueError: as in `fenwick_step`; also for a beta that does not fit.

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
    tokens = checked_token(state, q=q, k=k, v=v, log_decay=log_decay, beta=beta, lam=lam)
    return take_step(recurrent.step, state, *tokens)


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

    (Yang, Kautz and Hatamizadeh 2025.) With log_decay = 0 it is DeltaNet (Yang et al. 2024). O(T) time.

    Args:
      q, k, v, log_decay, beta, segment_ids, return_state, axis_name, chunk_size, implementation, precision: as in
        `log_linear_delta_attention`.
      initial_state: the state after earlier tokens, one matrix per head, [B, H, K, V], in float32 or wider.

    Returns:
      o [B, T, H, V] in v's dtype, or (o, state [B, H, K, V]) with return_state.

    Raises:
      ValueError: ranks or sizes that do not fit, H not a multiple of G, a dtype that is not floating, a chunk_size that is
        not a power of two, or an unknown implementation; UnsupportedError (a ValueError) if the kernels are asked for
        and cannot run.

    Examples:
      >>> import jax.numpy as jnp
      >>> from loglinear_jax import gated_delta_attention
      >>> q = k = jnp.ones((2, 100, 1, 16)) / 4  # unit vectors, [B, T, G, K]
      >>> v = jnp.ones((2, 100, 4, 32))  # [B, T, H, V]
      >>> log_decay, beta = jnp.full((2, 100, 4), -0.1), jnp.full((2, 100, 4), 0.5)
      >>> gated_delta_attention(q, k, v, log_decay, beta).shape
      (2, 100, 4, 32)
    """
    return operate(
        _ONE_STATE, dict(q=q, k=k, v=v, log_decay=log_decay, beta=beta), segment_ids, 0, initial_state, return_state,
        axis_name, chunk_size, implementation, precision,
    )  # fmt: skip


def _piece(run, inputs, starts, axis_name, *, chunk_size, precision, **_):
    *tokens, lam = inputs
    node, states = chunkwise.states_before(tokens, starts, axis_name, True, chunk_size, precision)
    inside, lam = num_levels(lam.shape[1]), lam.astype(states.dtype)
    out, _ = run(*tokens, lam[..., :inside], start=Start(starts=starts))
    lam = lam[..., inside : inside + states.shape[3]]
    occupied = jnp.right_shift(jax.lax.axis_index(axis_name), np.arange(lam.shape[3], dtype=np.int32)) & 1 == 1
    lam = split_heads(jnp.where(occupied, lam, 0), states.shape[1])  # 0 · inf is NaN
    reads = node.reads.reshape(*lam.shape[:4], -1)
    return out + merge_heads(jnp.einsum("bgrtu,bgrtk,bgrukv->bgrtv", lam, reads, states, precision=precision))


def _one_state_piece(run, inputs, starts, axis_name, *, chunk_size, precision, **_):
    _, states = chunkwise.states_before(inputs, starts, axis_name, False, chunk_size, precision)
    return run(*inputs, start=Start(states.reshape(len(states), -1, *states.shape[4:]), starts=starts))[0]


_OPERATION = Operation(parallel.attend, recurrent.attend, chunkwise.attend, pallas.attend, _piece, pallas.is_best)
_ONE_STATE = Operation(
    parallel.one_state, recurrent.one_state, chunkwise.one_state, pallas.one_state, _one_state_piece, pallas.is_best
)
