"""The gated delta rule with one state a head, with its gradient: chunks of tokens by themselves, then the state from chunk to
chunk, then what each token reads. No K × K matrix of a chunk is made.

With the letters of `loglinear_jax.ops.delta.transitions`, a chunk writes Z = M V - W S, and takes S to γ S + K̃ᵀ Z. Its tokens
read o = diag(Γ₀) Q S + P Z, P = Q Kᵀ ∘ Γ.

Names and shapes inside, beside those of `delta.chunks`:

  erase        [B, H, N, C, K]   W
  own          [B, H, N, C, V]   M V
  writes       [B, H, N, C, V]   Z
  before       [B, H, N, K, V]   S before each chunk
  first, last  [B, H, K, V]      float32: the state before all chunks, and after them
  since, until [B, H, T]         float32: decay since the chunk's start; until its end
"""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.lax import PrecisionLike
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from pallas_kernels.attention.backends import trace_both_passes
from pallas_kernels.common.chunks import log2_decays, multiply, since_chunk_start
from pallas_kernels.common.launch import HeadAxes, call, column_blocks, fold_mapped_axes, for_columns, pad, varying
from pallas_kernels.common.support import UnsupportedError
from pallas_kernels.delta.chunks import (
    ChunkSizes,
    ChunkSpecs,
    ChunkTiles,
    decays_gradient,
    decays_of_ends,
    inverse_of,
    sizes_for,
    system_gradient,
    why_no_hopper,
)
from pallas_kernels.delta.tiles import scan_columns, scan_launch


def delta_scan(
    q: Float[Array, "B T G K"],
    k: Float[Array, "B T G K"],
    v: Float[Array, "B T H V"],
    log_decay: Float[Array, "B T H"],
    beta: Float[Array, "B T H"],
    first: Float[Array, "B H K V"],
    *,
    chunk_size: int,
    precision: PrecisionLike = None,
    segmented: bool = False,
    hopper: bool | None = None,
) -> tuple[Float[Array, "B T H V"], Float[Array, "B H K V"]]:
    """The gated delta rule over tokens 0 .. T-1 in N whole chunks of C = chunk_size, from a state on.

    Args:
      q, k, v, log_decay, beta, chunk_size, precision, segmented: as in `delta_chunks`.
      first: the state before all tokens, [B, H, K, V] float32.
      hopper: whether the kernels for Hopper GPUs run, which take chunks of 64 tokens in bfloat16, K and V from 33 to 128. None:
        where they can, but not in the interpreter.

    Returns o [B, T, H, V] in q's dtype, and the state after all tokens [B, H, K, V] in float32. Differentiable in reverse mode,
    and batched by vmap, to any depth.

    Raises UnsupportedError where KERNELS["delta"] says why it cannot run.
    """
    key_dim, value_dim = q.shape[3], v.shape[3]
    sizes = sizes_for(q, v, chunk_size, precision, segmented)
    reason = _why_no_hopper(key_dim, value_dim, q.dtype, chunk_size)
    if hopper is None:
        hopper = reason is None and not sizes.interpret
    if hopper:
        if reason is not None:
            raise UnsupportedError(reason)
        sizes = dataclasses.replace(sizes, segmented=False)  # float32 is exact enough for bfloat16
    keys, values = sizes.key_dim, sizes.value_dim
    out, last = _differentiable(sizes, hopper)(
        pad(q, (3, keys)),
        pad(k, (3, keys)),
        pad(v, (3, values)),
        jnp.moveaxis(log2_decays(log_decay, sizes), 0, 1),
        jnp.swapaxes(beta, 1, 2),
        pad(first, (2, keys), (3, values)),
    )
    return out[..., :value_dim], last[..., :key_dim, :value_dim]


def _why_no_hopper(key_dim: int, value_dim: int, dtype: DTypeLike, chunk_size: int) -> str | None:
    return why_no_hopper(key_dim, value_dim, dtype, chunk_size, _try_hopper)


def _try_hopper() -> None:
    keys, of_head = jnp.zeros((1, 128, 1, 64), jnp.bfloat16), jnp.zeros((1, 128, 1))
    scan = functools.partial(delta_scan, chunk_size=64, hopper=True)
    trace_both_passes(scan, keys, keys, keys, of_head, of_head, jnp.zeros((1, 1, 64, 64)))


