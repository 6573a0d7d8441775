"""The delta rule between chunks, with its gradient: the Fenwick tree of the chunks' states, how it is built and how it is read.

A node's map takes a state S before it to γ S - D S after it. Nodes are known by their last chunk: that of the node of height i
which ends with chunk c is c, and c + 1 has i trailing zeros. Two nodes are joined where the right one stands. Nothing comes
after the last chunk, so what ends there is not joined.

Chunk c reads the state of the node that ends at e = c, which is states[e - 1], then at e & (e - 1), and so on, until e = 0. A
query that reads a node further back reads it by way of the maps of the nearer ones: r ← γ r - r D, which is done to the queries
and not to the states.

Names and shapes inside (K, V, C powers of two ≥ 16):

  reads       [B, H, N, C, K]      what each query reads with at the start of its chunk
  lam         [B, H, heights, T]   float32, of each node's height; T = N·C
  decay       [B, H, N]            float32: γ of a node
  lost        [B, H, N, K, K]      D of it
  states      [B, H, N, K, V]      its state
  inside, o   [B, T, H, V]         what a token reads of its own chunk, float32; and that with what it reads of the tree
  log2_decay  [B, H, N]            float32: log2 γ of a chunk, at least MIN_LOG2_DECAY, or NaN
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

from loglinear_jax.fenwick import highest_bit, next_end, node_height, tree_heights
from pallas_kernels.common.chunks import LOG2_E, MIN_LOG2_DECAY
from pallas_kernels.common.launch import (
    COLUMNS,
    HeadAxes,
    call,
    columns_of_block,
    dot,
    fold_mapped_axes,
    for_columns,
    pad,
)
from pallas_kernels.common.support import dot_mode, interpreting
from pallas_kernels.common.tiles import MIN_TILE, tile_for
from pallas_kernels.delta.chunks import DELTA
from pallas_kernels.delta.tiles import (
    TREE_JOIN_GRADIENTS,
    TREE_JOINS,
    TREE_NODES,
    TREE_PULLS,
    TREE_READ_GRADIENTS,
    TREE_READS,
    for_maps,
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class MapSizes:
    """Sizes of a problem as kernels over maps see it."""

    batch: int
    heads: int
    num_chunks: int
    chunk: int | None  # where it matters
    key_dim: int
    value_dim: int
    precision: str  # "bf16", "tf32" or "f32"
    interpret: bool

    @property
    def heights(self) -> int:
        return tree_heights(self.num_chunks)

    @property
    def tile(self) -> tuple[int, int, int]:
        """Of tokens of a chunk where they matter, keys and values: what a program holds at once is as large."""
        return self.chunk or MIN_TILE, self.key_dim, self.value_dim

    def nodes(self, height: int) -> int:
        """How many of this height have a gradient: those that end before the last chunk does, and the last chunk itself."""
        return (self.num_chunks - 1) >> height if height else self.num_chunks

    def pairs(self, height: int) -> int:
        """How many pairs of nodes of this height are joined: those that end before the last chunk does."""
        return (self.num_chunks - 1) >> (height + 1)


def join_tree(
    log_decay: Float[Array, "B H N"],
    lost: Float[Array, "B H N K K"],
    states: Float[Array, "B H N K V"],
    *,
    precision: PrecisionLike = None,
) -> tuple[Float[Array, "B H N"], Float[Array, "B H N K K"], Float[Array, "B H N K V"]]:
    """The nodes of the tree by their last chunk.

    Args:
      log_decay: ln γ of the chunks, [B, H, N] float32.
      lost: [B, H, N, K, K]; states: [B, H, N, K, V], float32 or bfloat16, both alike; K and V up to 64, or 128 in bfloat16.
      precision: of float32 products, as in jax.lax.dot: full float32, or TF32, the GPU's default.

    Returns decay γ, lost and states of the nodes, in the same shapes: at c of the largest node that ends with chunk c; at N - 1
    of the last chunk alone. Differentiable in reverse mode, and batched by vmap, to any depth.

    Raises UnsupportedError where KERNELS["delta"] says why it cannot run.
    """
    sizes = map_sizes(lost, states, None, precision)
    key_dim, value_dim = states.shape[3:]
    decay, lost, states = _differentiable_joins(sizes)(
        jnp.maximum(log_decay * LOG2_E, MIN_LOG2_DECAY),
        pad(lost, (3, sizes.key_dim), (4, sizes.key_dim)),
        pad(states, (3, sizes.key_dim), (4, sizes.value_dim)),
    )
    return decay, lost[..., :key_dim, :key_dim], states[..., :key_dim, :value_dim]


def read_tree(
    inside: Float[Array, "B T H V"],
    reads: Float[Array, "B H N C K"],
    lam: Float[Array, "B T H heights"],
    decay: Float[Array, "B H N"],
    lost: Float[Array, "B H N K K"],
    states: Float[Array, "B H N K V"],
    *,
    precision: PrecisionLike = None,
) -> Float[Array, "B T H V"]:
    """o of every token: inside + Σ over the states that its chunk reads of λ · (what is left of its query's reads) · state.

    Args:
      inside: [B, T, H, V] float32.
      reads: [B, H, N, C, K], N = T / C > 1, float32 or bfloat16; lost and states alike. C, K and V up to 64, or 128 in
        bfloat16; C a power of two ≥ 16.
      lam: [B, T, H, heights] float32, heights = bit_length(N - 1).
      decay, lost, states: [B, H, N], [B, H, N, K, K], [B, H, N, K, V], of `join_tree`. At N - 1 whatever.
      precision: as in `join_tree`.

    Returns o [B, T, H, V] in the dtype of reads. Differentiable in reverse mode, and batched by vmap, to any depth.

    Raises UnsupportedError where KERNELS["delta"] says why it cannot run.
    """
    sizes = map_sizes(lost, states, reads.shape[3], precision)
    out = _differentiable_reads(sizes)(*padded(inside, reads, lam, decay, lost, states, sizes))
    return out[..., : states.shape[-1]]


def padded(inside, reads, lam, decay, lost, states, sizes: MapSizes):
    """The arguments of `read_tree` as kernels take them: lam [B, H, heights, T], K and V of sizes."""
    keys, values = sizes.key_dim, sizes.value_dim
    return (
        pad(inside, (3, values)),
        pad(reads, (4, keys)),
        jnp.moveaxis(lam, 1, 3),
        decay,
        pad(lost, (3, keys), (4, keys)),
        pad(states, (3, keys), (4, values)),
    )


def map_sizes(
    lost: Float[Array, "B H N K K"], states: Float[Array, "B H N K V"], chunk: int | None, precision: PrecisionLike
) -> MapSizes:
    """Those of maps `lost` [B, H, N, K, K] and `states` [B, H, N, K, V]. Raises UnsupportedError."""
    batch, heads, num_chunks, key_dim, value_dim = states.shape
    DELTA.require(chunk or MIN_TILE, key_dim, value_dim, lost.dtype, precision)
    return MapSizes(
        batch=batch,
        heads=heads,
        num_chunks=num_chunks,
        chunk=chunk,
        key_dim=tile_for(key_dim),
        value_dim=tile_for(value_dim),
        precision=dot_mode(lost.dtype, precision),
        interpret=interpreting(),
    )


@functools.cache
def _differentiable_joins(sizes: MapSizes):
    """The function (log2_decay, lost, states) -> (decay, lost, states)."""
    axes = HeadAxes(sizes.heads)
    forward = fold_mapped_axes(functools.partial(_join, sizes=sizes), heads=axes)
    backward = fold_mapped_axes(functools.partial(_join_backward, sizes=sizes), heads=axes)

    def keeping(log2_decay, *maps):
        decay, lost, states, *lost_of_right = forward(log2_decay, *maps)
        return (decay, lost, states), (log2_decay, decay, lost, states, *lost_of_right)

    apply = jax.custom_vjp(lambda *operands: keeping(*operands)[0])
    apply.defvjp(keeping, lambda kept, d: backward(*d, *kept))
    return apply


@functools.cache
def _differentiable_reads(sizes: MapSizes):
    """The function (inside, reads, lam, decay, lost, states) -> o."""
    axes = HeadAxes(sizes.heads, (2,), (2,))
    forward = fold_mapped_axes(functools.partial(_read, sizes=sizes), heads=axes)
    backward = fold_mapped_axes(functools.partial(_read_backward, sizes=sizes), heads=HeadAxes(sizes.heads, (2,)))
    apply = jax.custom_vjp(forward)
    apply.defvjp(
        lambda *operands: (forward(*operands), operands[1:]),
        lambda operands, do: (do.astype(jnp.float32), *backward(do, *operands)),
    )
    return apply


# --- Launching ------------------------------------------------------------------------------------------------------


class MapSpecs:
    """BlockSpecs of a grid, of whose axes one is the chunk and one batch x head."""

    def __init__(self, sizes: MapSizes, chunk_axis: int = 0, sequence_axis: int = 1):
        self.sizes, self.chunk_axis, self.sequence_axis = sizes, chunk_axis, sequence_axis

    def _where(self, *ids):
        sequence = ids[self.sequence_axis]
        return ids[self.chunk_axis], sequence // self.sizes.heads, sequence % self.sizes.heads

    def of_chunk(self, *shape: int):
        """[B, H, N, ...]: those of a program's chunk."""

        def place(*ids):
            chunk, batch, head = self._where(*ids)
            return batch, head, chunk, *[0] * len(shape)

        return pl.BlockSpec((None, None, None, *shape), place)

    def of_sequence(self, *shape: int):
        """[B, H, ...]: all of a program's sequence."""
        return pl.BlockSpec((None, None, *shape), lambda *ids: (*self._where(*ids)[1:], *[0] * len(shape)))

    def of_nodes(self):
        """decay, lost and states of a sequence."""
        num, keys, values = self.sizes.num_chunks, self.sizes.key_dim, self.sizes.value_dim
        return [self.of_sequence(num), self.of_sequence(num, keys, keys), self.of_sequence(num, keys, values)]

    def lam(self):
        """[heights, C]."""

        def place(*ids):
            chunk, batch, head = self._where(*ids)
            return batch, head, 0, chunk

        return pl.BlockSpec((None, None, self.sizes.heights, self.sizes.chunk), place)

    def values(self, whole: bool = False):
        """[C, V] of o and the like; [T, V] if whole."""
        tokens = self.sizes.chunk * (self.sizes.num_chunks if whole else 1)

        def place(*ids):
            chunk, batch, head = self._where(*ids)
            return batch, 0 if whole else chunk, head, 0

        return pl.BlockSpec((None, tokens, None, self.sizes.value_dim), place)


def _run(
    kernel,
    name: str,
    grid,
    in_specs,
    out_specs,
    out_shape,
    sizes: MapSizes,
    *operands,
    launch,
    aliases=None,
):
    kernel = functools.partial(kernel, sizes=sizes)
    launch = for_maps(launch, *sizes.tile)
    return call(kernel, name, grid, in_specs, out_specs, out_shape, launch, sizes.interpret, aliases)(*operands)


# --- Joins ----------------------------------------------------------------------------------------------------------
# As in delta_chunks, what is needed next is loaded before the product that stands in front of its use.


def _join(log2_decay, lost, states, *, sizes: MapSizes):
    """(decay, lost, states, and of every height D of the right nodes)."""
    sizes = dataclasses.replace(sizes, batch=lost.shape[0], heads=lost.shape[1])
    specs = MapSpecs(sizes)
    nodes = jnp.exp2(log2_decay), lost, states
    of_right = []
    for height in range(sizes.heights):
        if not (pairs := sizes.pairs(height)):
            break
        right = jax.ShapeDtypeStruct((*lost.shape[:2], pairs, *lost.shape[3:]), lost.dtype)
        *nodes, right = _run(
            functools.partial(_join_kernel, height=height),
            "tree_joins",
            (pairs, sizes.batch * sizes.heads),
            [specs.of_sequence(sizes.num_chunks), *specs.of_nodes()],
            [*specs.of_nodes(), specs.of_chunk(sizes.key_dim, sizes.key_dim)],
            [*_like(*nodes), right],
            sizes,
            log2_decay, *nodes,
            launch=TREE_JOINS,
            aliases={1: 0, 2: 1, 3: 2},
        )  # fmt: skip
        of_right.append(right)
    return *nodes, *of_right


def _join_backward(d_decay, d_lost, d_states, log2_decay, decay, lost, states, *lost_of_right, sizes: MapSizes):
    sizes = dataclasses.replace(sizes, batch=lost.shape[0], heads=lost.shape[1])
    sequence, keys = MapSpecs(sizes, chunk_axis=1, sequence_axis=2).of_sequence, sizes.key_dim
    blocks_of_keys = keys // columns_of_block(keys)
    d_of_pairs: list[jax.Array] = []
    top = len(lost_of_right)
    from_node = d_lost[:, :, (1 << top) - 1 :][:, :, :1] if top else d_lost  # of the one node of the greatest height
    for height in reversed(range(top)):
        nodes, pairs = sizes.nodes(height), sizes.pairs(height)
        d_decay_spec = sequence(pairs, blocks_of_keys)
        d_decay_shape = jax.ShapeDtypeStruct((sizes.batch, sizes.heads, pairs, blocks_of_keys), jnp.float32)
        from_node, d_states, *d_decays = _run(
            functools.partial(_join_gradients_kernel, height=height),
            "tree_join_gradients",
            (blocks_of_keys + 2, -(-nodes // 2), sizes.batch * sizes.heads),
            [
                *(sequence(*x.shape[2:]) for x in (from_node, d_lost, d_states, log2_decay, lost, states)),
                sequence(pairs, keys, keys),
            ],
            [sequence(nodes, keys, keys), sequence(*states.shape[2:]), d_decay_spec, d_decay_spec],
            [
                jax.ShapeDtypeStruct((*lost.shape[:2], nodes, keys, keys), lost.dtype),
                *_like(states),
                d_decay_shape,
                d_decay_shape,
            ],
            sizes,
            from_node, d_lost, d_states, log2_decay, lost, states, lost_of_right[height],
            launch=TREE_JOIN_GRADIENTS,
            aliases={2: 1},
        )  # fmt: skip
        left_and_right = jnp.stack([_sum_of_blocks(x) for x in d_decays], axis=-1)
        d_of_pairs.insert(0, left_and_right.reshape(*left_and_right.shape[:2], -1))
    return _decay_gradients(d_decay * decay, d_of_pairs, sizes), from_node, d_states


def _decay_gradients(of_nodes, of_pairs, sizes: MapSizes):
    """Of log2_decay, [B, H, N]: a chunk's decay is in that of every node which holds it.

    The arguments are derivatives by ln γ. of_nodes: at their last chunk, [B, H, N]. of_pairs: for each height, of the left and
    the right node of every pair, one after the other, [B, H, 2 pairs].
    """
    num = sizes.num_chunks
    total = jnp.where(jnp.arange(num) == num - 1, of_nodes, 0.0)  # what ends last is that chunk alone
    for height in range(len(of_pairs) + 1):
        # No right node is the largest that ends where it does.
        lefts = of_nodes[..., (1 << height) - 1 : -1 : 2 << height]
        nodes = jnp.stack([lefts, jnp.zeros_like(lefts)], axis=-1).reshape(*lefts.shape[:2], -1)
        if height < len(of_pairs):
            nodes += pad(of_pairs[height], (2, nodes.shape[2]))
        total += pad(jnp.repeat(nodes, 1 << height, axis=2)[..., :num], (2, num))
    return total / LOG2_E


def _like(*arrays):
    return [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in arrays]


def _sum_of_blocks(x):
    """Sum over the last axis, of one or two blocks, as additions. XLA fuses them with what follows; a reduction would be a
    kernel of its own."""
    return functools.reduce(jnp.add, (x[..., block] for block in range(x.shape[-1])))


def _decays_of_pair(log2_decay_ref, left, height: int):
    """Of the left node, which ends with chunk `left`, and of the right one."""
    sums = (
        jnp.sum(log2_decay_ref[pl.ds(end + 1 - (1 << height), 1 << height)]) for end in (left, left + (1 << height))
    )
    return tuple(jnp.exp2(x) for x in sums)


def _trace(columns, block):
    """The part in the trace of a square matrix that its columns [K, columns of a block] have."""
    row = lax.broadcasted_iota(jnp.int32, columns.shape, 0)
    column = lax.broadcasted_iota(jnp.int32, columns.shape, 1) + block * columns.shape[1]
    return jnp.sum(jnp.where(row == column, columns, 0.0))


def _join_kernel(
    log2_decay_ref,
    _decay_ref,  # in place of which to_decay_ref is written
    lost_ref,
    states_ref,
    to_decay_ref,
    to_lost_ref,
    to_states_ref,
    of_right_ref,
    *,
    height,
    sizes: MapSizes,
):
    """Of the map of the right node after that of the left one, and of the left state by way of the right map."""
    right = ((pl.program_id(0) + 1) << (height + 1)) - 1
    left = right - (1 << height)
    left_decay, right_decay = _decays_of_pair(log2_decay_ref, left, height)
    through = lost_ref[right]
    of_right_ref[:, :] = through
    to_decay_ref[right] = left_decay * right_decay

    def join(ref, to_ref, load_own, own_decay):
        def columns(place, _):
            x, own = ref[left, :, place], load_own(place)
            joined = right_decay * x.astype(jnp.float32) - multiply_maps(through, x, sizes)
            to_ref[right, :, place] = (joined + own_decay * own.astype(jnp.float32)).astype(x.dtype)

        for_columns(ref.shape[2], columns, None)

    join(states_ref, to_states_ref, lambda place: states_ref[right, :, place], 1.0)
    # D of the right node is written over block by block: it is read where it was copied to.
    join(lost_ref, to_lost_ref, lambda place: of_right_ref[:, place], left_decay)


def _join_gradients_kernel(
    from_node_ref,
    d_lost_ref,
    d_states_ref,
    log2_decay_ref,
    lost_ref,
    states_ref,
    of_right_ref,
    to_d_lost_ref,
    to_d_states_ref,
    d_left_decay_ref,
    d_right_decay_ref,
    *,
    height: int,
    sizes: MapSizes,
):
    """From a node to both children. That of the right state is the node's, and stands there already.

    The first grid axis says which part a program has: blocks of columns of D of the right node, then D of the left one, then
    the left state. from_node: of D of the nodes of the next height. d_lost: of D by last chunk, as far as others than the node
    above have made it. A node without a parent has that alone. It is the last of its height; at height 0 it may be the last
    two.
    """
    part, pair = pl.program_id(0), pl.program_id(1)
    right = ((pair + 1) << (height + 1)) - 1
    left = right - (1 << height)
    pairs, width = of_right_ref.shape[0], columns_of_block(sizes.key_dim)
    blocks_of_keys = sizes.key_dim // width
    place = pl.ds(part * width, width)  # of D of the right node

    def to_left(d_ref, own_ref, to_ref, to, node):
        """By way of the right map, back to what it was applied to."""
        through = of_right_ref[pair]
        _, decay = _decays_of_pair(log2_decay_ref, left, height)

        def columns(place, _):
            d, own = d_ref[node, :, place], own_ref[left, :, place]
            pulled = decay * d.astype(jnp.float32) - multiply_maps(through, d, sizes, transpose_x=True)
            to_ref[to, :, place] = (own.astype(jnp.float32) + pulled).astype(d.dtype)

        for_columns(d_ref.shape[2], columns, None)

    @pl.when((part < blocks_of_keys) & (pair < pairs))
    def _of_right_map():
        left_decay, right_decay = _decays_of_pair(log2_decay_ref, left, height)
        sums = jnp.zeros((sizes.key_dim, width), jnp.float32)
        for d_ref, node, x_ref in ((d_states_ref, right, states_ref), (from_node_ref, pair, lost_ref)):

            def add(inner, sums, d_ref=d_ref, node=node, x_ref=x_ref):
                return sums + multiply_maps(d_ref[node, :, inner], x_ref[left, place, inner], sizes, transpose_y=True)

            sums = for_columns(x_ref.shape[2], add, sums)
        d_right_decay_ref[pair, part] = right_decay * _trace(sums, part)
        d = from_node_ref[pair, :, place].astype(jnp.float32)
        d_left_decay_ref[pair, part] = left_decay * jnp.sum(d * of_right_ref[pair, :, place].astype(jnp.float32))
        to_d_lost_ref[2 * pair + 1, :, place] = (left_decay * d - sums).astype(to_d_lost_ref.dtype)

    @pl.when((part == blocks_of_keys) & (pair < pairs))
    def _of_left_map():
        to_left(from_node_ref, d_lost_ref, to_d_lost_ref, 2 * pair, pair)

    @pl.when((part > blocks_of_keys) & (pair < pairs))
    def _of_left_state():
        to_left(d_states_ref, d_states_ref, to_d_states_ref, left, right)

    @pl.when((part < blocks_of_keys) & (pair == pairs) & (2 * pair + 1 < to_d_lost_ref.shape[0]))
    def _right_without_a_parent():
        to_d_lost_ref[2 * pair + 1, :, place] = d_lost_ref[right, :, place]

    @pl.when((part == blocks_of_keys) & (pair == pairs))
    def _left_without_a_parent():
        to_d_lost_ref[2 * pair, :, :] = d_lost_ref[left, :, :]


# --- Reads ----------------------------------------------------------------------------------------------------------


def _read(inside, reads, lam, decay, lost, states, *, sizes: MapSizes):
    sizes = dataclasses.replace(sizes, batch=reads.shape[0], heads=reads.shape[1])
    specs = MapSpecs(sizes)
    return _run(
        _read_kernel,
        "tree_reads",
        (sizes.num_chunks, sizes.batch * sizes.heads),
        [specs.values(), specs.of_chunk(sizes.chunk, sizes.key_dim), specs.lam(), *specs.of_nodes()],
        specs.values(),
        jax.ShapeDtypeStruct(inside.shape, reads.dtype),
        sizes,
        inside, reads, lam, decay, lost, states,
        launch=TREE_READS,
    )  # fmt: skip


def _read_backward(do, reads, lam, decay, lost, states, *, sizes: MapSizes):
    sizes = dataclasses.replace(sizes, batch=reads.shape[0], heads=reads.shape[1])
    num_sequences, dtype = sizes.batch * sizes.heads, reads.dtype
    chunks = sizes.num_chunks, num_sequences
    specs = MapSpecs(sizes)
    of_reads = specs.of_chunk(sizes.chunk, sizes.key_dim)
    by_height = sizes.heights, sizes.chunk, sizes.key_dim
    kept = jax.ShapeDtypeStruct((sizes.batch, sizes.heads, sizes.num_chunks, *by_height), dtype)
    decay_spec, lost_spec, states_spec = specs.of_nodes()
    pulled = _run(
        _pull_kernel, "tree_pulls", chunks, [of_reads, decay_spec, lost_spec], specs.of_chunk(*by_height), kept, sizes,
        reads, decay, lost, launch=TREE_PULLS,
    )  # fmt: skip
    d_reads, d_lam, d_pulled = _run(
        _gradients_kernel,
        "tree_read_gradients",
        chunks,
        [specs.values(), specs.lam(), decay_spec, lost_spec, states_spec, specs.of_chunk(*by_height)],
        [of_reads, specs.lam(), specs.of_chunk(*by_height)],
        [jax.ShapeDtypeStruct(reads.shape, dtype), jax.ShapeDtypeStruct(lam.shape, jnp.float32), kept],
        sizes,
        do, lam, decay, lost, states, pulled,
        launch=TREE_READ_GRADIENTS,
    )  # fmt: skip
    read = jnp.arange(sizes.num_chunks) >> jnp.arange(sizes.heights)[:, None] & 1 == 1
    d_lam = jnp.where(jnp.repeat(read, sizes.chunk, axis=1), d_lam, 0.0)
    blocks = _node_blocks(sizes)
    specs = MapSpecs(sizes, chunk_axis=2, sequence_axis=1)
    all_kept = specs.of_sequence(sizes.num_chunks, *by_height)
    d_decay, d_lost, d_states = _run(
        _node_gradients_kernel,
        "tree_node_gradients",
        (blocks, num_sequences, 1 << sizes.heights),
        [specs.values(whole=True), specs.of_sequence(*lam.shape[2:]), all_kept, all_kept],
        [specs.of_sequence(sizes.num_chunks, blocks), *specs.of_nodes()[1:]],
        [jax.ShapeDtypeStruct((*decay.shape, blocks), jnp.float32), *_like(lost, states)],
        sizes,
        do, lam, pulled, d_pulled,
        launch=TREE_NODES,
    )  # fmt: skip
    return d_reads, d_lam, _sum_of_blocks(d_decay), d_lost, d_states


def _node_blocks(sizes: MapSizes) -> int:
    """How many programs share a node's gradients, each with some columns of D and some of the state: COLUMNS of the wider of
    them, and at least MIN_TILE of the other."""
    return max(min(max(sizes.key_dim, sizes.value_dim) // COLUMNS, min(sizes.key_dim, sizes.value_dim) // MIN_TILE), 1)


def _pull(reads, decay, lost, sizes: MapSizes):
    """By way of a node's map."""
    return (decay * reads.astype(jnp.float32) - multiply_maps(reads, lost, sizes)).astype(reads.dtype)


def multiply_maps(x, y, sizes: MapSizes, **transposes):
    """x @ y in float32."""
    return dot(x, y, sizes.precision, sizes.interpret, **transposes)


def _read_kernel(inside_ref, reads_ref, lam_ref, decay_ref, lost_ref, states_ref, out_ref, *, sizes: MapSizes):
    chunk = pl.program_id(0)

    def read(end, reads):
        # λ times the queries, so that the product adds up in `out` itself.
        weighted_reads = (lam_ref[node_height(end), :][:, None] * reads).astype(reads.dtype)
        return multiply_maps(weighted_reads, states_ref[end - 1], sizes)

    def step(_, carry):
        end, reads, out = carry
        out += read(end, reads)
        return next_end(end), _pull(reads, decay_ref[end - 1], lost_ref[end - 1], sizes), out

    @pl.when(chunk == 0)
    def _first():
        out_ref[:, :] = inside_ref[:, :].astype(out_ref.dtype)

    @pl.when(chunk > 0)
    def _others():
        start = chunk, reads_ref[:, :], inside_ref[:, :]
        end, reads, out = lax.fori_loop(0, lax.population_count(chunk) - 1, step, start)
        out_ref[:, :] = (out + read(end, reads)).astype(out_ref.dtype)


def _pull_kernel(reads_ref, decay_ref, lost_ref, pulled_ref, *, sizes: MapSizes):
    """What a chunk reads each state with, by height."""
    chunk = pl.program_id(0)

    def pull(_, carry):
        end, reads = carry
        pulled_ref[node_height(end), :, :] = reads
        return next_end(end), _pull(reads, decay_ref[end - 1], lost_ref[end - 1], sizes)

    @pl.when(chunk > 0)
    def _pull_all():
        end, reads = lax.fori_loop(0, lax.population_count(chunk) - 1, pull, (chunk, reads_ref[:, :]))
        pulled_ref[node_height(end), :, :] = reads


def _gradients_kernel(
    do_ref,
    lam_ref,
    decay_ref,
    lost_ref,
    states_ref,
    pulled_ref,
    d_reads_ref,
    d_lam_ref,
    d_pulled_ref,
    *,
    sizes: MapSizes,
):
    """From the furthest state to the nearest. d_pulled: by height, of what is pulled through its node. Nothing is through the
    furthest: 0, as the nodes' gradients read it of every node."""
    chunk = pl.program_id(0)
    do = do_ref[:, :]

    def furthest(rest):
        """(height, end) of the furthest state of the rest."""
        height = highest_bit(rest)
        return height, (chunk >> height) << height

    def of_read(height, state):
        """The gradient of what the state is read with. Stores that of λ."""
        pulled, lam = pulled_ref[height, :, :], lam_ref[height, :]
        of_state = multiply_maps(do, state, sizes, transpose_y=True)
        d_lam_ref[height, :] = jnp.sum(of_state * pulled.astype(jnp.float32), axis=1)
        return lam[:, None] * of_state

    def step(_, carry):
        rest, d_reads = carry
        height, end = furthest(rest)
        lost, state, decay = lost_ref[end - 1], states_ref[end - 1], decay_ref[end - 1]
        stored = d_reads.astype(do.dtype)
        d_pulled_ref[height, :, :] = stored
        through = decay * d_reads - multiply_maps(stored, lost, sizes, transpose_y=True)
        return rest ^ (1 << height), through + of_read(height, state)

    zeros = jnp.zeros((sizes.chunk, sizes.key_dim), jnp.float32)

    @pl.when(chunk == 0)
    def _first():
        d_reads_ref[:, :] = zeros.astype(d_reads_ref.dtype)

    @pl.when(chunk > 0)
    def _others():
        height, end = furthest(chunk)
        d_pulled_ref[height, :, :] = zeros.astype(do.dtype)
        start = chunk ^ (1 << height), of_read(height, states_ref[end - 1])
        _, d_reads = lax.fori_loop(0, lax.population_count(chunk) - 1, step, start)
        d_reads_ref[:, :] = d_reads.astype(d_reads_ref.dtype)


def _node_gradients_kernel(
    do_ref, lam_ref, pulled_ref, d_pulled_ref, d_decay_ref, d_lost_ref, d_states_ref, *, sizes: MapSizes
):
    """Sums over the chunks that read a node, some columns of them. Nodes that most chunks read come first, so that no program
    begins late and lasts long."""
    block, rank = pl.program_id(0), pl.program_id(2)
    blocks = _node_blocks(sizes)
    keys, values = sizes.key_dim // blocks, sizes.value_dim // blocks
    of_keys, of_values = pl.ds(block * keys, keys), pl.ds(block * values, values)
    place = highest_bit(jnp.maximum(rank, 1))  # from the highest nodes down
    height = sizes.heights - 1 - place
    end = jnp.where(rank == 0, sizes.num_chunks, (2 * (rank - (1 << place)) + 1) << height)
    readers_end = jnp.minimum(end + (1 << height), sizes.num_chunks)

    def add_chunk(chunk, carry):
        d_lost, d_states = carry
        lam = lam_ref[height, pl.ds(chunk * sizes.chunk, sizes.chunk)][:, None]
        reads, d_reads = pulled_ref[chunk, height], d_pulled_ref[chunk, height, :, of_keys]
        weighted = (lam * do_ref[pl.ds(chunk * sizes.chunk, sizes.chunk), of_values]).astype(reads.dtype)
        d_lost -= multiply_maps(reads, d_reads, sizes, transpose_x=True)
        return d_lost, d_states + multiply_maps(reads, weighted, sizes, transpose_x=True)

    zeros = tuple(jnp.zeros((sizes.key_dim, columns), jnp.float32) for columns in (keys, values))
    d_lost, d_states = lax.fori_loop(end, readers_end, add_chunk, zeros)

    @pl.when(end <= sizes.num_chunks)
    def _store():
        # The sum of what is read with times its gradient is the trace of their product.
        d_decay_ref[end - 1, block] = -_trace(d_lost, block)
        d_lost_ref[end - 1, :, of_keys] = d_lost.astype(d_lost_ref.dtype)
        d_states_ref[end - 1, :, of_values] = d_states.astype(d_states_ref.dtype)
