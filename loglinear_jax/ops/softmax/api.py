"""Softmax attention: the public function."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Literal

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from loglinear_jax.ops.checks import check_implementation, check_segment_ids, check_shapes
from loglinear_jax.ops.sequence_parallel import check_pieces
from loglinear_jax.ops.sharding import over_explicit_axes
from loglinear_jax.ops.softmax import parallel, recurrent
from loglinear_jax.settings import is_of
from pallas_kernels import with_standard_promotion


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
    """Softmax attention with rotary positions (Su et al. 2021): o_t = Σ_{s≤t} softmax_s(q̃_t · k̃_s / √K) v_s.

    q̃ and k̃ are rotated by position. Only differences of positions count, so a document in a pack gives the same as
    alone.

    "parallel" needs O(T) memory, also for gradients. On a GPU, bfloat16 and float16 go through cuDNN's FlashAttention,
    with documents as a mask of at most half a GiB. In all other cases the scores of a few queries are computed at a
    time.

    NaN or inf in a token's v can also reach earlier tokens of its sequence, as 0 · NaN is NaN, but not with
    "recurrent".

    Args:
      q, k: queries and keys, [B, T, G, K], for G groups; head h uses group h // (H / G).
      v: values, [B, T, H, V], H a multiple of G.
      segment_ids: as in `log_linear_attention`.
      window: how many tokens each token attends to, itself included; None: itself and all before it. With a window
        shorter than T / 2 all scores are computed at once, in O(T window) memory.
      axis_name: as in `log_linear_attention`, only for "parallel". Each device gathers the keys and values of all
        pieces; with a window of at most T, only some of the previous piece.
      implementation: "parallel" (the formula, over all pairs of tokens) or "recurrent" (a scan over tokens with a cache of
        every key and value). None means "parallel".

    Returns o [B, T, H, V] in the dtype of q and k, the wider one if they differ.

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
    if window is not None and not (is_of(window, int) and window >= 1):
        raise ValueError(f"window must be None or an integer from 1 on, got {window!r}")
    form: Callable = recurrent.attend if implementation == "recurrent" else parallel.attend
    if axis_name is not None and check_pieces(axis_name, q.shape[1]) > 1:
        if form is recurrent.attend:
            raise ValueError(
                f"implementation is 'recurrent': expected 'parallel' or None with axis_name = {axis_name!r}"
            )
        form = functools.partial(parallel.attend_piece, axis_name=axis_name)
    form = functools.partial(form, window=window)
    return over_explicit_axes(tokens=2, axis=2)(form)(q, k, v, segment_ids)
