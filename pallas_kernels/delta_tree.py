"""The delta rule between chunks, with its gradient: the Fenwick tree of the chunks' states, how it is built and how it is read.

A node's map takes a state S before it to γ S - D S after it. Nodes are known by their last chunk: that of the node of height i
which ends with chunk c is c, and c + 1 has i trailing zeros. Two nodes are joined where the right one stands.

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
"""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels.common import call, dot, fold_mapped_axes, for_columns, pad
from pallas_kernels.delta_chunks import why_delta_unsupported
from pallas_kernels.support import UnsupportedError, dot_mode, interpreting
from pallas_kernels.tiles import MIN_TILE, TREE_JOINS, TREE_NODES, TREE_READS, for_maps, tile_for


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
        return (self.num_chunks - 1).bit_length()

    @property
    def tile(self) -> tuple[int, int, int]:
        """Of tokens of a chunk where they matter, keys and values: what a program holds at once is as large."""
        return self.chunk or MIN_TILE, self.key_dim, self.value_dim


def join_tree(decay, lost, states, *, precision=None):
    """The nodes of the tree by their last chunk.

    Args:
      decay: of the chunks, [B, H, N] float32. lost: [B, H, N, K, K]; states: [B, H, N, K, V], float32 or bfloat16, both alike;
        K and V up to 64, or 128 in bfloat16.
      precision: of float32 products, as in jax.lax.dot: full float32, or TF32, the GPU's default.

    Returns decay, lost and states of the nodes, in the same shapes: at c of the largest node that ends with chunk c.
    Differentiable in reverse mode, and batched by vmap, to any depth.

    Raises UnsupportedError where `why_delta_unsupported` gives a reason.
    """
    sizes = map_sizes(lost, states, None, precision)
    key_dim, value_dim = states.shape[3:]
    lefts, rights = [], []

    def by_last_chunk(nodes):
        if nodes.shape[-1] == 1:
            return nodes
        left, right = nodes[..., ::2], nodes[..., 1::2]
        lefts.append(left)
        rights.append(right)
        return jnp.stack([left, by_last_chunk(left * right)], axis=-1).reshape(nodes.shape)

    decay = by_last_chunk(jnp.pad(decay, ((0, 0), (0, 0), (0, (1 << sizes.heights) - sizes.num_chunks))))
    lost, states = _differentiable_joins(sizes)(
        pad(lost, (3, sizes.key_dim), (4, sizes.key_dim)),
        pad(states, (3, sizes.key_dim), (4, sizes.value_dim)),
        *lefts,
        *rights,
    )
    return decay[..., : sizes.num_chunks], lost[..., :key_dim, :key_dim], states[..., :key_dim, :value_dim]


def read_tree(inside, reads, lam, decay, lost, states, *, precision=None):
    """o of every token: inside + Σ over the states that its chunk reads of λ · (what is left of its query's reads) · state.

    Args:
      inside: [B, T, H, V] float32.
      reads: [B, H, N, C, K], N = T / C > 1, float32 or bfloat16; lost and states alike. C, K and V up to 64, or 128 in
        bfloat16; C a power of two ≥ 16.
      lam: [B, T, H, heights] float32, heights = bit_length(N - 1).
      decay, lost, states: [B, H, N], [B, H, N, K, K], [B, H, N, K, V], of `join_tree`. At N - 1 whatever.
      precision: as in `join_tree`.

    Returns o [B, T, H, V] in the dtype of reads. Differentiable in reverse mode, and batched by vmap, to any depth.

    Raises UnsupportedError where `why_delta_unsupported` gives a reason.
    """
    sizes = map_sizes(lost, states, reads.shape[3], precision)
    keys, values = sizes.key_dim, sizes.value_dim
    out = _differentiable_reads(sizes)(
        pad(inside, (3, values)),
        pad(reads, (4, keys)),
        jnp.moveaxis(lam, 1, 3),
        decay,
        pad(lost, (3, keys), (4, keys)),
        pad(states, (3, keys), (4, values)),
    )
    return out[..., : states.shape[-1]]


