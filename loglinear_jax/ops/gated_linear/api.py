"""Gated linear attention: the public function."""

from __future__ import annotations

from typing import Literal, Unpack, overload

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from loglinear_jax.ops.checks import Implementation
from loglinear_jax.ops.continuation import Start
from loglinear_jax.ops.dispatch import OneStateOptions, Operation, operate
from loglinear_jax.ops.gated_linear import chunkwise, pallas, parallel, recurrent
from loglinear_jax.ops.sequence_parallel import decay_over, left_of_pieces, own_state
from pallas_kernels import with_standard_promotion


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

    It equals `log_linear_attention` with λ ≡ 1. Differentiable in every array. NaN and inf spread as in
    `log_linear_attention`.

    Args:
      q, k, v, log_decay, segment_ids, return_state, axis_name, chunk_size, precision: as in `log_linear_attention`.
      initial_state: the state after earlier tokens, one matrix per head, [B, H, K, V], in float32 or wider.
      implementation: "parallel" (O(T²), the definition), "recurrent" (a scan over tokens), "xla" (chunkwise, O(T), any
        backend), "pallas" (the GPU kernels of `log_linear_attention`: on Hopper GPUs with one state, O(T), elsewhere
        with all levels, O(T log T)), or None: "pallas" on a GPU that can run it, else "xla".

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
    return operate(
        _OPERATION, dict(q=q, k=k, v=v, log_decay=log_decay), segment_ids, 0, initial_state, return_state,
        axis_name, chunk_size, implementation, precision,
    )  # fmt: skip


def _piece(run, inputs, starts, axis_name, *, precision, **_):
    _, k, v, log_decay = inputs
    left = left_of_pieces(own_state(k, v, log_decay, starts, precision), decay_over(log_decay, starts), axis_name)
    return run(*inputs, start=Start(jnp.sum(left, axis=0), starts=starts))[0]


_OPERATION = Operation(parallel.attend, recurrent.attend, chunkwise.attend, pallas.attend, _piece, pallas.is_best)
