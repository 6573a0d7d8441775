"""The delta rule between chunks of one state a head, with its gradient: the state is carried from chunk to chunk.

A chunk's map takes a state S before it to γ S - D S after it. Names and shapes inside, as in `delta.tree`:

  reads       [B, H, N, C, K]   what each query reads with at the start of its chunk
  decay       [B, H, N]         float32: γ of a chunk
  lost        [B, H, N, K, K]   D of it
  states      [B, H, N, K, V]   its state, from its own values alone
  before      [B, H, N, K, V]   the state at its start, from all values before
  first, last [B, H, K, V]      float32: the state before all chunks, and after them
  inside, o   [B, T, H, V]      what a token reads of its own chunk, float32; and that with what it reads of `before`
"""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.lax import PrecisionLike
from jaxtyping import Array, Float

from pallas_kernels.common.launch import HeadAxes, call, fold_mapped_axes, for_columns, pad
from pallas_kernels.delta.tiles import CARRY, CARRY_GRADIENTS, carry_columns, for_maps
from pallas_kernels.delta.tree import MapSizes, MapSpecs, map_sizes, multiply_maps


def carry_state(
    inside: Float[Array, "B T H V"],
    reads: Float[Array, "B H N C K"],
    decay: Float[Array, "B H N"],
    lost: Float[Array, "B H N K K"],
    states: Float[Array, "B H N K V"],
    first: Float[Array, "B H K V"],
    *,
    precision: PrecisionLike = None,
) -> tuple[Float[Array, "B T H V"], Float[Array, "B H K V"]]:
    """(o of every token: inside + what its query reads of the state before its chunk; the state after the last chunk).

    Args:
      inside: [B, T, H, V] float32.
      reads: [B, H, N, C, K], N = T / C, float32 or bfloat16; lost [B, H, N, K, K] and states [B, H, N, K, V] alike. C, K and
        V up to 64, or 128 in bfloat16; C a power of two ≥ 16.
      decay: [B, H, N] float32. first: [B, H, K, V] float32.
      precision: of float32 products, as in jax.lax.dot: full float32, or TF32, the GPU's default.

    Returns o [B, T, H, V] in the dtype of reads, and last [B, H, K, V] in float32. Differentiable in reverse mode, and batched
    by vmap, to any depth.

    Raises UnsupportedError where KERNELS["delta"] says why it cannot run.
    """
    sizes = map_sizes(lost, states, reads.shape[3], precision)
    key_dim, value_dim = states.shape[3:]
    keys, values = sizes.key_dim, sizes.value_dim
    out, last = _differentiable(sizes)(
        pad(inside, (3, values)),
        pad(reads, (4, keys)),
        decay,
        pad(lost, (3, keys), (4, keys)),
        pad(states, (3, keys), (4, values)),
        pad(first, (2, keys), (3, values)),
    )
    return out[..., :value_dim], last[..., :key_dim, :value_dim]


@functools.cache
def _differentiable(sizes: MapSizes):
    """The function (inside, reads, decay, lost, states, first) -> (o, last)."""
    axes = HeadAxes(sizes.heads, (2,), (2,))
    forward = fold_mapped_axes(functools.partial(_forward, sizes=sizes), heads=axes)
    backward = fold_mapped_axes(functools.partial(_backward, sizes=sizes), heads=HeadAxes(sizes.heads, (2,)))

    def keeping(*operands):
        out, last, before = forward(*operands)
        return (out, last), (*operands[1:4], before)

    apply = jax.custom_vjp(lambda *operands: keeping(*operands)[0])
    apply.defvjp(keeping, lambda kept, d: (d[0].astype(jnp.float32), *backward(*d, *kept)))
    return apply


# --- Launching ------------------------------------------------------------------------------------------------------