def map_sizes(lost, states, chunk: int | None, precision) -> MapSizes:
    """Those of maps `lost` [B, H, N, K, K] and `states` [B, H, N, K, V]. Raises UnsupportedError."""
    batch, heads, num_chunks, key_dim, value_dim = states.shape
    if reason := why_delta_unsupported(chunk or MIN_TILE, key_dim, value_dim, lost.dtype, precision):
        raise UnsupportedError(reason)
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
    """The function (lost, states, *decays of left nodes by height, *of right nodes) -> (lost, states)."""
    forward = fold_mapped_axes(functools.partial(_join, sizes=sizes))
    backward = fold_mapped_axes(functools.partial(_join_backward, sizes=sizes))

    def keeping(*operands):
        lost, states, *lost_of_right = forward(*operands)
        return (lost, states), (lost, states, *lost_of_right, *operands[2:])

    apply = jax.custom_vjp(lambda *operands: keeping(*operands)[0])
    apply.defvjp(keeping, lambda kept, d: backward(*d, *kept))
    return apply


@functools.cache
def _differentiable_reads(sizes: MapSizes):
    """The function (inside, reads, lam, decay, lost, states) -> o."""
    forward = fold_mapped_axes(functools.partial(_read, sizes=sizes))
    backward = fold_mapped_axes(functools.partial(_read_backward, sizes=sizes))
    apply = jax.custom_vjp(forward)
    apply.defvjp(
        lambda *operands: (forward(*operands), operands[1:]),
        lambda operands, do: (do.astype(jnp.float32), *backward(do, *operands)),
    )
    return apply


# --- Launching ------------------------------------------------------------------------------------------------------


class MapSpecs:
    """BlockSpecs of a grid (chunk, batch x head), or with the two the other way round."""

    def __init__(self, sizes: MapSizes, sequences_first: bool = False):
        self.sizes, self.sequences_first = sizes, sequences_first

    def _where(self, x, y):
        chunk, sequence = (y, x) if self.sequences_first else (x, y)
        return chunk, sequence // self.sizes.heads, sequence % self.sizes.heads

    def of_chunk(self, *shape: int):
        """[B, H, N, ...]: those of a program's chunk."""

        def place(x, y):
            chunk, batch, head = self._where(x, y)
            return batch, head, chunk, *[0] * len(shape)

        return pl.BlockSpec((None, None, None, *shape), place)

    def of_sequence(self, *shape: int):
        """[B, H, ...]: all of a program's sequence."""
        return pl.BlockSpec((None, None, *shape), lambda x, y: (*self._where(x, y)[1:], *[0] * len(shape)))

    def of_nodes(self):
        """decay, lost and states of a sequence."""
        num, keys, values = self.sizes.num_chunks, self.sizes.key_dim, self.sizes.value_dim
        return [self.of_sequence(num), self.of_sequence(num, keys, keys), self.of_sequence(num, keys, values)]

    def lam(self):
        """[heights, C]."""

        def place(x, y):
            chunk, batch, head = self._where(x, y)
            return batch, head, 0, chunk

        return pl.BlockSpec((None, None, self.sizes.heights, self.sizes.chunk), place)

    def values(self, whole: bool = False):
        """[C, V] of o and the like; [T, V] if whole."""
        tokens = self.sizes.chunk * (self.sizes.num_chunks if whole else 1)

        def place(x, y):
            chunk, batch, head = self._where(x, y)
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
    launch=TREE_READS,
    aliases=None,
):
    kernel = functools.partial(kernel, sizes=sizes)
    launch = for_maps(launch, *sizes.tile)
    return call(kernel, name, grid, in_specs, out_specs, out_shape, launch, sizes.interpret, aliases)(*operands)


# --- Joins ----------------------------------------------------------------------------------------------------------


