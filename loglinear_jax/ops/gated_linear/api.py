"""Gated linear attention with one state: log-linear attention with λ ≡ 1, at the cost of a single level. A baseline."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from loglinear_jax.ops.heads import accumulation_dtype, dot, merge_heads, split_heads
from loglinear_jax.ops.checks import check_chunk_size, check_shapes
from loglinear_jax.ops.decays import MIN_LOG_DECAY, decay_matrix, decay_to_end
from loglinear_jax.ops.tree import fitting_chunk_size


@functools.partial(jax.jit, static_argnames=("return_state", "chunk_size", "precision"))
def gated_linear_attention(
    q: Float[Array, "B T G K"],
    k: Float[Array, "B T G K"],
    v: Float[Array, "B T H V"],
    log_decay: Float[Array, "B T H"],
    *,
    initial_state: Float[Array, "B H K V"] | None = None,
    return_state: bool = False,
    chunk_size: int | None = None,
    precision: jax.lax.PrecisionLike = None,
) -> Float[Array, "B T H V"] | tuple[Float[Array, "B T H V"], Float[Array, "B H K V"]]:
    """o_t = Σ_{s≤t} exp(Σ_{s<r≤t} log_decay_r) (q_t · k_s) v_s, chunkwise in O(T) (Mamba-2's SSD, Dao & Gu 2024).

    Arguments as in `log_linear_attention`, except that the state after earlier tokens is one matrix a head, in float32 or
    wider. States pass from chunk to chunk by an associative scan. Returns o, or (o, state) with return_state.

    Raises:
      ValueError: ranks or sizes that do not fit, H not a multiple of G, a dtype that is not floating, or a chunk_size that is
        not a power of two.
    """
    arrays = dict(q=(q, "B T G K"), k=(k, "B T G K"), v=(v, "B T H V"), log_decay=(log_decay, "B T H"))
    if initial_state is not None:
        arrays["initial_state"] = (initial_state, "B H K V")
    check_shapes(**arrays)
    check_chunk_size(chunk_size)
    length, groups = q.shape[1:3]
    chunk_size = fitting_chunk_size(length, chunk_size)
    num_chunks = -(-length // chunk_size)
    dtype = accumulation_dtype(q, k, v)
    log_decay = jnp.maximum(log_decay.astype(dtype), MIN_LOG_DECAY)

    def into_chunks(x):
        pad = [(0, 0)] * x.ndim
        pad[1] = (0, num_chunks * chunk_size - length)
        x = jnp.pad(x, pad).reshape(x.shape[0] * num_chunks, chunk_size, *x.shape[2:])
        return split_heads(x, groups)

    def per_sequence(x):
        return x.reshape(-1, num_chunks, *x.shape[1:])

    q, k = (into_chunks(x)[:, :, 0] for x in (q, k))  # [B·N, G, C, K]
    values, log_decay = into_chunks(v), into_chunks(log_decay)  # [B·N, G, R, C, ...]
    scores = dot("bgtk,bgsk->bgts", q, k, precision)[:, :, None] * decay_matrix(log_decay)
    out = dot("bgrts,bgrsv->bgrtv", scores.astype(v.dtype), values, precision)

    decayed = (decay_to_end(log_decay)[..., None] * values).astype(v.dtype)
    state = per_sequence(dot("bgsk,bgrsv->bgrkv", k, decayed, precision))
    chunk_decay = per_sequence(jnp.exp(jnp.sum(log_decay, axis=-1)))[..., None, None]

    def combine(earlier, later):
        return earlier[0] * later[0], earlier[1] * later[0] + later[1]

    through, state = jax.lax.associative_scan(combine, (chunk_decay, state), axis=1)  # after each chunk
    first = jnp.zeros_like(state[:, 0])
    if initial_state is not None:
        first = initial_state.astype(dtype).reshape(first.shape)
        state += through * first[:, None]
    before = jnp.concatenate([first[:, None], state[:, :-1]], axis=1).reshape(-1, *state.shape[2:])
    since = jnp.exp(jnp.cumsum(log_decay, axis=-1))[..., None]
    out += since * dot("bgtk,bgrkv->bgrtv", q, before, precision)
    out = merge_heads(out)
    out = out.reshape(-1, num_chunks * chunk_size, *out.shape[2:])[:, :length].astype(v.dtype)
    return (out, state[:, -1].reshape(out.shape[0], -1, *state.shape[-2:])) if return_state else out
