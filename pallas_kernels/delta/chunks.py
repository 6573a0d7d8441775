"""What chunks of tokens do by the gated delta rule, each by itself, by one kernel, with its gradient: the WY form of
`loglinear_jax.ops.delta.transitions`, whose letters these are, without a matrix of it in memory.

Names and shapes inside, beside those of `attention.triton` (K, V, C powers of two ≥ 16; one head a program):

  v, o      [B, T, H, V]      what a token reads of its own chunk, in float32
  beta      [B, H, T]         float32
  lam       [B, H, L, T]      float32, of the levels inside a chunk
  reads     [B, H, N, C, K]   what each query makes of a state before its chunk
  lost      [B, H, N, K, K]   a state S before a chunk is γ S - D S after it: D
  states    [B, H, N, K, V]   after a chunk, from its own values alone
  inverse   [B, H, N, C, C]   (I + A)⁻¹, A = strictly lower part of diag(β) (K Kᵀ ∘ Γ)
  products  [B, H, N, C, C]   P = Q Kᵀ ∘ Γ, 0 above the diagonal
  weights   [B, H, N, C, C]   P M, M = (I + A)⁻¹ diag(β)

The last three are kept for the gradient.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.lax import PrecisionLike
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from pallas_kernels.attention.backends import BACKENDS, why_mosaic_changed
from pallas_kernels.common.chunks import (
    LOG2_E,
    Sizes,
    Specs,
    decay_parts,
    decay_tile,
    decay_until_end,
    level_tile,
    log2_decays,
    multiply,
    since_chunk_start,
    sum_tokens,
)
from pallas_kernels.common.launch import (
    HeadAxes,
    call,
    column_blocks,
    dot,
    fold_mapped_axes,
    for_columns,
    load_ahead,
    pad,
)
from pallas_kernels.common.support import FAST_MODES, dot_mode, interpreting, why_not_precise
from pallas_kernels.common.tiles import MIN_TILE, Launch, tile_for
from pallas_kernels.delta.tiles import delta_launch
from pallas_kernels.registry import Kernel, register

MAX_DIMS = {2: 128, 4: 64}  # by bytes of an element: a program keeps what it multiplies in shared memory


def _limits(chunk: int, key_dim: int, value_dim: int, dtype: DTypeLike, precision: PrecisionLike = None) -> str | None:
    if dtype not in (jnp.float32, jnp.bfloat16):
        return f"q, k and v have dtype {jnp.dtype(dtype)}: the kernels of the delta rule take float32 and bfloat16"
    most = MAX_DIMS[jnp.dtype(dtype).itemsize]
    for name, size in (("chunk_size", chunk), ("K, the key dim,", key_dim), ("V, the value dim,", value_dim)):
        if size > most:
            return f"{name} is {size}: the kernels of the delta rule take up to {most} for {jnp.dtype(dtype)}"
    if chunk < MIN_TILE or chunk & (chunk - 1):
        return f"chunk_size is {chunk}: the kernels of the delta rule take powers of two from {MIN_TILE}"
    return why_not_precise(dtype, precision)


def _no_gain(chunk: int, key_dim: int, value_dim: int, dtype: DTypeLike, precision: PrecisionLike = None) -> str | None:
    """As timed, forward and backward: in full float32 the kernels are slower backward."""
    del chunk, key_dim, value_dim
    if dot_mode(dtype, precision) == "f32":
        return f"in full float32 the kernels take longer; they pay in {FAST_MODES}"
    return None


def why_no_hopper(
    key_dim: int, value_dim: int, dtype: DTypeLike, chunk_size: int, try_kernels: Callable[[], None]
) -> str | None:
    """Why kernels for Hopper, which try_kernels traces, cannot run; None if they can."""
    if chunk_size != 64:
        return f"chunk_size is {chunk_size}: the kernels of the delta rule for Hopper take 64"
    return BACKENDS["hopper"].why_not(key_dim, value_dim, dtype, chunk_size) or why_mosaic_changed(try_kernels)


DELTA = register("delta", Kernel("the delta rule", _limits, no_gain=_no_gain))


@dataclasses.dataclass(frozen=True, kw_only=True)
class ChunkSizes(Sizes):
    value_dim: int

    def launch(self, gradients: bool = False, pipelined: bool = False) -> Launch:
        return delta_launch(self.chunk, self.key_dim, self.value_dim, gradients=gradients, pipelined=pipelined)

    @property
    def loads_ahead(self) -> bool:
        """Whether the forward kernel loads ahead: one warp has no registers left for that."""
        return self.launch().warps > 1

    def by_chunk(self, *shape: int) -> tuple[int, ...]:
        return self.batch, self.heads, self.num_chunks, *shape


def sizes_for(q, v, chunk_size: int, precision: PrecisionLike, segmented: bool) -> ChunkSizes:
    """Those of a problem with q [B, T, G, K] and v [B, T, H, V]. Raises UnsupportedError as `delta_chunks` does."""
    batch, length, groups, key_dim = q.shape
    heads, value_dim = v.shape[2:]
    DELTA.require(chunk_size, key_dim, value_dim, q.dtype, precision)
    return ChunkSizes(
        batch=batch,
        chunk=chunk_size,
        num_chunks=length // chunk_size,
        groups=groups,
        heads=heads,
        key_dim=tile_for(key_dim),
        value_dim=tile_for(value_dim),
        dtype=str(jnp.dtype(q.dtype)),
        precision=dot_mode(q.dtype, precision),
        interpret=interpreting(),
        segmented=segmented,
    )


def delta_chunks(
    q: Float[Array, "B T G K"],
    k: Float[Array, "B T G K"],
    v: Float[Array, "B T H V"],
    log_decay: Float[Array, "B T H"],
    beta: Float[Array, "B T H"],
    lam: Float[Array, "B T H L"],
    *,
    chunk_size: int,
    precision: PrecisionLike = None,
    segmented: bool = False,
) -> tuple[Float[Array, "B T H V"], Float[Array, "B H N C K"], Float[Array, "B H N K K"], Float[Array, "B H N K V"]]:
    """What chunks of tokens read of themselves and make of a state, for tokens 0 .. T-1 in N whole chunks of C = chunk_size.

    Args:
      q, k: [B, T, G, K], v: [B, T, H, V], float32 or bfloat16, all alike; C, K and V up to 64, or 128 in
        bfloat16; C a power of two ≥ 16.
      log_decay: [B, T, H] float32, ≤ 0, H a multiple of G. beta: [B, T, H] float32.
      lam: [B, T, H, bit_length(C)] float32.
      precision: of float32 products, as in jax.lax.dot: full float32, or TF32, the GPU's default.
      segmented: as in `fenwick_attention`.

    Returns o [B, T, H, V] in float32, reads [B, H, N, C, K], lost [B, H, N, K, K], states [B, H, N, K, V] in q's dtype.
    Differentiable in reverse mode, and batched by vmap, to any depth.

    Raises UnsupportedError where KERNELS["delta"] says why it cannot run.
    """
    key_dim, value_dim = q.shape[3], v.shape[3]
    sizes = sizes_for(q, v, chunk_size, precision, segmented)
    out, reads, lost, states = _differentiable(sizes)(
        pad(q, (3, sizes.key_dim)),
        pad(k, (3, sizes.key_dim)),
        pad(v, (3, sizes.value_dim)),
        jnp.moveaxis(log2_decays(log_decay, sizes), 0, 1),
        jnp.swapaxes(beta, 1, 2),
        jnp.moveaxis(lam, 1, 3),
    )
    return (
        out[..., :value_dim],
        reads[..., :key_dim],
        lost[..., :key_dim, :key_dim],
        states[..., :key_dim, :value_dim],
    )


@functools.cache
def _differentiable(sizes: ChunkSizes):
    """The function (q, k, v, log2 decays [B, P, H, T], beta, lam) -> (o, reads, lost, states)."""
    inputs, kept = (2, 2, 2, 2), (1, 1, 1)
    forward = fold_mapped_axes(functools.partial(_forward, sizes=sizes), heads=HeadAxes(sizes.shared_out, inputs, (2,)))
    axes = HeadAxes(sizes.shared_out, (*kept, 2, 1, 1, 1, *inputs), inputs)
    backward = fold_mapped_axes(functools.partial(_backward, sizes=sizes), heads=axes)

    def keeping(*operands):
        *results, inverse, products, weights = forward(*operands)
        return tuple(results), (operands, (inverse, products, weights))

    apply = jax.custom_vjp(lambda *operands: keeping(*operands)[0])
    apply.defvjp(keeping, lambda kept, d: backward(*kept[1], *d, *kept[0]))
    return apply


# --- Launching ------------------------------------------------------------------------------------------------------


class ChunkSpecs(Specs):
    """With one head a program."""

    sizes: ChunkSizes

    def values(self):
        """[C, V] of v or o."""
        return pl.BlockSpec(
            (None, self.sizes.chunk, None, self.sizes.value_dim),
            lambda x, y, z: (self._batch(z), x, self._head_block(y, z), 0),
        )

    def by_chunk(self, *shape: int):
        """[B, H, N, ...]."""
        return pl.BlockSpec(
            (None, None, None, *shape), lambda x, y, z: (*self.batch_and_heads(y, z), x, *[0] * len(shape))
        )

    def inputs(self):
        """Of k, v, decay, beta."""
        return [self.keys(), self.values(), self.decay(), self.by_token()]


def _forward(q, k, v, decays, beta, lam, *, sizes: ChunkSizes):
    sizes = sizes.of_arrays(q, v.shape[2])
    decay = since_chunk_start(jnp.moveaxis(decays, 1, 0), sizes)
    launch = sizes.launch()
    specs = ChunkSpecs(sizes, launch)
    chunk, keys, values = sizes.chunk, sizes.key_dim, sizes.value_dim
    by_chunk = (chunk, keys), (keys, keys), (keys, values), *[(chunk, chunk)] * 3
    return call(
        functools.partial(_chunk_kernel, sizes=sizes),
        "delta_chunks",
        specs.grid(sizes.num_chunks),
        [specs.keys(), *specs.inputs(), specs.lam(sizes.levels_inside)],
        [specs.values(), *(specs.by_chunk(*shape) for shape in by_chunk)],
        [
            jax.ShapeDtypeStruct(v.shape, jnp.float32),
            *(jax.ShapeDtypeStruct(sizes.by_chunk(*shape), q.dtype) for shape in by_chunk),
        ],
        launch,
        sizes.interpret,
    )(q, k, v, decay, beta, lam)


def _backward(
    inverse, products, weights, do, d_reads, d_lost, d_states, q, k, v, decays, beta, lam, *, sizes: ChunkSizes
):
    sizes = sizes.of_arrays(q, v.shape[2])
    launch, pipelined = sizes.launch(gradients=True), sizes.launch(gradients=True, pipelined=True)
    specs = ChunkSpecs(sizes, launch)
    chunk, keys, values = sizes.chunk, sizes.key_dim, sizes.value_dim
    decay = since_chunk_start(jnp.moveaxis(decays, 1, 0), sizes)
    pairs, by_keys, by_values = (specs.by_chunk(chunk, columns) for columns in (chunk, keys, values))

    def by_chunk(*shape):
        return jax.ShapeDtypeStruct(sizes.by_chunk(*shape), q.dtype)

    dv, d_lam, d_inner, d_products, written = call(
        functools.partial(_value_gradients_kernel, sizes=sizes),
        "delta_value_gradients",
        specs.grid(sizes.num_chunks),
        [
            *(*specs.inputs(), specs.lam(sizes.levels_inside)),
            *(*[pairs] * 3, specs.values(), specs.by_chunk(keys, values)),
        ],
        [specs.values(), specs.by_level(sizes.levels_inside), pairs, pairs, by_values],
        [
            jax.ShapeDtypeStruct(v.shape, v.dtype),
            jax.ShapeDtypeStruct(lam.shape, lam.dtype),
            by_chunk(chunk, chunk),
            by_chunk(chunk, chunk),
            by_chunk(chunk, values),
        ],
        pipelined,
        sizes.interpret,
    )(k, v, decay, beta, lam, inverse, products, weights, do.astype(q.dtype), d_states)
    by_token = jax.ShapeDtypeStruct((sizes.batch, sizes.heads, sizes.length), jnp.float32)
    of_states = by_keys, specs.by_chunk(keys, keys)
    d_similar, d_dots, erase, d_erase, d_decay, d_beta = call(
        functools.partial(_pair_gradients_kernel, sizes=sizes),
        "delta_pair_gradients",
        specs.grid(sizes.num_chunks),
        [specs.keys(), specs.decay(), specs.by_token(), pairs, pairs, *of_states, pairs, pairs],
        [pairs, pairs, by_keys, by_keys, specs.by_token(), specs.by_token()],
        [*[by_chunk(chunk, chunk)] * 2, *[by_chunk(chunk, keys)] * 2, by_token, by_token],
        pipelined,
        sizes.interpret,
    )(k, decay, beta, inverse, products, d_reads, d_lost, d_inner, d_products)
    partial = jax.ShapeDtypeStruct((specs.head_blocks, *q.shape), q.dtype if specs.head_blocks == 1 else jnp.float32)
    dq, dk, d_decay, d_until = call(
        functools.partial(_key_gradients_kernel, sizes=sizes),
        "delta_key_gradients",
        specs.grid(sizes.num_chunks),
        [
            *(specs.keys(), specs.keys(), specs.decay(), specs.by_token(), pairs, *of_states),
            *(specs.by_chunk(keys, values), pairs, pairs, by_keys, by_keys, by_values, specs.by_token()),
        ],
        [specs.partial_keys(), specs.partial_keys(), *[specs.by_token()] * 2],
        [partial, partial, by_token, by_token],
        launch,
        sizes.interpret,
    )(q, k, decay, beta, inverse, d_reads, d_lost, d_states, d_similar, d_dots, erase, d_erase, written, d_decay)
    dq, dk = (jnp.sum(x, axis=0, dtype=jnp.float32).astype(q.dtype) for x in (dq, dk))
    return dq, dk, dv, decays_gradient(d_decay, d_until, decays, sizes), d_beta, d_lam


def decays_gradient(d_decay, d_until, decays, sizes: ChunkSizes):
    """The gradient of each part of `decays` [B, P, H, T], log2, from those of the logarithms of decays since a chunk's start,
    d_decay, and until its end, d_until, both [B, H, T].

    A token's decay is in that from the start to all later tokens, and in that from all earlier ones to the end: two sums, as in
    one sum the gradient of what is kept to the end would have to cancel out.
    """
    by_chunk = sum_tokens(d_decay, np.greater_equal, sizes) + sum_tokens(d_until, np.less, sizes)
    return jnp.broadcast_to(by_chunk.reshape(d_decay.shape)[:, None] / LOG2_E, decays.shape)


# --- Kernels --------------------------------------------------------------------------------------------------------
# What is needed next is loaded before the product that stands in front of its use: a program multiplies while it waits for it.


def _decay_parts(decay_ref, sizes: ChunkSizes):
    return decay_parts(decay_ref, 0, slice(None), sizes)


def decays_of_ends(decay_ref, sizes: ChunkSizes):
    """(of each token since the chunk's start, until its end), [C, 1]."""
    parts, last = _decay_parts(decay_ref, sizes), decay_parts(decay_ref, 0, sizes.chunk - 1, sizes)
    return jnp.exp2(sum(parts))[:, None], decay_until_end(parts, last)[:, None]


class ChunkTiles:
    """What kernels make of their inputs. Triangles: [query's or later token, key's or earlier], 0 elsewhere."""

    def __init__(self, k_ref, decay_ref, sizes: ChunkSizes):
        self.k, self.sizes = k_ref[:, :], sizes
        self.dtype = self.k.dtype
        self.level = level_tile(sizes.chunk)
        self.between = decay_tile(_decay_parts(decay_ref, sizes))  # [C, C], decay from one token to another
        self.since_start, self.until_end = decays_of_ends(decay_ref, sizes)

    def similar(self):
        """[C, C], float32: K Kᵀ ∘ Γ below the diagonal."""
        dots = multiply(self.k, self.k, self.sizes, transpose_y=True)
        return jnp.where(self.level > 0, dots * self.between, 0.0)

    def products(self, q):
        """[C, C]: Q Kᵀ ∘ Γ."""
        dots = multiply(q, self.k, self.sizes, transpose_y=True)
        return jnp.where(self.level >= 0, dots * self.between, 0.0).astype(self.dtype)

    def keys_to_end(self):
        return (self.until_end * self.k).astype(self.dtype)

    def lam(self, ref):
        """λ [C] of each level, in a list."""
        return [ref[0, index, :] for index in range(self.sizes.levels_inside)]

    def weighted(self, weights, lam):
        """Times λ of each pair's level; 0 where the key comes later."""
        tile = jnp.zeros(self.level.shape, jnp.float32)
        for level, of_level in enumerate(lam):
            tile = jnp.where(self.level == level, of_level[:, None], tile)
        return weights * tile


def _chunk_kernel(
    q_ref,
    k_ref,
    v_ref,
    decay_ref,
    beta_ref,
    lam_ref,
    out_ref,
    reads_ref,
    lost_ref,
    states_ref,
    inverse_ref,
    products_ref,
    weights_ref,
    *,
    sizes: ChunkSizes,
):
    times = functools.partial(multiply, sizes=sizes)
    value_blocks, key_blocks = column_blocks(sizes.value_dim), column_blocks(sizes.key_dim)
    chunk, beta = ChunkTiles(k_ref, decay_ref, sizes), beta_ref[0, :]
    dtype = chunk.dtype
    loaded = load_ahead(
        lambda: q_ref[:, :],
        lambda: chunk.lam(lam_ref),
        *(lambda place=place: v_ref[:, place] for place in value_blocks),
        *(lambda place=place: (k_ref[:, place], q_ref[:, place]) for place in key_blocks),
        ahead=sizes.loads_ahead,
    )
    # Before the inverse, which needs the registers that decays between tokens take.
    q = next(loaded)
    products = chunk.products(q)
    products_ref[:, :] = products
    inverse = inverse_of(beta[:, None] * chunk.similar(), sizes)
    inverse_ref[:, :] = inverse.astype(dtype)
    inner = (inverse * beta[None, :]).astype(dtype)
    to_end = chunk.keys_to_end()
    weights = times(products, inner)
    weights_ref[:, :] = weights.astype(dtype)
    lam = next(loaded)
    weighted = chunk.weighted(weights, lam).astype(dtype)
    for place in value_blocks:
        v = next(loaded)
        out_ref[:, place] = times(weighted, v)
        written = times(inner, v).astype(dtype)
        states_ref[:, place] = times(to_end, written, transpose_x=True).astype(dtype)
    for place in key_blocks:
        k, q = next(loaded)
        erase = times(inner, (chunk.since_start * k).astype(dtype)).astype(dtype)
        lost_ref[:, place] = times(to_end, erase, transpose_x=True).astype(dtype)
        reads_ref[:, place] = (chunk.since_start * q - times(products, erase)).astype(dtype)


def _value_gradients_kernel(
    k_ref,
    v_ref,
    decay_ref,
    beta_ref,
    lam_ref,
    inverse_ref,
    products_ref,
    weights_ref,
    do_ref,
    d_states_ref,
    dv_ref,
    d_lam_ref,
    d_inner_ref,
    d_products_ref,
    written_ref,
    *,
    sizes: ChunkSizes,
):
    """Of o = (P M ∘ Λ) V and states = K̃ᵀ M V; of M and P the parts that come by way of them. Also M V."""
    times = functools.partial(multiply, sizes=sizes)
    chunk = ChunkTiles(k_ref, decay_ref, sizes)
    inverse, beta, weights, lam = inverse_ref[:, :], beta_ref[0, :], weights_ref[:, :], chunk.lam(lam_ref)
    dtype, to_end = chunk.dtype, chunk.keys_to_end()
    inner = (inverse * beta[None, :]).astype(dtype)
    weighted = chunk.weighted(weights, lam).astype(dtype)

    def of_values(place, carry):
        d_inner, d_pairs = carry
        v, do = v_ref[:, place], do_ref[:, place]
        d_written = times(to_end, d_states_ref[:, place]).astype(dtype)
        dv = times(inner, d_written, transpose_x=True) + times(weighted, do, transpose_x=True)
        dv_ref[:, place] = dv.astype(dv_ref.dtype)
        written_ref[:, place] = times(inner, v).astype(dtype)
        return d_inner + times(d_written, v, transpose_y=True), d_pairs + times(do, v, transpose_y=True)

    zeros = jnp.zeros(weighted.shape, jnp.float32)
    d_inner, d_pairs = for_columns(sizes.value_dim, of_values, (zeros, zeros))
    # Read again, rather than held in registers meanwhile.
    weights, lam, inverse = weights_ref[:, :], chunk.lam(lam_ref), inverse_ref[:, :]
    products = products_ref[:, :]
    inner = (inverse * beta_ref[0, :][None, :]).astype(dtype)
    d_lam = d_pairs * weights.astype(jnp.float32)
    for index in range(sizes.levels_inside):
        d_lam_ref[0, index, :] = jnp.sum(jnp.where(chunk.level == index, d_lam, 0.0), axis=1)
    d_weights = chunk.weighted(d_pairs, lam).astype(dtype)
    d_products_ref[:, :] = times(d_weights, inner, transpose_y=True).astype(dtype)
    d_inner_ref[:, :] = (d_inner + times(products, d_weights, transpose_x=True)).astype(dtype)


def _pair_gradients_kernel(
    k_ref,
    decay_ref,
    beta_ref,
    inverse_ref,
    products_ref,
    d_reads_ref,
    d_lost_ref,
    d_inner_ref,
    d_products_ref,
    d_similar_ref,
    d_dots_ref,
    erase_ref,
    d_erase_ref,
    d_decay_ref,
    d_beta_ref,
    *,
    sizes: ChunkSizes,
):
    """Of W = M diag(Γ₀) K, by way of D = K̃ᵀ W and reads = diag(Γ₀) Q - P W; then of M and P, and of what they are made of: K Kᵀ
    (d_similar, stored with its transpose added, as K is on both sides), Q Kᵀ (d_dots), β and decays between tokens. Also W
    itself."""
    times = functools.partial(multiply, sizes=sizes)
    chunk = ChunkTiles(k_ref, decay_ref, sizes)
    products, inverse, beta = products_ref[:, :], inverse_ref[:, :], beta_ref[0, :]
    dtype, to_end = chunk.dtype, chunk.keys_to_end()
    inner = (inverse * beta[None, :]).astype(dtype)

    def of_pairs(place, carry):
        d_inner, d_products = carry
        k, d_reads, d_lost = k_ref[:, place], d_reads_ref[:, place], d_lost_ref[:, place]
        since_start = (chunk.since_start * k).astype(dtype)
        erase = times(inner, since_start).astype(dtype)
        erase_ref[:, place] = erase
        d_erase = times(to_end, d_lost) - times(products, d_reads, transpose_x=True)
        d_erase = d_erase.astype(dtype)
        d_erase_ref[:, place] = d_erase
        d_products -= times(d_reads, erase, transpose_y=True)
        return d_inner + times(d_erase, since_start, transpose_y=True), d_products

    start = d_inner_ref[:, :].astype(jnp.float32), d_products_ref[:, :].astype(jnp.float32)
    d_inner, d_products = for_columns(sizes.key_dim, of_pairs, start)

    # M = (I + A)⁻¹ diag(β), A = diag(β) (K Kᵀ ∘ Γ) below the diagonal. What was made or read above is so again,
    # rather than held in registers meanwhile.
    chunk = ChunkTiles(k_ref, decay_ref, sizes)
    beta, inverse, products = beta_ref[0, :], inverse_ref[:, :], products_ref[:, :]
    similar = chunk.similar()
    d_system = times(inverse, (d_inner * beta[None, :]).astype(dtype), transpose_x=True).astype(dtype)
    d_system = jnp.where(chunk.level > 0, -times(d_system, inverse, transpose_y=True), 0.0)
    d_beta_ref[0, :] = jnp.sum(d_inner * inverse, axis=0) + jnp.sum(d_system * similar, axis=1)
    d_similar = beta[:, None] * d_system
    d_products = jnp.where(chunk.level >= 0, d_products, 0.0)
    d_between = d_similar * similar + jnp.where(chunk.level > 0, d_products * products, 0.0)
    d_decay_ref[0, :] = jnp.sum(d_between, axis=1) - jnp.sum(d_between, axis=0)
    of_dots = d_similar * chunk.between
    d_similar_ref[:, :] = (of_dots + jnp.transpose(of_dots)).astype(dtype)
    d_dots_ref[:, :] = (d_products * chunk.between).astype(dtype)


def _key_gradients_kernel(
    q_ref,
    k_ref,
    decay_ref,
    beta_ref,
    inverse_ref,
    d_reads_ref,
    d_lost_ref,
    d_states_ref,
    d_similar_ref,
    d_dots_ref,
    erase_ref,
    d_erase_ref,
    written_ref,
    d_between_ref,
    dq_ref,
    dk_ref,
    d_decay_ref,
    d_until_ref,
    *,
    sizes: ChunkSizes,
):
    """Of queries and keys, from those of their products and of what is read and erased. d_between: that of decays so far."""
    times = functools.partial(multiply, sizes=sizes)
    since, until = decays_of_ends(decay_ref, sizes)
    dtype = k_ref.dtype
    inner = (inverse_ref[:, :] * beta_ref[0, :][None, :]).astype(dtype)
    d_similar, d_dots, written, erase = d_similar_ref[:, :], d_dots_ref[:, :], written_ref[:, :], erase_ref[:, :]

    def of_keys(place, carry):
        d_since, d_until = carry
        loaded = load_ahead(
            lambda: d_erase_ref[:, place],
            lambda: d_states_ref[place, :],
            lambda: d_lost_ref[place, :],
            lambda: (k_ref[:, place], q_ref[:, place]),
            lambda: d_reads_ref[:, place],
        )
        d_since_start = times(inner, next(loaded), transpose_x=True)
        d_to_end = times(written, next(loaded), transpose_y=True)
        d_to_end += times(erase, next(loaded), transpose_y=True)
        k, q = next(loaded)
        d_since += jnp.sum(d_since_start * k, axis=1)
        d_until += jnp.sum(d_to_end * k, axis=1)
        dk = since * d_since_start + until * d_to_end
        dk += times(d_similar, k)
        dk += times(d_dots, q, transpose_x=True)
        dk_ref[:, place] = dk.astype(dk_ref.dtype)
        d_reads = next(loaded).astype(jnp.float32)
        dq_ref[:, place] = (since * d_reads + times(d_dots, k)).astype(dq_ref.dtype)
        return d_since + jnp.sum(d_reads * q, axis=1), d_until

    zeros = jnp.zeros((sizes.chunk,), jnp.float32)
    d_since, d_until = for_columns(sizes.key_dim, of_keys, (zeros, zeros))
    # By the logarithms of decays.
    d_decay_ref[0, :] = d_between_ref[0, :] + since[:, 0] * d_since
    d_until_ref[0, :] = d_until * until[:, 0]


def system_gradient(chunk: ChunkTiles, d_inner, inverse, beta):
    """From the gradient of M = (I + A)⁻¹ diag(β), A = diag(β) (K Kᵀ ∘ Γ) below the diagonal: those of K Kᵀ [C, C], of the
    decays since the chunk's start [C], by their logarithms, and of β [C]."""
    times = functools.partial(multiply, sizes=chunk.sizes)
    similar = chunk.similar()
    d_system = times(inverse, (d_inner * beta[None, :]).astype(chunk.dtype), transpose_x=True).astype(chunk.dtype)
    d_system = jnp.where(chunk.level > 0, -times(d_system, inverse, transpose_y=True), 0.0)
    d_beta = jnp.sum(d_inner * inverse, axis=0) + jnp.sum(d_system * similar, axis=1)
    d_similar = beta[:, None] * d_system
    d_between = d_similar * similar
    return d_similar * chunk.between, jnp.sum(d_between, axis=1) - jnp.sum(d_between, axis=0), d_beta


def _multiply_float32(x, y, sizes: ChunkSizes, **transposes):
    """In TF32, or more exactly where everything is."""
    return dot(x, y, "tf32" if sizes.precision == "bf16" else sizes.precision, sizes.interpret, **transposes)


def inverse_of(lower, sizes: ChunkSizes):
    """(I + lower)⁻¹ of a strictly lower matrix [C, C].

    By blocks D on the diagonal and the rest R: D⁻¹ and D⁻¹ R by substitution, row after row of all blocks at once, exact
    however large the elements are. Powers of the latter vanish soon. A thread has whole columns, so none waits for another.
    """
    blocks, size = sizes.chunk // MIN_TILE, MIN_TILE
    tiles = lower.reshape(blocks, size, blocks, size)
    on_diagonal = lax.broadcasted_iota(jnp.int32, tiles.shape, 0) == lax.broadcasted_iota(jnp.int32, tiles.shape, 2)
    small = jnp.transpose(jnp.sum(jnp.where(on_diagonal, tiles, 0.0), axis=2), (2, 0, 1))  # [column, block, row]
    row_of_small = lax.broadcasted_iota(jnp.int32, small.shape, 2)
    row, column = (lax.broadcasted_iota(jnp.int32, lower.shape, axis) for axis in (0, 1))
    same = row // size == column // size
    start = jnp.where(same, jnp.where(row == column, 1.0, 0.0), lower)
    start = jnp.transpose(start.reshape(blocks, size, sizes.chunk), (1, 0, 2))  # [row, block, column]
    row_of_start = lax.broadcasted_iota(jnp.int32, start.shape, 0)

    def substitute(index, solved):
        coefficients = jnp.sum(jnp.where(row_of_small == index, small, 0.0), axis=2)
        taken = jnp.sum(coefficients[:, :, None] * solved, axis=0)
        return solved - jnp.where(row_of_start == index, taken[None], 0.0)

    solved = lax.fori_loop(1, size, substitute, start)
    solved = jnp.transpose(solved, (1, 0, 2)).reshape(lower.shape)
    inverse = jnp.where(same, solved, 0.0)
    if blocks == 1:
        return inverse
    times = functools.partial(_multiply_float32, sizes=sizes)
    power = jnp.where(same, 0.0, solved)
    inverse -= times(power, inverse)
    for _ in range((blocks - 1).bit_length() - 1):
        power = times(power, power)
        inverse += times(power, inverse)
    return inverse
