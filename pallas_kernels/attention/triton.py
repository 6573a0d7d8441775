"""The kernels of the chunkwise Fenwick scan by the Triton lowering of Pallas, for any GPU since Ampere. Nothing here is
differentiated.

Chunks of C tokens are numbered c = 0 .. N-1. Chunk c reads one state for each set bit of c: with e = c, then e & (e - 1),
and so on, state[e] sums the chunks [e - lowbit(e), e). That is a Fenwick tree: every node that is ever read is known by
its end e in 1 .. N-1, its height is the number of trailing zeros of e, and the chunks that read it are those of its right
sibling, [e, e + lowbit(e)). Inside a chunk all pairs of tokens are multiplied out.

Names and shapes (`Sizes` has the sizes; every axis that meets a matrix unit is a power of two ≥ 16):

  q, k        [B, T, G, K]      T = N·C
  v, do, o    [B, T, R, V]      R heads: value blocks are heads of their own, `value_blocks` of them share decay and λ
  decay       [P, B, H, T]      log2 decay from the start of the token's chunk to just after it, as P parts to be added:
                                their differences keep float32's full precision, which one sum would not (see Sizes)
  lam         [B, T, H, L]      float32: λ of all levels; kernels read those inside a chunk as [B, H, levels, T]
  since       [B, H, N, heights]  log2 decay from the start of a chunk's block of 2**height chunks to the chunk; at heights
                                above the tree's from the start of the sequence
  weight      [B, H, heights, T]  float32: λ of a height, times the decay from the end of the state that the token's chunk
                                reads there to the token; 0 where it reads none
  states      [B, R, N, K, V]   state[e], in q's dtype; e = 0 is never written nor read
  initial     [B, R, upper, K, V]  states of what came before the sequence, at heights above the tree's, which all chunks
                                read where `above` [B] has a bit; both are None if nothing came before
  node_decay  [B, H, nodes]     log2 decay over each node of some number of chunks

Decays are in powers of two, the GPU's own exponential. Only differences ≤ 0 are exponentiated.
"""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jaxtyping import Array, Float, Int

from loglinear_jax.fenwick import highest_bit, next_end, node_height
from pallas_kernels.attention.tiles import Tiles
from pallas_kernels.common.chunks import (
    Sizes,
    Specs,
    decay_parts,
    decay_tile,
    decay_until_end,
    level_tile,
    multiply,
    read_decay,
    where_read,
)
from pallas_kernels.common.launch import COLUMNS, call, for_columns, pad
from pallas_kernels.common.tiles import Launch

# Arrays by the names above, in the kernels' shapes; those for Hopper have them, too.
Keys = Float[Array, "B T G K"]
Values = Float[Array, "B T R V"]
Decay = Float[Array, "P B H T"]
Lam = Float[Array, "B T H L"]
Weight = Float[Array, "B H heights T"]
NodeDecay = Float[Array, "B H n"]
Above = Int[Array, " B"]
ByToken = Float[Array, "B R T"]

PART = 32  # chunks of which a program adds what they give to a state of what came before


@dataclasses.dataclass(frozen=True, kw_only=True)
class AttentionSizes(Sizes):
    """N is a multiple of read_chunks, of which `Tiles` tells; value_dim is that of one block."""

    read_chunks: int
    value_dim: int

    @property
    def states_shape(self) -> jax.ShapeDtypeStruct:
        shape = (self.batch, self.all_heads, self.num_chunks, self.key_dim, self.value_dim)
        return jax.ShapeDtypeStruct(shape, self.dtype)


# --- Inside a kernel ------------------------------------------------------------------------------------------------


def _lam_tile(lam_ref, head, level, sizes: AttentionSizes):
    """λ of each pair's level; 0 where the key comes later."""
    tile = jnp.zeros((sizes.chunk, sizes.chunk), jnp.float32)
    for index in range(sizes.levels_inside):
        tile = jnp.where(level == index, lam_ref[head, index, :][:, None], tile)
    return tile


def _scores(q_ref, k_ref, sizes: AttentionSizes):
    """q kᵀ of all pairs. In full float32 a program has no registers for all columns of both."""

    def of_keys(place, total):
        return total + multiply(q_ref[:, place], k_ref[:, place], sizes, transpose_y=True)

    most = COLUMNS if sizes.precision == "f32" else sizes.key_dim
    return for_columns(sizes.key_dim, of_keys, jnp.zeros((sizes.chunk, sizes.chunk), jnp.float32), most)