class _Specs(MapSpecs):
    """BlockSpecs of a grid (block of values, batch x head), each program of which goes over all chunks."""

    def __init__(self, sizes: MapSizes):
        super().__init__(sizes)
        self.columns = carry_columns(sizes.batch * sizes.heads, sizes.value_dim)

    def grid(self):
        return self.sizes.value_dim // self.columns, self.sizes.batch * self.sizes.heads

    def states(self, *chunks: int):
        """[K, columns of V] of one state, or of those of `chunks`."""
        zeros = [0] * (len(chunks) + 1)
        return pl.BlockSpec(
            (None, None, *chunks, self.sizes.key_dim, self.columns),
            lambda x, y: (y // self.sizes.heads, y % self.sizes.heads, *zeros, x),
        )

    def tokens(self):
        """[T, columns of V] of o and the like."""
        return pl.BlockSpec(
            (None, self.sizes.num_chunks * self.sizes.chunk, None, self.columns),
            lambda x, y: (y // self.sizes.heads, 0, y % self.sizes.heads, x),
        )

    def maps(self):
        """Of reads, decay and lost."""
        num, keys = self.sizes.num_chunks, self.sizes.key_dim
        return [
            self.of_sequence(num, self.sizes.chunk, keys),
            self.of_sequence(num),
            self.of_sequence(num, keys, keys),
        ]


def _forward(inside, reads, decay, lost, states, first, *, sizes: MapSizes):
    sizes = dataclasses.replace(sizes, batch=reads.shape[0], heads=reads.shape[1])
    specs = _Specs(sizes)
    of_chunks = specs.states(sizes.num_chunks)
    return call(
        functools.partial(_carry_kernel, sizes=sizes),
        "delta_carry",
        specs.grid(),
        [specs.tokens(), *specs.maps(), of_chunks, specs.states()],
        [specs.tokens(), specs.states(), of_chunks],
        [
            jax.ShapeDtypeStruct(x.shape, d)
            for x, d in ((inside, reads.dtype), (first, jnp.float32), (states, states.dtype))
        ],
        for_maps(CARRY, *sizes.tile),
        sizes.interpret,
    )(inside, reads, decay, lost, states, first)


def _backward(do, d_last, reads, decay, lost, before, *, sizes: MapSizes):
    sizes = dataclasses.replace(sizes, batch=reads.shape[0], heads=reads.shape[1])
    specs = _Specs(sizes)
    of_chunks = specs.states(sizes.num_chunks)
    d_states, d_first = call(
        functools.partial(_carry_back_kernel, sizes=sizes),
        "delta_carry_back",
        specs.grid(),
        [specs.tokens(), specs.states(), *specs.maps()],
        [of_chunks, specs.states()],
        [jax.ShapeDtypeStruct(before.shape, before.dtype), jax.ShapeDtypeStruct(d_last.shape, jnp.float32)],
        for_maps(CARRY, *sizes.tile),
        sizes.interpret,
    )(do, d_last, reads, decay, lost)

    specs = MapSpecs(sizes)
    keys, values = sizes.key_dim, sizes.value_dim
    d_reads, d_decay, d_lost = call(
        functools.partial(_map_gradients_kernel, sizes=sizes),
        "delta_map_gradients",
        (sizes.num_chunks, sizes.batch * sizes.heads),
        [specs.values(), specs.of_chunk(keys, values), specs.of_chunk(keys, values)],
        [specs.of_chunk(sizes.chunk, keys), specs.of_chunk(), specs.of_chunk(keys, keys)],
        [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in (reads, decay, lost)],
        for_maps(CARRY_GRADIENTS, *sizes.tile),
        sizes.interpret,
    )(do, before, d_states)
    return d_reads, d_decay, d_lost, d_states, d_first


# --- Kernels --------------------------------------------------------------------------------------------------------


def _tokens(chunk, sizes: MapSizes):
    return pl.ds(chunk * sizes.chunk, sizes.chunk)


def _carry_kernel(
    inside_ref,
    reads_ref,
    decay_ref,
    lost_ref,
    states_ref,
    first_ref,
    out_ref,
    last_ref,
    before_ref,
    *,
    sizes: MapSizes,
):
    def step(chunk, state):
        stored = state.astype(before_ref.dtype)
        before_ref[chunk, :, :] = stored
        tokens = _tokens(chunk, sizes)
        read = multiply_maps(reads_ref[chunk], stored, sizes)
        out_ref[tokens, :] = (inside_ref[tokens, :] + read).astype(out_ref.dtype)
        left = decay_ref[chunk] * state - multiply_maps(lost_ref[chunk], stored, sizes)
        return left + states_ref[chunk].astype(jnp.float32)

    last_ref[:, :] = lax.fori_loop(0, sizes.num_chunks, step, first_ref[:, :])


def _carry_back_kernel(
    do_ref, d_last_ref, reads_ref, decay_ref, lost_ref, d_states_ref, d_first_ref, *, sizes: MapSizes
):
    """The gradient of the state after each chunk, which is that of the chunk's own state, from the last chunk to the first."""

    def step(done, d_state):
        chunk = sizes.num_chunks - 1 - done
        stored = d_state.astype(d_states_ref.dtype)
        d_states_ref[chunk, :, :] = stored
        of_reads = multiply_maps(reads_ref[chunk], do_ref[_tokens(chunk, sizes), :], sizes, transpose_x=True)
        return decay_ref[chunk] * d_state - multiply_maps(lost_ref[chunk], stored, sizes, transpose_x=True) + of_reads

    d_first_ref[:, :] = lax.fori_loop(0, sizes.num_chunks, step, d_last_ref[:, :])


def _map_gradients_kernel(do_ref, before_ref, d_states_ref, d_reads_ref, d_decay_ref, d_lost_ref, *, sizes: MapSizes):
    """Of what a chunk reads with, and of its map, which gives the gradient of the state after it."""

    def columns(place, carry):
        d_reads, d_decay, d_lost = carry
        before, d_after = before_ref[:, place], d_states_ref[:, place]
        d_reads += multiply_maps(do_ref[:, place], before, sizes, transpose_y=True)
        d_lost -= multiply_maps(d_after, before, sizes, transpose_y=True)
        products = before.astype(jnp.float32) * d_after.astype(jnp.float32)
        return d_reads, d_decay + jnp.sum(products, axis=1), d_lost

    keys = sizes.key_dim
    zeros = tuple(jnp.zeros(shape, jnp.float32) for shape in ((sizes.chunk, keys), (keys,), (keys, keys)))
    d_reads, d_decay, d_lost = for_columns(sizes.value_dim, columns, zeros)
    d_reads_ref[:, :] = d_reads.astype(d_reads_ref.dtype)
    d_decay_ref[...] = jnp.sum(d_decay)
    d_lost_ref[:, :] = d_lost.astype(d_lost_ref.dtype)