def _join(lost, states, *decays, sizes: MapSizes):
    """(lost, states, and of every height D of the right nodes)."""
    sizes = dataclasses.replace(sizes, batch=lost.shape[0])
    specs, (_, lost_spec, states_spec) = MapSpecs(sizes), MapSpecs(sizes).of_nodes()
    of_right = []
    for height in range(sizes.heights):
        pairs = sizes.num_chunks >> (height + 1)
        if not pairs:
            break
        decay_spec = specs.of_sequence(decays[height].shape[2])
        lost, states, right = _run(
            functools.partial(_join_kernel, height=height),
            "tree_joins",
            (pairs, sizes.batch * sizes.heads),
            [lost_spec, states_spec, decay_spec, decay_spec],
            [lost_spec, states_spec, specs.of_chunk(sizes.key_dim, sizes.key_dim)],
            [*_like(lost, states), jax.ShapeDtypeStruct((*lost.shape[:2], pairs, *lost.shape[3:]), lost.dtype)],
            sizes,
            lost, states, decays[height], decays[sizes.heights + height],
            launch=TREE_JOINS,
            aliases={0: 0, 1: 1},
        )  # fmt: skip
        of_right.append(right)
    return lost, states, *of_right


def _join_backward(d_lost, d_states, lost, states, *rights_and_decays, sizes: MapSizes):
    sizes = dataclasses.replace(sizes, batch=lost.shape[0])
    specs, (_, lost_spec, states_spec) = MapSpecs(sizes), MapSpecs(sizes).of_nodes()
    decays = rights_and_decays[-2 * sizes.heights :]
    d_decays = [jnp.zeros_like(x) for x in decays]
    for height in reversed(range(len(rights_and_decays) - len(decays))):
        right = rights_and_decays[height]
        pairs = right.shape[2]
        decay_spec = specs.of_sequence(decays[height].shape[2])
        d_lost, d_states, *of_decays = _run(
            functools.partial(_join_gradients_kernel, height=height),
            "tree_join_gradients",
            (pairs, sizes.batch * sizes.heads),
            [lost_spec, states_spec] * 2 + [specs.of_chunk(*right.shape[3:]), decay_spec, decay_spec],
            [lost_spec, states_spec, specs.of_chunk(), specs.of_chunk()],
            [*_like(lost, states), *[jax.ShapeDtypeStruct(right.shape[:3], jnp.float32)] * 2],
            sizes,
            d_lost, d_states, lost, states, right, decays[height], decays[sizes.heights + height],
            launch=TREE_JOINS,
            aliases={0: 0, 1: 1},
        )  # fmt: skip
        for place, d_decay in zip((height, sizes.heights + height), of_decays, strict=True):
            d_decays[place] = pad(d_decay, (2, d_decays[place].shape[2]))
    return d_lost, d_states, *d_decays


def _like(*arrays):
    return [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in arrays]


def _children(height: int):
    """The number of a program's pair, and where its left and its right node stand."""
    pair = pl.program_id(0)
    right = ((pair + 1) << (height + 1)) - 1
    return pair, right - (1 << height), right


def _join_kernel(
    lost_ref,
    states_ref,
    left_decay_ref,
    right_decay_ref,
    to_lost_ref,
    to_states_ref,
    of_right_ref,
    *,
    height,
    sizes: MapSizes,
):
    """Of the map of the right node after that of the left one, and of the left state by way of the right map."""
    pair, left, right = _children(height)
    through, left_decay, right_decay = lost_ref[right], left_decay_ref[pair], right_decay_ref[pair]
    of_right_ref[:, :] = through

    def join(ref, to_ref, own_ref, own_decay):
        def columns(place, _):
            x = ref[left, :, place]
            joined = right_decay * x.astype(jnp.float32) - multiply_maps(through, x, sizes)
            own = own_ref[(right, slice(None), place)[-own_ref.ndim :]]
            to_ref[right, :, place] = (joined + own_decay * own.astype(jnp.float32)).astype(x.dtype)

        for_columns(ref.shape[2], columns, None)

    join(states_ref, to_states_ref, states_ref, 1.0)
    join(lost_ref, to_lost_ref, of_right_ref, left_decay)


