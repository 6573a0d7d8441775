"""Log-linear attention: the public functions."""

from __future__ import annotations

from typing import Literal, Unpack, overload

import jax
from jaxtyping import Array, Float, Int

from loglinear_jax.fenwick import FenwickState, num_levels
from loglinear_jax.ops.checks import Implementation, check_implementation
from loglinear_jax.ops.continuation import Start, take_step
from loglinear_jax.ops.dispatch import LevelOptions, Operation, checked_token, operate
from loglinear_jax.ops.log_linear import chunkwise, pallas, parallel, recurrent
from loglinear_jax.ops.sequence_parallel import Exchange, decay_over, own_state
from pallas_kernels import with_standard_promotion


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

    with level(t, s) = bit_length(t XOR s), over the tokens s of t's segment (Guo et al. 2025, arXiv 2506.04761). O(T log T).
    Nothing is scaled or normalised: divide q by √K beforehand if you want that. Differentiable in every array and in the
    initial state.

    NaN or inf in a token's arguments appears in the outputs that depend on it. Matrix products also carry it to earlier
    tokens, as 0 · NaN is NaN: from k or v (with "pallas" also log_decay) to the tokens of its chunk, with "parallel" of
    its sequence. It does not spread from q or lam, or with "recurrent", and never reaches an earlier chunk, another
    sequence of the batch, or heads of another group. In the initial state it reaches every token of its head. In
    gradients it spreads further: in every form, NaN in a later q, log_decay or lam reaches the gradients of every
    earlier k, v and log_decay of its heads, even if the loss is only of earlier tokens; with "pallas" also those of
    later log_decay in its chunk.

    Args:
      q, k: queries and keys, [B, T, G, K], for G groups; head h uses group h // (H / G). float32, bfloat16, float16
        or (under x64) float64.
      v: values, [B, T, H, V], H a multiple of G.
      log_decay: natural log of the decay, [B, T, H], one scalar per token and head; above 0 it counts as 0, and -inf forgets
        everything before the token. Called g in flash-linear-attention. Used in float32 or wider.
      lam: λ, the weight of each level, [B, T, H, L] with L ≥ num_levels(position of the last token + 1). Called
        level_scales in flash-linear-attention. Used in float32 or wider.
      segment_ids: integers [B, T], if several documents are packed into a sequence: a token whose id differs from that
        of the token before starts a new segment, which reads nothing before it. Levels follow positions in the
        sequence, so a document in the pack gives the same as the document alone with first_position. None: one segment.
      first_position: position of the first token, which has no past: an integer, or [B] if rows start at different
        positions; may be traced.
      initial_state: state after earlier tokens, which belong to the first segment. The tokens then start at
        initial_state.position, which may be traced, and is [B] if rows are at different positions. A traced position
        cannot be checked: every token beyond the levels of `lam` gets NaN, and earlier tokens keep their outputs and
        gradients; at a negative position, or one beyond the state's own levels, all tokens get NaN.
      return_state: also return the state after the last token; it holds only the last segment.
      axis_name: the mesh axis over which the sequence is cut, inside `jax.shard_map`: the devices have pieces of equal
        length, in order. T is then the length of a piece, a power of two, and L ≥ num_levels(tokens of all pieces).
        Segments may continue from piece to piece. Devices exchange one state for each head, in one all-gather, and one
        reduce-scatter for the gradients. Excludes first_position, initial_state and return_state.
      chunk_size: tokens per chunk in the chunkwise forms, a power of two; chosen from the shapes if None. It does not
        change the result.
      implementation: "parallel" (O(T²), the definition), "recurrent" (a scan over tokens), "xla" (chunkwise,
        O(T log T), any backend), "pallas" (chunkwise by GPU kernels; K and V from 16 to 256, float32 or bfloat16,
        reverse-mode gradients only), or None: "pallas" on a GPU that can run it, else "xla".
      precision: of the matrix products, as in jax.lax.dot; None follows jax.default_matmul_precision.

    Returns:
      o: [B, T, H, V] in v's dtype; with return_state, (o, FenwickState) whose L is lam's (or the initial state's, if
        that has more).

    Raises:
      ValueError: ranks or sizes that do not fit, H not a multiple of G, too few levels, a dtype that is not floating,
        a chunk_size that is not a power of two, an unknown implementation, both first_position and initial_state, with
        axis_name a T that is not a power of two or an argument that it excludes, or, for "pallas", what its kernels
        cannot run (pallas_kernels.UnsupportedError).

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
    return operate(
        _OPERATION, dict(q=q, k=k, v=v, log_decay=log_decay, lam=lam), segment_ids, first_position, initial_state, return_state,
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
      implementation: as in `log_linear_attention`. With None and "pallas" a kernel updates the states in one pass where
        it can run (on a GPU, float32, K and V powers of two); elsewhere plain JAX runs.

    Returns:
      (o [B, H, V] in v's dtype, the next state, of the same shape and dtype as `state`).

    Raises:
      ValueError: as in `log_linear_attention`; also if the state's (concrete) position has outgrown its levels, or
        lam's. A traced position cannot be checked: o is then NaN, also for every later token if the state has outgrown
        its levels. Size the state by init_fenwick_state's max_length.

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
    tokens = checked_token(state, q=q, k=k, v=v, log_decay=log_decay, lam=lam)
    by_kernel = implementation in (None, "pallas") and pallas.can_step(state)
    return take_step(pallas.step if by_kernel else recurrent.step, state, *tokens)


def _piece(run, inputs, starts, axis_name, *, implementation, chunk_size, precision, **_):
    q, k, v, log_decay, lam = inputs
    if implementation == "pallas" and pallas.reads_past(q, v, chunk_size, precision):
        return pallas.attend_piece(*inputs, starts, axis_name, chunk_size, precision)
    root = own_state(k, v, log_decay, starts, precision)
    past = Exchange(axis_name)(root, decay_over(log_decay, starts))
    inside = num_levels(q.shape[1])
    beyond = lam[..., inside : inside + past.states.shape[2]]
    out, _ = run(q, k, v, log_decay, lam[..., :inside], start=Start(starts=starts))
    return out + past.read(q, beyond, log_decay, starts, precision)


_OPERATION = Operation(
    parallel.attend, recurrent.attend, chunkwise.attend, pallas.attend, _piece, pallas.is_best, kernels_bound_decays=True,
)  # fmt: skip
