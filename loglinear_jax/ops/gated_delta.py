"""The forms of Gated DeltaNet: the gated delta rule with one state.

Each takes what `gated_delta_attention` has checked, and returns its outputs and the state [B, H, K, V] at the end. Chunkwise, a
tree over every BLOCK tokens, and one state that is carried from block to block: O(T).
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

import pallas_kernels
from loglinear_jax.fenwick import tree_heights
from loglinear_jax.ops import delta
from loglinear_jax.ops.continuation import Start, scan_tokens
from loglinear_jax.ops.decays import accumulation_dtype
from loglinear_jax.ops.levels import dot, merge_heads, pad_to
from loglinear_jax.ops.positions import forgetting
from loglinear_jax.ops.sharding import varying_as

BLOCK = 1024  # tokens of each tree
# Where one state goes by `delta_scan`, which makes no map of a chunk. With float32 inputs it was not timed.
SCANNED = (jnp.bfloat16,)


def kernels_are_best(q, k, v, chunk_size=None, precision=None) -> bool:
    return delta.kernels_are_best(q, k, v, chunk_size, precision)


def parallel(q, k, v, log_decay, beta, start, *, return_state, precision=None):
    """As of `delta`, with λ ≡ 1."""
    run, v, _ = delta.whole(q, k, v, log_decay, beta, start, precision)
    out = dot("bgrts,bgrsv->bgrtv", run.weights.astype(v.dtype), v, precision)
    state = run.own(v[:, :, :, None], precision)
    if start.state is not None:
        first = start.state.reshape(state.shape)
        out += jnp.einsum("bgrtk,bgrlkv->bgrtv", run.reads, first, precision=precision)
        state += run.after(first, precision)
    return merge_heads(out), state.reshape(state.shape[0], -1, *state.shape[4:]) if return_state else None


def recurrent(q, k, v, log_decay, beta, start, *, return_state, precision=None):
    """S ← exp(g_t) (I - β_t k_t k_tᵀ) S + β_t k_t v_tᵀ, o_t = q_tᵀ S."""
    state, dtype = start.state, accumulation_dtype(q, k, v)
    if state is None:
        state = jnp.zeros((len(v), v.shape[2], q.shape[-1], v.shape[-1]), dtype)

    def step(state, q, k, v, log_decay, beta, precision):
        q, k = (jnp.repeat(x, v.shape[1] // x.shape[1], axis=1) for x in (q, k))
        written = beta[..., None, None] * k[..., :, None] * v[..., None, :]
        state = delta.overwritten(state, k, log_decay, beta, precision) + written
        return jnp.einsum("bhk,bhkv->bhv", q, state, precision=precision), state

    tokens = [x.astype(dtype) for x in (q, k, v, log_decay, beta)]
    out, state = scan_tokens(step, state, tokens, precision, start.starts)
    return out, state if return_state else None


def xla(q, k, v, log_decay, beta, start, *, return_state, chunk_size=None, precision=None):
    length, key_dim = q.shape[1], q.shape[-1]
    chunk_size = delta.chunk_size_for(q, v, chunk_size)
    height = tree_heights(min(-(-length // chunk_size), max(BLOCK // chunk_size, 1)))
    whole = -(-length // (chunk_size << height)) * (chunk_size << height)
    shape = (len(v), q.shape[2], v.shape[2] // q.shape[2], key_dim, v.shape[-1])
    q, k, v, log_decay, beta = (pad_to(x, whole, axis=1) for x in (q, k, v, log_decay, beta))
    starts = None if start.starts is None else pad_to(start.starts, whole, axis=1)
    v, run, own = delta.run_chunks(q, k, v, log_decay, beta, starts, chunk_size, precision)
    out = dot("bgrnts,bgrnsv->bgrntv", run.weights.astype(v.dtype), v, precision)
    climbing = delta.climb_chunks(run, own, precision)
    for below in range(height):
        nodes = next(climbing)
        out += delta.read_siblings(below, nodes.reads, nodes.states, precision)
    block = next(climbing)
    first = jnp.zeros(shape, run.decay.dtype) if start.state is None else start.state.reshape(shape)

    def carry(state, node):
        maps, own = node
        return maps.apply(state, precision) + own, state

    by_block = jax.tree.map(lambda x: jnp.moveaxis(x, 3, 0), (block.maps, block.states))
    state, before = jax.lax.scan(carry, varying_as(q, first), by_block)
    reads = block.reads.reshape(*shape[:3], len(before), -1, key_dim)
    out += dot("bgrntk,nbgrkv->bgrntv", reads, before, precision).reshape(out.shape)
    state = state.reshape(len(state), -1, *shape[-2:])
    return delta.into_sequence(out, length), state if return_state else None


def pallas(q, k, v, log_decay, beta, start, *, return_state, chunk_size=None, precision=None):
    length, initial_state = q.shape[1], start.state
    chunk_size = delta.required_kernel_chunk(q, v, chunk_size, precision)
    whole = -(-length // chunk_size) * chunk_size
    log_decay = forgetting(log_decay, start.starts)
    q, k, v, log_decay, beta = (pad_to(x, whole, axis=1) for x in (q, k, v, log_decay, beta))
    sizes = dict(chunk_size=chunk_size, precision=precision, segmented=start.starts is not None)
    if initial_state is None:
        shape = len(q), v.shape[2], q.shape[-1], v.shape[-1]
        initial_state = varying_as(q, jnp.zeros(shape, log_decay.dtype))
    if q.dtype in SCANNED:
        out, state = pallas_kernels.delta_scan(q, k, v, log_decay, beta, initial_state, **sizes)
    else:
        out, reads, lost, states = pallas_kernels.delta_chunks(q, k, v, log_decay, beta, None, **sizes)
        decay = jnp.exp(delta.log_decay_of_chunks(log_decay, chunk_size))
        out, state = pallas_kernels.carry_state(out, reads, decay, lost, states, initial_state, precision=precision)
    return out[:, :length], state if return_state else None


def piece(run, inputs, starts, axis_name, *, chunk_size, precision, **_):
    """As of log-linear attention."""
    _, states = delta.states_before(inputs, starts, axis_name, False, chunk_size, precision)
    return run(*inputs, start=Start(states.reshape(len(states), -1, *states.shape[4:]), starts=starts))[0]