def _join_gradients_kernel(
    d_lost_ref,
    d_states_ref,
    lost_ref,
    states_ref,
    of_right_ref,
    left_decay_ref,
    right_decay_ref,
    to_d_lost_ref,
    to_d_states_ref,
    d_left_decay_ref,
    d_right_decay_ref,
    *,
    height: int,
    sizes: MapSizes,
):
    """From the node that stands where its right child did to both children. That of the right state is the node's."""
    pair, left, right = _children(height)
    through, left_decay, right_decay = of_right_ref[:, :], left_decay_ref[pair], right_decay_ref[pair]

    def sum_of_products(x, y):
        return jnp.sum(x.astype(jnp.float32) * y.astype(jnp.float32), axis=0)

    def part(d_ref, ref, to_ref, carry):
        """By way of the right map, from what it was applied to; and back to the map."""

        def columns(place, carry):
            d_through, d_right_decay = carry
            d, x = d_ref[right, :, place], ref[left, :, place]
            pulled = right_decay * d.astype(jnp.float32) - multiply_maps(through, d, sizes, transpose_x=True)
            to_ref[left, :, place] = (d_ref[left, :, place].astype(jnp.float32) + pulled).astype(d.dtype)
            d_through -= multiply_maps(d, x, sizes, transpose_y=True)
            return d_through, d_right_decay + jnp.sum(sum_of_products(d, x))

        return for_columns(ref.shape[2], columns, carry)

    carry = part(d_states_ref, states_ref, to_d_states_ref, (jnp.zeros(through.shape, jnp.float32), 0.0))
    d_through, d_right_decay = part(d_lost_ref, lost_ref, to_d_lost_ref, carry)
    d = d_lost_ref[right]
    to_d_lost_ref[right, :, :] = (d_through + left_decay * d.astype(jnp.float32)).astype(d.dtype)
    d_right_decay_ref[...] = d_right_decay
    d_left_decay_ref[...] = jnp.sum(sum_of_products(d, through))


# --- Reads ----------------------------------------------------------------------------------------------------------


def _read(inside, reads, lam, decay, lost, states, *, sizes: MapSizes):
    sizes = dataclasses.replace(sizes, batch=reads.shape[0])
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
    )  # fmt: skip


def _read_backward(do, reads, lam, decay, lost, states, *, sizes: MapSizes):
    sizes = dataclasses.replace(sizes, batch=reads.shape[0])
    num_sequences, dtype = sizes.batch * sizes.heads, reads.dtype
    chunks = sizes.num_chunks, num_sequences
    specs = MapSpecs(sizes)
    of_reads = specs.of_chunk(sizes.chunk, sizes.key_dim)
    by_height = sizes.heights, sizes.chunk, sizes.key_dim
    kept = jax.ShapeDtypeStruct((sizes.batch, sizes.heads, sizes.num_chunks, *by_height), dtype)
    decay_spec, lost_spec, states_spec = specs.of_nodes()
    pulled = _run(
        _pull_kernel, "tree_pulls", chunks, [of_reads, decay_spec, lost_spec], specs.of_chunk(*by_height), kept, sizes,
        reads, decay, lost,
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
    )  # fmt: skip
    read = jnp.arange(sizes.num_chunks) >> jnp.arange(sizes.heights)[:, None] & 1 == 1
    d_lam = jnp.where(jnp.repeat(read, sizes.chunk, axis=1), d_lam, 0.0)
    specs = MapSpecs(sizes, sequences_first=True)
    all_kept = specs.of_sequence(sizes.num_chunks, *by_height)
    d_decay, d_lost, d_states = _run(
        _node_gradients_kernel,
        "tree_node_gradients",
        (num_sequences, 1 << sizes.heights),
        [specs.values(whole=True), specs.of_sequence(*lam.shape[2:]), all_kept, all_kept],
        specs.of_nodes(),
        _like(decay, lost, states),
        sizes,
        do, lam, pulled, d_pulled,
        launch=TREE_NODES,
    )  # fmt: skip
    return d_reads, d_lam, d_decay, d_lost, d_states


def _height(e):
    """Number of trailing zeros of e > 0."""
    return 31 - lax.clz(e & -e)


def _pull(reads, decay, lost, sizes: MapSizes):
    """By way of a node's map."""
    return (decay * reads.astype(jnp.float32) - multiply_maps(reads, lost, sizes)).astype(reads.dtype)


def multiply_maps(x, y, sizes: MapSizes, **transposes):
    """x @ y in float32."""
    return dot(x, y, sizes.precision, sizes.interpret, **transposes)