@functools.cache
def _differentiable(sizes: ChunkSizes, hopper: bool):
    """The function (q, k, v, log2 decays [B, P, H, T], beta, first) -> (o, last)."""
    inputs, outputs = (2, 2, 2, 2, 1, 1), (2, 1)
    run, run_back = _kernels(hopper)
    partitioned = not (hopper and sizes.interpret)  # as in the attention

    def folded(function, arguments, results, **options):
        own = functools.partial(function, sizes=sizes, **options)
        return fold_mapped_axes(own, partitioned, HeadAxes(sizes.shared_out, arguments, results))

    forward, forward_and_keep = (folded(run, inputs, outputs, keep=keep) for keep in (False, True))
    backward = folded(run_back, outputs + inputs[:5], inputs)

    def keeping(*operands):
        out, last, *kept = forward_and_keep(*operands)
        return (out, last), (*operands[:5], *kept)

    apply = jax.custom_vjp(lambda *operands: tuple(forward(*operands)))
    apply.defvjp(keeping, lambda kept, d: tuple(backward(*d, *kept)))
    return apply


def _kernels(hopper: bool):
    """The functions `_forward` and `_backward`, or those for Hopper."""
    if not hopper:
        return _forward, _backward
    from pallas_kernels.delta.hopper import one_state as kernels  # which only JAX from 0.11.2 on can import

    return varying(kernels.forward), varying(kernels.backward)


# --- Launching ------------------------------------------------------------------------------------------------------


