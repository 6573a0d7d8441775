"""The public function: its checks, and the choice of a form."""

from __future__ import annotations

from typing import Literal, Unpack, overload

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from loglinear_jax.ops.checks import (
    Implementation,
    Options,
    check_attention_settings,
    check_options,
    check_segment_ids,
    check_shapes,
)
from loglinear_jax.ops.continuation import Start, start_arguments
from loglinear_jax.ops.dispatch import choose_form, compile_operation, run_form
from loglinear_jax.ops.dtypes import to_common_dtypes
from loglinear_jax.ops.gated_linear import chunkwise, pallas, parallel, recurrent
from loglinear_jax.ops.sequence_parallel import (
    check_pieces,
    decay_over,
    left_of_pieces,
    own_state,
    starts_in_piece,
)
from pallas_kernels import with_standard_promotion


@overload
def gated_linear_attention(
    q: Array, k: Array, v: Array, log_decay: Array, *,
    segment_ids: Array | None = ...,
    initial_state: Array | None = ..., return_state: Literal[False] = ..., axis_name: str | None = ...,
    **options: Unpack[Options],
) -> Array: ...  # fmt: skip


@overload
def gated_linear_attention(
    q: Array, k: Array, v: Array, log_decay: Array, *,
    segment_ids: Array | None = ...,
    initial_state: Array | None = ..., return_state: Literal[True], **options: Unpack[Options],
) -> tuple[Array, Array]: ...  # fmt: skip


@overload
def gated_linear_attention(
    q: Array, k: Array, v: Array, log_decay: Array, *,
    segment_ids: Array | None = ...,
    initial_state: Array | None = ..., return_state: bool, axis_name: str | None = ...,
    **options: Unpack[Options],
) -> Array | tuple[Array, Array]: ...  # fmt: skip


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
    arrays = dict(q=(q, "B T G K"), k=(k, "B T G K"), v=(v, "B T H V"), log_decay=(log_decay, "B T H"))
    if initial_state is not None:
        arrays["initial_state"] = (initial_state, "B H K V")
    check_shapes(**arrays)
    check_attention_settings(chunk_size, implementation)
    check_options(return_state, precision)
    check_segment_ids(segment_ids, *v.shape[:2])
    pieces = check_pieces(axis_name, v.shape[1], 0, initial_state, return_state)
    out, state = _attend(
        q, k, v, log_decay, start_arguments(initial_state, 0, segment_ids),
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


@compile_operation("axis_name", "return_state", "chunk_size", "precision", "implementation")
def _attend(q, k, v, log_decay, where, *, axis_name, return_state, chunk_size, precision, implementation):
    out_dtype = v.dtype
    log_decay, q, k, v = to_common_dtypes(log_decay, q, k, v)
    if axis_name is None:
        start = Start.of(*where)
    else:
        starts = starts_in_piece(where[-1], axis_name)
        left = left_of_pieces(own_state(k, v, log_decay, starts, precision), decay_over(log_decay, starts), axis_name)
        start = Start(jnp.sum(left, axis=0), starts=starts)
    if start.state is not None:
        start = start._replace(state=start.state.astype(log_decay.dtype))
    options = dict(start=start, chunk_size=chunk_size, precision=precision)
    out, state = run_form(_FORMS, implementation, q, k, v, log_decay, **options)
    return out.astype(out_dtype), state if return_state else None  # what is not returned is not computed