def _read_kernel(inside_ref, reads_ref, lam_ref, decay_ref, lost_ref, states_ref, out_ref, *, sizes: MapSizes):
    chunk = pl.program_id(0)

    def read(_, carry):
        end, reads, out = carry
        out += lam_ref[_height(end), :][:, None] * multiply_maps(reads, states_ref[end - 1], sizes)
        return end & (end - 1), _pull(reads, decay_ref[end - 1], lost_ref[end - 1], sizes), out

    start = chunk, reads_ref[:, :], inside_ref[:, :]
    _, _, out = lax.fori_loop(0, lax.population_count(chunk), read, start)
    out_ref[:, :] = out.astype(out_ref.dtype)


def _pull_kernel(reads_ref, decay_ref, lost_ref, pulled_ref, *, sizes: MapSizes):
    """What a chunk reads each state with, by height."""
    chunk = pl.program_id(0)

    def pull(_, carry):
        end, reads = carry
        pulled_ref[_height(end), :, :] = reads
        return end & (end - 1), _pull(reads, decay_ref[end - 1], lost_ref[end - 1], sizes)

    lax.fori_loop(0, lax.population_count(chunk), pull, (chunk, reads_ref[:, :]))


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
    """From the furthest state to the nearest. d_pulled: by height, of what is pulled through its node."""
    chunk = pl.program_id(0)
    do = do_ref[:, :]

    def step(_, carry):
        rest, d_reads = carry
        height = 31 - lax.clz(rest)
        end = (chunk >> height) << height
        d_pulled_ref[height, :, :] = d_reads.astype(do.dtype)
        of_state = multiply_maps(do, states_ref[end - 1], sizes, transpose_y=True)
        d_lam_ref[height, :] = jnp.sum(of_state * pulled_ref[height, :, :].astype(jnp.float32), axis=1)
        through = decay_ref[end - 1] * d_reads - multiply_maps(
            d_reads.astype(do.dtype), lost_ref[end - 1], sizes, transpose_y=True
        )
        return rest ^ (1 << height), lam_ref[height, :][:, None] * of_state + through

    zeros = jnp.zeros((sizes.chunk, sizes.key_dim), jnp.float32)
    _, d_reads = lax.fori_loop(0, lax.population_count(chunk), step, (chunk, zeros))
    d_reads_ref[:, :] = d_reads.astype(d_reads_ref.dtype)


def _node_gradients_kernel(
    do_ref, lam_ref, pulled_ref, d_pulled_ref, d_decay_ref, d_lost_ref, d_states_ref, *, sizes: MapSizes
):
    """Sums over the chunks that read a node. Nodes that most chunks read come first, so that no program begins late and
    lasts long."""
    rank = pl.program_id(1)
    place = 31 - lax.clz(jnp.maximum(rank, 1))  # from the highest nodes down
    height = sizes.heights - 1 - place
    end = jnp.where(rank == 0, sizes.num_chunks, (2 * (rank - (1 << place)) + 1) << height)
    readers_end = jnp.minimum(end + (1 << height), sizes.num_chunks)

    def add_chunk(chunk, carry):
        d_decay, d_lost, d_states = carry
        lam = lam_ref[height, pl.ds(chunk * sizes.chunk, sizes.chunk)][:, None]
        reads, d_reads = pulled_ref[chunk, height], d_pulled_ref[chunk, height]
        weighted = (lam * do_ref[pl.ds(chunk * sizes.chunk, sizes.chunk), :]).astype(reads.dtype)
        d_decay += jnp.sum(reads.astype(jnp.float32) * d_reads.astype(jnp.float32), axis=0)
        d_lost -= multiply_maps(reads, d_reads, sizes, transpose_x=True)
        return d_decay, d_lost, d_states + multiply_maps(reads, weighted, sizes, transpose_x=True)

    keys, values = sizes.key_dim, sizes.value_dim
    zeros = tuple(jnp.zeros(shape, jnp.float32) for shape in ((keys,), (keys, keys), (keys, values)))
    d_decay, d_lost, d_states = lax.fori_loop(end, readers_end, add_chunk, zeros)

    @pl.when(end <= sizes.num_chunks)
    def _store():
        d_decay_ref[end - 1] = jnp.sum(d_decay)
        d_lost_ref[end - 1, :, :] = d_lost.astype(d_lost_ref.dtype)
        d_states_ref[end - 1, :, :] = d_states.astype(d_states_ref.dtype)