class _ScanSpecs:
    """BlockSpecs of a grid (block of values, batch x head), each program of which goes over all chunks."""

    def __init__(self, sizes: ChunkSizes):
        self.sizes = sizes
        self.columns = scan_columns(sizes.batch * sizes.heads, sizes.value_dim)

    def grid(self):
        return self.sizes.value_dim // self.columns, self.sizes.batch * self.sizes.heads

    def _where(self, y):
        return y // self.sizes.heads, y % self.sizes.heads

    def keys(self):
        """[T, K] of q or k."""
        ratio = self.sizes.heads // self.sizes.groups
        return pl.BlockSpec(
            (None, self.sizes.length, None, self.sizes.key_dim),
            lambda x, y: (y // self.sizes.heads, 0, y % self.sizes.heads // ratio, 0),
        )

    def tokens(self):
        """[T, columns of V] of o and the like."""
        return pl.BlockSpec(
            (None, self.sizes.length, None, self.columns),
            lambda x, y: (y // self.sizes.heads, 0, y % self.sizes.heads, x),
        )

    def by_token(self):
        """[T]."""
        return pl.BlockSpec((None, None, self.sizes.length), lambda x, y: (*self._where(y), 0))

    def erase(self):
        """[N, C, K]."""
        shape = self.sizes.num_chunks, self.sizes.chunk, self.sizes.key_dim
        return pl.BlockSpec((None, None, *shape), lambda x, y: (*self._where(y), 0, 0, 0))

    def columns_of(self, *shape: int):
        """[..., columns of V]."""
        return pl.BlockSpec((None, None, *shape, self.columns), lambda x, y: (*self._where(y), *[0] * len(shape), x))


def _forward(q, k, v, decays, beta, first, *, sizes: ChunkSizes, keep: bool):
    sizes = sizes.of_arrays(q, v.shape[2])
    decay = since_chunk_start(jnp.moveaxis(decays, 1, 0), sizes)
    launch, specs = sizes.launch(), ChunkSpecs(sizes, sizes.launch())
    num, chunk, keys, values = sizes.num_chunks, sizes.chunk, sizes.key_dim, sizes.value_dim
    by_token = jax.ShapeDtypeStruct((sizes.batch, sizes.heads, sizes.length), jnp.float32)

    def by_chunk(*shape):
        return jax.ShapeDtypeStruct(sizes.by_chunk(*shape), q.dtype)

    erase, own, inverse, since, until = call(
        functools.partial(_solve_kernel, sizes=sizes),
        "delta_solve",
        specs.grid(num),
        specs.inputs(),
        [
            *(specs.by_chunk(chunk, columns) for columns in (keys, values, chunk)),
            *[specs.by_token()] * 2,
        ],
        [*(by_chunk(chunk, columns) for columns in (keys, values, chunk)), by_token, by_token],
        launch,
        sizes.interpret,
    )(k, v, decay, beta)
    scan = _ScanSpecs(sizes)
    by_columns, states, one = scan.columns_of(num, chunk), scan.columns_of(num, keys), scan.columns_of(keys)
    writes, before, last = call(
        functools.partial(_scan_kernel, sizes=sizes),
        "delta_scan",
        scan.grid(),
        [scan.keys(), scan.erase(), by_columns, scan.by_token(), scan.by_token(), one],
        [by_columns, states, one],
        [by_chunk(chunk, values), by_chunk(keys, values), jax.ShapeDtypeStruct(first.shape, jnp.float32)],
        scan_launch(chunk, keys, scan.columns, q.dtype),
        sizes.interpret,
    )(k, erase, own, since, until, first)
    out = call(
        functools.partial(_out_kernel, sizes=sizes),
        "delta_out",
        specs.grid(num),
        [specs.keys(), specs.keys(), specs.decay(), specs.by_chunk(chunk, values), specs.by_chunk(keys, values)],
        specs.values(),
        jax.ShapeDtypeStruct(v.shape, q.dtype),
        launch,
        sizes.interpret,
    )(q, k, decay, writes, before)
    return (out, last, erase, inverse, since, until, writes, before) if keep else (out, last)


def _backward(do, d_last, q, k, v, decays, beta, erase, inverse, since, until, writes, before, *, sizes: ChunkSizes):
    sizes = sizes.of_arrays(q, v.shape[2])
    decay = since_chunk_start(jnp.moveaxis(decays, 1, 0), sizes)
    launch = sizes.launch(gradients=True)
    specs, scan = ChunkSpecs(sizes, launch), _ScanSpecs(sizes)
    num, chunk, keys, values = sizes.num_chunks, sizes.chunk, sizes.key_dim, sizes.value_dim
    by_keys, by_values, states = (specs.by_chunk(*x) for x in ((chunk, keys), (chunk, values), (keys, values)))
    by_token = jax.ShapeDtypeStruct((sizes.batch, sizes.heads, sizes.length), jnp.float32)
    do = do.astype(q.dtype)

    def by_chunk(*shape):
        return jax.ShapeDtypeStruct(sizes.by_chunk(*shape), q.dtype)

    d_read = call(
        functools.partial(_pair_writes_kernel, sizes=sizes),
        "delta_pair_writes",
        specs.grid(num),
        [specs.keys(), specs.keys(), specs.decay(), specs.values()],
        by_values,
        by_chunk(chunk, values),
        launch,
        sizes.interpret,
    )(q, k, decay, do)
    by_columns, of_states, one = scan.columns_of(num, chunk), scan.columns_of(num, keys), scan.columns_of(keys)
    d_writes, d_after, d_first = call(
        functools.partial(_scan_back_kernel, sizes=sizes),
        "delta_scan_back",
        scan.grid(),
        [
            *[scan.keys()] * 2, scan.erase(), scan.tokens(), by_columns, scan.by_token(), scan.by_token(), one,
        ],
        [by_columns, of_states, one],
        [by_chunk(chunk, values), by_chunk(keys, values), jax.ShapeDtypeStruct(d_last.shape, jnp.float32)],
        scan_launch(chunk, keys, scan.columns, q.dtype, back=True),
        sizes.interpret,
    )(q, k, erase, do, d_read, since, until, d_last)  # fmt: skip
    partial = jax.ShapeDtypeStruct((specs.head_blocks, *q.shape), q.dtype if specs.head_blocks == 1 else jnp.float32)
    dq, dk, d_erase, d_decay, d_until = call(
        functools.partial(_read_gradients_kernel, sizes=sizes),
        "delta_read_gradients",
        specs.grid(num),
        [specs.keys(), specs.keys(), specs.decay(), specs.values(), states, states, by_values, by_values],
        [specs.partial_keys(), specs.partial_keys(), by_keys, specs.by_token(), specs.by_token()],
        [partial, partial, by_chunk(chunk, keys), by_token, by_token],
        launch,
        sizes.interpret,
    )(q, k, decay, do, before, d_after, writes, d_writes)
    dk, dv, d_decay, d_beta = call(
        functools.partial(_solve_gradients_kernel, sizes=sizes),
        "delta_solve_gradients",
        specs.grid(num),
        [
            *(specs.keys(), specs.values(), specs.decay(), specs.by_token(), specs.by_chunk(chunk, chunk)),
            *(by_keys, by_values, specs.partial_keys(), specs.by_token()),
        ],
        [specs.partial_keys(), specs.values(), specs.by_token(), specs.by_token()],
        [partial, jax.ShapeDtypeStruct(v.shape, v.dtype), by_token, by_token],
        launch,
        sizes.interpret,
    )(k, v, decay, beta, inverse, d_erase, d_writes, dk, d_decay)
    dq, dk = (jnp.sum(x, axis=0, dtype=jnp.float32).astype(q.dtype) for x in (dq, dk))
    return dq, dk, dv, decays_gradient(d_decay, d_until, decays, sizes), d_beta, d_first


# --- Kernels --------------------------------------------------------------------------------------------------------


def _solve_kernel(
    k_ref, v_ref, decay_ref, beta_ref, erase_ref, own_ref, inverse_ref, since_ref, until_ref, *, sizes: ChunkSizes
):
    times = functools.partial(multiply, sizes=sizes)
    chunk, beta = ChunkTiles(k_ref, decay_ref, sizes), beta_ref[0, :]
    dtype = chunk.dtype
    inverse = inverse_of(beta[:, None] * chunk.similar(), sizes)
    inverse_ref[:, :] = inverse.astype(dtype)
    inner = (inverse * beta[None, :]).astype(dtype)
    since, until = decays_of_ends(decay_ref, sizes)
    since_ref[0, :], until_ref[0, :] = since[:, 0], until[:, 0]
    for place in column_blocks(sizes.value_dim):
        own_ref[:, place] = times(inner, v_ref[:, place]).astype(dtype)
    for place in column_blocks(sizes.key_dim):
        erase_ref[:, place] = times(inner, (since * k_ref[:, place]).astype(dtype)).astype(dtype)


def _scan_kernel(
    k_ref, erase_ref, own_ref, since_ref, until_ref, first_ref, writes_ref, before_ref, last_ref, *, sizes: ChunkSizes
):
    """Small operands of the next chunk are loaded a chunk before; the compiler does so with those that are multiplied."""
    times, size = functools.partial(multiply, sizes=sizes), sizes.chunk

    def small(chunk):
        chunk = jnp.minimum(chunk, sizes.num_chunks - 1)
        tokens = pl.ds(chunk * size, size)
        return own_ref[chunk], until_ref[tokens], since_ref[chunk * size + size - 1]

    def step(chunk, carry):
        state, (own, until, decay) = carry
        following = small(chunk + 1)
        stored = state.astype(before_ref.dtype)
        before_ref[chunk, :, :] = stored
        writes = own.astype(jnp.float32) - times(erase_ref[chunk], stored)
        writes_ref[chunk, :, :] = writes.astype(writes_ref.dtype)
        at_end = (until[:, None] * writes).astype(writes_ref.dtype)
        return decay * state + times(k_ref[pl.ds(chunk * size, size), :], at_end, transpose_x=True), following

    last_ref[:, :], _ = lax.fori_loop(0, sizes.num_chunks, step, (first_ref[:, :], small(0)))


def _out_kernel(q_ref, k_ref, decay_ref, writes_ref, before_ref, out_ref, *, sizes: ChunkSizes):
    times = functools.partial(multiply, sizes=sizes)
    chunk, q = ChunkTiles(k_ref, decay_ref, sizes), q_ref[:, :]
    products = chunk.products(q)
    for place in column_blocks(sizes.value_dim):
        out = chunk.since_start * times(q, before_ref[:, place]) + times(products, writes_ref[:, place])
        out_ref[:, place] = out.astype(out_ref.dtype)


def _pair_writes_kernel(q_ref, k_ref, decay_ref, do_ref, d_read_ref, *, sizes: ChunkSizes):
    """The part of the gradient of what is written that its own chunk's outputs have: Pᵀ dO."""
    products = ChunkTiles(k_ref, decay_ref, sizes).products(q_ref[:, :])
    for place in column_blocks(sizes.value_dim):
        d_read = multiply(products, do_ref[:, place], sizes, transpose_x=True)
        d_read_ref[:, place] = d_read.astype(d_read_ref.dtype)


def _scan_back_kernel(
    q_ref,
    k_ref,
    erase_ref,
    do_ref,
    d_read_ref,
    since_ref,
    until_ref,
    d_last_ref,
    d_writes_ref,
    d_after_ref,
    d_first_ref,
    *,
    sizes: ChunkSizes,
):
    """The gradient of the state after each chunk, from the last chunk to the first."""
    times, size = functools.partial(multiply, sizes=sizes), sizes.chunk

    def small(chunk):
        chunk = jnp.maximum(chunk, 0)
        tokens = pl.ds(chunk * size, size)
        since = since_ref[tokens], since_ref[chunk * size + size - 1]
        return d_read_ref[chunk], do_ref[tokens, :], until_ref[tokens], *since

    def step(done, carry):
        chunk = sizes.num_chunks - 1 - done
        d_state, (d_read, do, until, since, decay) = carry
        following = small(chunk - 1)
        tokens = pl.ds(chunk * size, size)
        stored = d_state.astype(d_after_ref.dtype)
        d_after_ref[chunk, :, :] = stored
        d_writes = d_read.astype(jnp.float32) + until[:, None] * times(k_ref[tokens, :], stored)
        d_writes = d_writes.astype(d_writes_ref.dtype)
        d_writes_ref[chunk, :, :] = d_writes
        do = (since[:, None] * do).astype(do.dtype)
        d_state = decay * d_state + times(q_ref[tokens, :], do, transpose_x=True)
        return d_state - times(erase_ref[chunk], d_writes, transpose_x=True), following

    start = d_last_ref[:, :], small(sizes.num_chunks - 1)
    d_first_ref[:, :], _ = lax.fori_loop(0, sizes.num_chunks, step, start)


def _read_gradients_kernel(
    q_ref,
    k_ref,
    decay_ref,
    do_ref,
    before_ref,
    d_after_ref,
    writes_ref,
    d_writes_ref,
    dq_ref,
    dk_ref,
    d_erase_ref,
    d_decay_ref,
    d_until_ref,
    *,
    sizes: ChunkSizes,
):
    """Of what is read, o = diag(Γ₀) Q S + P Z, and of the state after, γ S + K̃ᵀ Z; and of W, by way of Z."""
    times = functools.partial(multiply, sizes=sizes)
    chunk = ChunkTiles(k_ref, decay_ref, sizes)
    dtype, zeros = chunk.dtype, jnp.zeros((sizes.chunk, sizes.chunk), jnp.float32)

    def of_pairs(place, d_products):
        return d_products + times(do_ref[:, place], writes_ref[:, place], transpose_y=True)

    d_dots = for_columns(sizes.value_dim, of_pairs, zeros) * chunk.between
    d_dots = jnp.where(chunk.level >= 0, d_dots, 0.0)
    # A token and itself have no decay between them; in both sums they would drown what strong decays leave of the others.
    d_between = jnp.where(chunk.level > 0, d_dots * times(q_ref[:, :], chunk.k, transpose_y=True), 0.0)
    d_decay = jnp.sum(d_between, axis=1) - jnp.sum(d_between, axis=0)
    d_dots = d_dots.astype(dtype)
    since, until = decays_of_ends(decay_ref, sizes)

    def of_keys(place, carry):
        d_since, d_until, d_kept = carry
        tile = sizes.chunk, d_erase_ref[:, place].shape[1]

        def of_values(inner, sums):
            d_reads, d_to_end, d_erase, d_kept = sums
            before, d_after = before_ref[place, inner], d_after_ref[place, inner]
            d_kept += jnp.sum(before.astype(jnp.float32) * d_after.astype(jnp.float32), axis=1)
            return (
                d_reads + times(do_ref[:, inner], before, transpose_y=True),
                d_to_end + times(writes_ref[:, inner], d_after, transpose_y=True),
                d_erase - times(d_writes_ref[:, inner], before, transpose_y=True),
                d_kept,
            )

        start = (*[jnp.zeros(tile, jnp.float32)] * 3, jnp.zeros(tile[1:], jnp.float32))
        d_reads, d_to_end, d_erase, of_kept = for_columns(sizes.value_dim, of_values, start)
        d_erase_ref[:, place] = d_erase.astype(dtype)
        q, k = q_ref[:, place], k_ref[:, place]
        dq_ref[:, place] = (since * d_reads + times(d_dots, k)).astype(dq_ref.dtype)
        dk_ref[:, place] = (until * d_to_end + times(d_dots, q, transpose_x=True)).astype(dk_ref.dtype)
        d_since += jnp.sum(d_reads * q, axis=1)
        return d_since, d_until + jnp.sum(d_to_end * k, axis=1), d_kept + jnp.sum(of_kept)

    none = jnp.zeros((sizes.chunk,), jnp.float32)
    d_since, d_until, d_kept = for_columns(sizes.key_dim, of_keys, (none, none, jnp.float32(0.0)))
    # By the logarithms of decays. γ is the decay of the last token.
    is_last = lax.broadcasted_iota(jnp.int32, none.shape, 0) == sizes.chunk - 1
    d_since += jnp.where(is_last, d_kept, 0.0)
    d_decay_ref[0, :] = d_decay + since[:, 0] * d_since
    d_until_ref[0, :] = d_until * until[:, 0]


def _solve_gradients_kernel(
    k_ref,
    v_ref,
    decay_ref,
    beta_ref,
    inverse_ref,
    d_erase_ref,
    d_writes_ref,
    dk_so_far_ref,
    d_decay_so_far_ref,
    dk_ref,
    dv_ref,
    d_decay_ref,
    d_beta_ref,
    *,
    sizes: ChunkSizes,
):
    """Of W = M diag(Γ₀) K and M V, and of what M is made of."""
    times = functools.partial(multiply, sizes=sizes)
    since, _ = decays_of_ends(decay_ref, sizes)
    inner, dtype = (inverse_ref[:, :] * beta_ref[0, :][None, :]).astype(k_ref.dtype), k_ref.dtype

    def of_values(place, d_inner):
        d_writes = d_writes_ref[:, place]
        dv_ref[:, place] = times(inner, d_writes, transpose_x=True).astype(dv_ref.dtype)
        return d_inner + times(d_writes, v_ref[:, place], transpose_y=True)

    def of_erase(place, d_inner):
        return d_inner + times(d_erase_ref[:, place], (since * k_ref[:, place]).astype(dtype), transpose_y=True)

    d_inner = for_columns(sizes.value_dim, of_values, jnp.zeros((sizes.chunk, sizes.chunk), jnp.float32))
    d_inner = for_columns(sizes.key_dim, of_erase, d_inner)
    chunk = ChunkTiles(k_ref, decay_ref, sizes)
    d_dots, d_decay, d_beta_ref[0, :] = system_gradient(chunk, d_inner, inverse_ref[:, :], beta_ref[0, :])
    d_dots = (d_dots + jnp.transpose(d_dots)).astype(dtype)

    def of_keys(place, d_since):
        k = k_ref[:, place]
        d_since_start = times(inner, d_erase_ref[:, place], transpose_x=True)
        dk = dk_so_far_ref[:, place].astype(jnp.float32) + since * d_since_start + times(d_dots, k)
        dk_ref[:, place] = dk.astype(dk_ref.dtype)
        return d_since + jnp.sum(d_since_start * k, axis=1)

    d_since = for_columns(sizes.key_dim, of_keys, jnp.zeros((sizes.chunk,), jnp.float32))
    d_decay_ref[0, :] = d_decay_so_far_ref[0, :] + d_decay + since[:, 0] * d_since