def _decay_head(head, launch: Launch, sizes: AttentionSizes):
    """Which head of the block of decays and λ belongs to head `head` of the block of values."""
    return head // sizes.value_blocks if launch.heads >= sizes.value_blocks else 0


class Reads:
    """The states that chunks read, of the tree and of what came before, from the kernel's arguments for them."""

    def __init__(self, refs, sizes: AttentionSizes):
        refs = iter(refs)
        self.sizes = sizes
        self.states_ref = next(refs) if sizes.heights else None
        self.initial_ref, self.above_ref = (next(refs), next(refs)) if sizes.upper else (None, None)

    def for_each(self, chunk, body, carry):
        """body(height, the states' array, the place there, carry) for each state that a chunk reads."""

        def read(states_ref, first: int, bits, carry):
            def step(_, bits_and_carry):
                bits, carry = bits_and_carry
                height = node_height(bits)
                place = bits if states_ref is self.states_ref else height
                return next_end(bits), body(first + height, states_ref, place, carry)

            return lax.fori_loop(0, lax.population_count(bits), step, (bits, carry))[1]

        if self.sizes.heights:
            carry = read(self.states_ref, 0, chunk, carry)
        if self.sizes.upper:
            carry = read(self.initial_ref, self.sizes.heights, self.above_ref[...], carry)
        return carry


# --- Launching ------------------------------------------------------------------------------------------------------


class AttentionSpecs(Specs):
    """With blocks of values and states."""

    sizes: AttentionSizes

    def values(self, chunks=1):
        """[tokens, heads, V]."""
        return pl.BlockSpec(
            (None, self._tokens(chunks), self.launch.heads, self.sizes.value_dim),
            lambda x, y, z: (self._batch(z), self._block(chunks, x), self._head_block(y, z), 0),
        )

    def states(self, number: int | None = None):
        """[heads, number, K, V]; N of them if None."""
        s = self.sizes
        return pl.BlockSpec(
            (None, self.launch.heads, s.num_chunks if number is None else number, s.key_dim, s.value_dim),
            lambda x, y, z: (self._batch(z), self._head_block(y, z), 0, 0, 0),
        )

    def what_is_read(self):
        """Of the arrays of `Reads`."""
        states = [self.states()] if self.sizes.heights else []
        return states + ([self.states(self.sizes.upper), self.above()] if self.sizes.upper else [])

    def above(self):
        """That of a sequence."""
        return pl.BlockSpec((None,), lambda x, y, z: (self._batch(z),))


def _node_spec(sizes: AttentionSizes, nodes: int, elements: int | None):
    """[nodes, elements] of a grid (block of K x V, group of nodes, batch x head); None: one number for each block."""
    return pl.BlockSpec(
        (None, None, nodes, elements), lambda x, y, z: (z // sizes.all_heads, z % sizes.all_heads, 0, x)
    )


def _node_decay_spec(sizes: AttentionSizes, nodes: int):
    """[nodes] of node_decay, for the same grid."""
    return pl.BlockSpec(
        (None, None, nodes), lambda x, y, z: (z // sizes.all_heads, z % sizes.all_heads // sizes.value_blocks, 0)
    )


def laid_out(states):
    """States [..., K, V] in the kernels' layout, or back."""
    return states


# --- States: bottom-up through the tree -----------------------------------------------------------------------------


def chunk_states(
    k: Keys,
    v: Values,
    decay: Decay,
    sizes: AttentionSizes,
    tiles: Tiles,
) -> Float[Array, "B R N K V"]:
    """State of every node of up to `tiles.span` chunks, built in registers; [B, R, N, K, V].

    At the end e of a block of so many chunks stands the state of that block, not yet joined with what comes before.
    """
    launch, span = tiles.chunk_states, min(tiles.span, 1 << sizes.heights)
    specs = AttentionSpecs(sizes, launch)
    return call(
        functools.partial(_chunk_states_kernel, sizes=sizes, span=span),
        "chunk_states",
        specs.grid(-(-sizes.num_chunks // span)),
        [specs.keys(chunks=None), specs.values(chunks=None), specs.decay(chunks=None)],
        specs.states(),
        sizes.states_shape,
        launch,
        sizes.interpret,
    )(k, v, decay)


def _chunk_states_kernel(k_ref, v_ref, decay_ref, states_ref, *, sizes: AttentionSizes, span: int):
    base = pl.program_id(0) * span

    def store(end, state):
        @pl.when(end < sizes.num_chunks)
        def _():
            states_ref[0, end] = state.astype(states_ref.dtype)

    def build(first: int, size: int):
        """(state, log2 decay) of `size` chunks from base + first; stores every node inside that is read."""
        if size == 1:
            start = jnp.minimum(base + first, sizes.num_chunks - 1) * sizes.chunk
            tokens = pl.ds(start, sizes.chunk)
            parts = decay_parts(decay_ref, 0, tokens, sizes)
            last = decay_parts(decay_ref, 0, start + sizes.chunk - 1, sizes)
            values = v_ref[tokens, 0, :] * decay_until_end(parts, last)[:, None]
            return multiply(k_ref[tokens, :], values.astype(sizes.dtype), sizes, transpose_x=True), sum(last)
        half = size // 2
        left, left_decay = build(first, half)
        store(base + first + half, left)
        right, right_decay = build(first + half, half)
        return right + jnp.exp2(right_decay) * left, left_decay + right_decay

    root, _ = build(0, span)
    store(base + span, root)


def merge_states(
    states: Float[Array, "B R N K V"],
    node_decay: NodeDecay,
    sizes: AttentionSizes,
    tiles: Tiles,
    size: int,
) -> Float[Array, "B R N K V"]:
    """Joins nodes of `size` chunks into nodes of up to size * tiles.radix, in place. node_decay [B, H, N / size], log2."""
    radix, elements = tiles.radix, sizes.key_dim * sizes.value_dim
    tile = min(elements, tiles.elements)
    num_nodes = node_decay.shape[2]
    kernel = functools.partial(_merge_states_kernel, sizes=sizes, size=size, radix=radix)
    all_states = _node_spec(sizes, sizes.num_chunks, tile)
    flat = states.reshape(*states.shape[:3], elements)
    merged = call(
        kernel,
        "merge_states",
        (elements // tile, -(-num_nodes // radix), sizes.batch * sizes.all_heads),
        [
            all_states,
            _node_decay_spec(sizes, num_nodes),
        ],
        all_states,
        jax.ShapeDtypeStruct(flat.shape, flat.dtype),
        tiles.merge_states,
        sizes.interpret,
        aliases={0: 0},
    )(flat, node_decay)
    return merged.reshape(states.shape)


def _merge_states_kernel(states_ref, decay_ref, merged_ref, *, sizes: AttentionSizes, size: int, radix: int):
    del states_ref  # the same memory as merged_ref
    first = pl.program_id(1) * radix
    ends = [(first + index + 1) * size for index in range(radix)]
    nodes = [merged_ref[jnp.minimum(end, sizes.num_chunks - 1), :].astype(jnp.float32) for end in ends]
    last = decay_ref.shape[0] - 1
    decays = [decay_ref[jnp.minimum(first + index, last)] for index in range(radix)]
    step = 1
    while step < radix:
        for index in range(2 * step - 1, radix, 2 * step):
            nodes[index] += jnp.exp2(decays[index]) * nodes[index - step]
            decays[index] += decays[index - step]
        step *= 2
    for index in range(1, radix, 2):

        @pl.when(ends[index] < sizes.num_chunks)
        def _(index=index):
            merged_ref[ends[index], :] = nodes[index].astype(merged_ref.dtype)


# --- Forward --------------------------------------------------------------------------------------------------------


def _lam_by_level(lam, sizes: AttentionSizes):
    """λ [B, T, H, L] of the levels inside a chunk and of those between chunks, each [B, H, levels, T]."""
    lam = pad(lam[..., : sizes.levels], (3, sizes.levels))
    return tuple(jnp.moveaxis(part, 1, 3) for part in jnp.split(lam, [sizes.levels_inside], axis=3))


def outputs(
    q: Keys,
    k: Keys,
    v: Values,
    decay: Decay,
    lam: Lam,
    since: Float[Array, "B H N heights"] | None,
    states: Float[Array, "B R N K V"] | None,
    initial: Float[Array, "B R U K V"] | None,
    above: Above | None,
    sizes: AttentionSizes,
    tiles: Tiles,
    keep: bool,
) -> tuple[Values, Weight | None]:
    """(o [B, T, R, V]; weight). since, states and weight are None where nothing is read.

    lam [B, T, H, L]; since [B, H, N, heights]: `since_start` of the chunks' decays. keep: whether weight is wanted.
    """
    del keep
    launch = tiles.outputs
    specs = AttentionSpecs(sizes, launch)
    in_specs = [specs.keys(), specs.keys(), specs.values(), specs.decay(), specs.lam(sizes.levels_inside)]
    lam_inside, lam_between = _lam_by_level(lam, sizes)
    operands = [q, k, v, decay, lam_inside]
    weight = None
    if sizes.read_heights:
        weight = lam_between * read_decay(decay, since, above, sizes)
        in_specs += [specs.lam(sizes.read_heights), *specs.what_is_read()]
        operands += [weight, *(x for x in (states, initial, above) if x is not None)]
    out = call(
        functools.partial(_outputs_kernel, sizes=sizes, launch=launch),
        "outputs",
        specs.grid(sizes.num_chunks),
        in_specs,
        specs.values(),
        jax.ShapeDtypeStruct(v.shape, sizes.dtype),
        launch,
        sizes.interpret,
    )(*operands)
    return out, weight


def _outputs_kernel(q_ref, k_ref, v_ref, decay_ref, lam_ref, *refs, sizes: AttentionSizes, launch: Launch):
    *read_refs, o_ref = refs
    weight_ref, reads = (read_refs[0], Reads(read_refs[1:], sizes)) if sizes.read_heights else (None, None)
    chunk = pl.program_id(0)
    scores = _scores(q_ref, k_ref, sizes)
    level = level_tile(sizes.chunk)
    in_parts = sizes.precision == "f32"  # a program has no registers for all columns at once
    q = None if in_parts else q_ref[:, :]

    def of_state(states_ref, head, place):
        """What queries read of a state."""
        if not in_parts:
            return multiply(q, states_ref[head, place], sizes)

        def of_keys(keys, total):
            return total + multiply(q_ref[:, keys], states_ref[head, place, keys], sizes)

        return for_columns(sizes.key_dim, of_keys, jnp.zeros((sizes.chunk, sizes.value_dim), jnp.float32))

    def one_head(head, _):
        decay_head = _decay_head(head, launch, sizes)
        parts = decay_parts(decay_ref, decay_head, slice(None), sizes)
        weights = scores * decay_tile(parts) * _lam_tile(lam_ref, decay_head, level, sizes)
        out = multiply(weights.astype(sizes.dtype), v_ref[:, head, :], sizes)
        if sizes.read_heights:

            def read(height, states_ref, place, out):
                return out + weight_ref[decay_head, height, :][:, None] * of_state(states_ref, head, place)

            out = reads.for_each(chunk, read, out)
        o_ref[:, head, :] = out.astype(o_ref.dtype)

    _fold_heads(one_head, launch.heads, None)


# --- Backward: states -----------------------------------------------------------------------------------------------


def state_gradients(
    q: Keys,
    do: Values,
    weight: Weight,
    above: Above | None,
    sizes: AttentionSizes,
    tiles: Tiles,
) -> tuple[Float[Array, "B R N K V"] | None, Float[Array, "B R U K V"] | None]:
    """(Gradient of each state from the chunks that read it, [B, R, N, K, V], of which e = 0 is never written; that of
    `initial`, [B, R, upper, K, V] float32). Each None where there are no such states."""
    launch = tiles.state_gradients
    specs = AttentionSpecs(sizes, launch)
    in_specs = [specs.keys(chunks=None), specs.values(chunks=None)]
    gradients = of_initial = None
    if sizes.heights:
        gradients = call(
            functools.partial(_state_gradients_kernel, sizes=sizes),
            "state_gradients",
            specs.grid((1 << sizes.heights) - 1),
            [*in_specs, specs.lam(sizes.heights, chunks=None)],
            specs.states(),
            sizes.states_shape,
            launch,
            sizes.interpret,
        )(q, do, weight)
    if sizes.upper:
        parts = -(-sizes.num_chunks // PART)
        partial = pl.BlockSpec(
            (None, None, launch.heads, None, sizes.key_dim, sizes.value_dim),
            lambda x, y, z: (x % parts, *specs.batch_and_heads(y, z), x // parts, 0, 0),
        )
        shape = (parts, sizes.batch, sizes.all_heads, sizes.upper, sizes.key_dim, sizes.value_dim)
        of_initial = call(
            functools.partial(_initial_gradients_kernel, sizes=sizes, parts=parts),
            "initial_gradients",
            specs.grid(sizes.upper * parts),
            [*in_specs, specs.lam(sizes.read_heights, chunks=None), specs.above()],
            partial,
            jax.ShapeDtypeStruct(shape, jnp.float32),
            launch,
            sizes.interpret,
        )(q, do, weight, above)
        of_initial = jnp.sum(of_initial, axis=0)
    return gradients, of_initial


def _sum_over_readers(q_ref, do_ref, weight_ref, height, start, stop, sizes: AttentionSizes):
    """What the chunks from start to stop give to the state that they read at a height, [K, V]."""

    def add_chunk(chunk, gradient):
        tokens = pl.ds(chunk * sizes.chunk, sizes.chunk)
        weighted = (weight_ref[0, height, tokens][:, None] * do_ref[tokens, 0, :]).astype(sizes.dtype)
        return gradient + multiply(q_ref[tokens, :], weighted, sizes, transpose_x=True)

    return lax.fori_loop(start, stop, add_chunk, jnp.zeros((sizes.key_dim, sizes.value_dim), jnp.float32))


def _initial_gradients_kernel(
    q_ref, do_ref, weight_ref, above_ref, gradients_ref, *, sizes: AttentionSizes, parts: int
):  # fmt: skip
    upper, start = pl.program_id(0) // parts, pl.program_id(0) % parts * PART
    stop = jnp.minimum(start + (above_ref[...] >> upper & 1) * PART, sizes.num_chunks)
    gradients_ref[0, :, :] = _sum_over_readers(q_ref, do_ref, weight_ref, sizes.heights + upper, start, stop, sizes)


def _state_gradients_kernel(q_ref, do_ref, weight_ref, gradients_ref, *, sizes: AttentionSizes):
    # Programs are numbered from the top of the tree down, so that those with the most chunks start first.
    number = pl.program_id(0) + 1
    depth = highest_bit(number)
    height = sizes.heights - 1 - depth
    end = (2 * (number - (1 << depth)) + 1) << height

    @pl.when(end < sizes.num_chunks)
    def _():
        stop = jnp.minimum(end + (1 << height), sizes.num_chunks)
        gradient = _sum_over_readers(q_ref, do_ref, weight_ref, height, end, stop, sizes)
        gradients_ref[0, end] = gradient.astype(gradients_ref.dtype)


def spread_gradients(
    state_gradients: Float[Array, "B R N K V"],
    states: Float[Array, "B R N K V"],
    above: Float[Array, "B R groups K V"] | None,
    node_decay: NodeDecay,
    sizes: AttentionSizes,
    tiles: Tiles,
    size: int,
    radix: int,
) -> tuple[Float[Array, "B R n K V"], Float[Array, "B R n parts"]]:
    """Top-down through the tree: from gradients of nodes of size * radix chunks to those of `size` chunks.

    above: gradients of the larger nodes, [B, R, nodes, K, V]; None at the top of the tree, where they are 0. With size 1
    the result takes the place of `state_gradients` in memory: a program reads there what it replaces, and that first.

    Returns (gradients [B, R, nodes of `size` chunks, K, V]; d_merge [B, R, the same nodes, parts of K x V] float32). d_merge
    at index e / size is the gradient of the log decay over what state[e] was joined with; where e is a multiple of
    size * radix, it is not written.
    """
    elements = sizes.key_dim * sizes.value_dim
    tile = min(elements, tiles.elements)
    num_nodes = node_decay.shape[2]

    def flat(x):
        return x.reshape(*x.shape[:3], elements)

    all_states = _node_spec(sizes, sizes.num_chunks, tile)
    in_specs = [all_states, all_states, _node_decay_spec(sizes, num_nodes)]
    operands = [flat(state_gradients), flat(states), node_decay]
    if above is not None:
        in_specs.append(_node_spec(sizes, above.shape[2], tile))
        operands.append(flat(above))
    shape = (sizes.batch, sizes.all_heads, num_nodes)
    gradients, d_merge = call(
        functools.partial(_spread_gradients_kernel, sizes=sizes, size=size, radix=radix),
        "spread_gradients",
        (elements // tile, -(-num_nodes // radix), sizes.batch * sizes.all_heads),
        in_specs,
        [
            _node_spec(sizes, num_nodes, tile),
            _node_spec(sizes, num_nodes, None),
        ],
        [
            jax.ShapeDtypeStruct((*shape, elements), sizes.dtype),
            jax.ShapeDtypeStruct((*shape, elements // tile), jnp.float32),
        ],
        tiles.spread_gradients,
        sizes.interpret,
        aliases={0: 0} if size == 1 else None,
    )(*operands)
    return gradients.reshape(*shape, sizes.key_dim, sizes.value_dim), d_merge


def _spread_gradients_kernel(read_ref, states_ref, decay_ref, *refs, sizes: AttentionSizes, size: int, radix: int):
    *above_refs, gradients_ref, d_merge_ref = refs
    if size == 1:
        read_ref = gradients_ref  # the same memory
    group = pl.program_id(1)
    first = group * radix
    last = decay_ref.shape[0] - 1
    decays = [decay_ref[jnp.minimum(first + index, last)] for index in range(radix)]
    top = above_refs[0][group, :].astype(jnp.float32) if above_refs else jnp.zeros((read_ref.shape[1],), jnp.float32)
    # All is read before anything is written: the memory may be the same, and the reads go together.
    exists = [(first + index) * size < sizes.num_chunks for index in range(radix)]
    ends = [jnp.minimum((first + index) * size, sizes.num_chunks - 1) for index in range(radix)]
    reads, states = ([ref[end, :] for end in ends] for ref in (read_ref, states_ref))

    def spread(start: int, count: int, gradient):
        """The gradient of `count` nodes together, from first + start, goes down to each."""
        if count == 1:

            @pl.when(first + start <= last)
            def _():
                gradients_ref[first + start, :] = gradient.astype(gradients_ref.dtype)

            return
        half = count // 2
        middle = start + half
        passed_on = jnp.exp2(sum(decays[middle : start + count])) * gradient
        read = jnp.where(exists[middle], reads[middle].astype(jnp.float32), 0.0)

        @pl.when(exists[middle])
        def _():
            d_merge_ref[first + middle] = jnp.sum(states[middle].astype(jnp.float32) * passed_on)

        spread(start, half, passed_on + read)
        spread(middle, half, gradient)

    spread(0, radix, top)


# --- Backward: tokens -----------------------------------------------------------------------------------------------


def query_gradients(
    q: Keys,
    do: Values,
    weight: Weight,
    states: Float[Array, "B R N K V"] | None,
    initial: Float[Array, "B R U K V"] | None,
    above: Above | None,
    dq: Float[Array, "parts B T G K"],
    sizes: AttentionSizes,
    tiles: Tiles,
) -> tuple[Keys, Float[Array, "B R heights T"], ByToken]:
    """What reading states gives to those who read. dq: that of `chunk_gradients`.

    Returns (dq [B, T, G, K], all of it; read [B, R, read_heights, T], q·S·do for the state S read at each height, not written
    for heights of which neither the chunk nor its neighbour in an aligned pair reads one; of_reads [B, R, T], each token's
    weights as query of states, the gradient of its decay since the chunk's start).
    """
    launch, chunks = tiles.query_gradients, sizes.read_chunks
    specs = AttentionSpecs(sizes, launch)
    dq_read, read = call(
        functools.partial(_query_gradients_kernel, sizes=sizes, launch=launch, chunks=chunks),
        "query_gradients",
        specs.grid(sizes.num_chunks // chunks),
        [specs.keys(chunks), specs.values(chunks), specs.lam(sizes.read_heights, chunks), *specs.what_is_read()],
        [specs.partial_keys(chunks), specs.by_level(sizes.read_heights, chunks)],
        [
            jax.ShapeDtypeStruct((specs.head_blocks, *q.shape), jnp.float32),
            jax.ShapeDtypeStruct((sizes.batch, sizes.all_heads, sizes.read_heights, sizes.length), jnp.float32),
        ],
        launch,
        sizes.interpret,
    )(q, do, weight, *(x for x in (states, initial, above) if x is not None))
    weight = jnp.repeat(weight, sizes.value_blocks, axis=1)
    of_reads = jnp.sum(where_read(weight * read, above, sizes), axis=2)
    return (jnp.sum(dq, axis=0) + jnp.sum(dq_read, axis=0)).astype(q.dtype), read, of_reads


def _query_gradients_kernel(
    q_ref, do_ref, weight_ref, *refs, sizes: AttentionSizes, launch: Launch, chunks: int
):  # fmt: skip
    *state_refs, dq_ref, read_ref = refs
    reads = Reads(state_refs, sizes)
    # The last of the program's chunks reads every state that any of them reads; to the others it has weight 0.
    last_chunk = pl.program_id(0) * chunks + chunks - 1
    q = q_ref[:, :]

    def one_head(head, dq):
        decay_head = _decay_head(head, launch, sizes)
        do = do_ref[:, head, :]

        def read(height, states_ref, place, dq):
            to_query = multiply(do, states_ref[head, place], sizes, transpose_y=True)
            read_ref[head, height, :] = jnp.sum(q * to_query, axis=1)
            return dq + weight_ref[decay_head, height, :][:, None] * to_query

        return reads.for_each(last_chunk, read, dq)

    dq_ref[:, :] = _fold_heads(one_head, launch.heads, jnp.zeros((chunks * sizes.chunk, sizes.key_dim), jnp.float32))


def chunk_gradients(
    q: Keys,
    k: Keys,
    v: Values,
    do: Values,
    decay: Decay,
    lam: Lam,
    gradients: Float[Array, "B R N K V"] | None,
    sizes: AttentionSizes,
    tiles: Tiles,
) -> tuple[
    Float[Array, "parts B T G K"],
    Keys,
    Values,
    Float[Array, "B R inside T"],
    list[ByToken],
    ByToken | None,
]:
    """What pairs inside a chunk give, and what each chunk's own state gives to its keys and values.

    lam [B, T, H, L]; gradients [B, R, N, K, V]: of each chunk's own state, or None where there is one chunk alone.

    Returns (dq [parts, B, T, G, K] float32, parts to be added; dk [B, T, G, K]; dv [B, T, R, V]; dlam [B, R, L, T];
    of_queries, arrays [B, R, T], by their sum each token's weights as query less its weights as key, inside the chunk, which
    is the gradient of its decay since the chunk's start; of_keys [B, R, T], each token's weight as key in what later chunks
    read, the gradient of its decay until the chunk's end, or None where there is one chunk alone).
    """
    launch = tiles.chunk_gradients
    specs = AttentionSpecs(sizes, launch)
    in_specs = [
        specs.keys(),
        specs.keys(),
        specs.values(),
        specs.values(),
        specs.decay(),
        specs.lam(sizes.levels_inside),
    ]
    operands = [q, k, v, do, decay, _lam_by_level(lam, sizes)[0]]
    per_head = (sizes.batch, sizes.all_heads)
    partial = jax.ShapeDtypeStruct((specs.head_blocks, *q.shape), jnp.float32)
    by_token = jax.ShapeDtypeStruct((*per_head, sizes.length), jnp.float32)
    out_specs = [specs.partial_keys(), specs.partial_keys(), specs.values(), specs.by_level(sizes.levels_inside)]
    out_specs += [specs.by_token()]
    out_shape = [
        partial,
        partial,
        jax.ShapeDtypeStruct(v.shape, sizes.dtype),
        jax.ShapeDtypeStruct((*per_head, sizes.levels_inside, sizes.length), jnp.float32),
        by_token,
    ]
    if sizes.heights:
        in_specs += [specs.states()]
        operands += [gradients]
        out_specs += [specs.by_token()]
        out_shape += [by_token]
    dq, dk, dv, dlam, of_queries, *of_keys = call(
        functools.partial(_chunk_gradients_kernel, sizes=sizes, launch=launch),
        "chunk_gradients",
        specs.grid(sizes.num_chunks),
        in_specs,
        out_specs,
        out_shape,
        launch,
        sizes.interpret,
    )(*operands)
    return dq, jnp.sum(dk, axis=0).astype(k.dtype), dv, dlam, [of_queries], of_keys[0] if of_keys else None


def _chunk_gradients_kernel(
    q_ref, k_ref, v_ref, do_ref, decay_ref, lam_ref, *refs, sizes: AttentionSizes, launch: Launch
):
    if sizes.heights:
        gradients_ref, dq_ref, dk_ref, dv_ref, dlam_ref, of_queries_ref, of_keys_ref = refs
    else:
        dq_ref, dk_ref, dv_ref, dlam_ref, of_queries_ref = refs
    chunk = pl.program_id(0)

    def until_end_of(head):
        """Decay of each token until the chunk's end, [tokens, 1]."""
        decay_head = _decay_head(head, launch, sizes)
        parts = decay_parts(decay_ref, decay_head, slice(None), sizes)
        return decay_until_end(parts, decay_parts(decay_ref, decay_head, sizes.chunk - 1, sizes))[:, None]

    def one_head(head, d_scores):
        decay_head = _decay_head(head, launch, sizes)
        parts = decay_parts(decay_ref, decay_head, slice(None), sizes)
        lam = _lam_tile(lam_ref, decay_head, level, sizes)

        def of_values(place, total):
            return total + multiply(do_ref[:, head, place], v_ref[:, head, place], sizes, transpose_y=True)

        products = for_columns(sizes.value_dim, of_values, jnp.zeros_like(d_scores), most=32)
        decayed = decay_tile(parts)
        # No level is so high: without the selection Triton would make λ and decays twice, in two layouts.
        weights = jnp.where(level >= sizes.levels_inside, products, scores * decayed * lam)
        dv = multiply(weights.astype(sizes.dtype), do_ref[:, head, :], sizes, transpose_x=True)
        decayed *= products
        d_scores += lam * decayed
        d_lam = scores * decayed
        for index in range(sizes.levels_inside):
            dlam_ref[head, index, :] = jnp.sum(jnp.where(level == index, d_lam, 0.0), axis=1)
        # Without the diagonal, through which no decay passes, so that nothing large cancels.
        d_weights = jnp.where(level > 0, lam * d_lam, 0.0)
        of_queries_ref[head, :] = jnp.sum(d_weights, axis=1) - jnp.sum(d_weights, axis=0)
        if sizes.heights:

            def of_keys(place, total):
                return total + multiply(k_ref[:, place], gradients_ref[head, chunk, place], sizes)

            zeros = jnp.zeros((sizes.chunk, sizes.value_dim), jnp.float32)
            from_later = until_end_of(head) * for_columns(sizes.key_dim, of_keys, zeros)
            of_keys_ref[head, :] = jnp.sum(from_later * v_ref[:, head, :], axis=1)
            dv += from_later
        dv_ref[:, head, :] = dv.astype(dv_ref.dtype)
        return d_scores

    def from_later_to_keys(head, dk):
        """dk with what later chunks give to the keys by way of a head's state."""
        values = (until_end_of(head) * v_ref[:, head, :]).astype(sizes.dtype)
        return dk + multiply(values, gradients_ref[head, chunk], sizes, transpose_y=True)

    # One after the other, and few columns of an operand at once: registers do not hold more. A compiler for Ampere that finds
    # too few of them takes 32, and spills the rest.
    scores = _scores(q_ref, k_ref, sizes)
    level = level_tile(sizes.chunk)
    d_scores = _fold_heads(one_head, launch.heads, jnp.zeros((sizes.chunk, sizes.chunk), jnp.float32))
    d_scores = d_scores.astype(sizes.dtype)
    dq_ref[:, :] = multiply(d_scores, k_ref[:, :], sizes)
    dk = multiply(d_scores, q_ref[:, :], sizes, transpose_x=True)
    dk_ref[:, :] = _fold_heads(from_later_to_keys, launch.heads, dk) if sizes.heights else dk


def _fold_heads(body, heads: int, carry):
    return body(0, carry) if heads == 1 else lax.fori_loop(0, heads, body, carry)
