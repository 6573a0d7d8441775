"""The Pallas kernels of the chunkwise Fenwick scan, and the calls that launch them. Nothing here is differentiated.

Chunks of C tokens are numbered c = 0 .. N-1. Chunk c reads one state for each set bit of c: with e = c, then e & (e - 1),
and so on, state[e] sums the chunks [e - lowbit(e), e). That is a Fenwick tree: every node that is ever read is known by
its end e in 1 .. N-1, its height is the number of trailing zeros of e, and the chunks that read it are those of its right
sibling, [e, e + lowbit(e)). Inside a chunk all pairs of tokens are multiplied out, tile by tile; a chunk is one tile, or two.

Names and shapes (`Sizes` has the sizes; every axis that meets a matrix unit is a power of two ≥ 16):

  q, k        [B, T, G, K]      T = N·C
  v, do, o    [B, T, R, V]      R heads: value blocks are heads of their own, `value_blocks` of them share decay and λ
  log2_decay  [B, H, T]         float32, of each token
  lam         [B, H, L, T]      float32; L = levels inside a chunk, then one for each height of the tree
  since       [B, H, N, heights]  log2 decay from the start of c's block of 2**height chunks to the start of c: what
                                a state at that height has decayed by when chunk c starts to read it
  states      [B, R, N, K, V]   state[e], in q's dtype; e = 0 is never written nor read
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
from jax.experimental.pallas import triton

from pallas_kernels.tiles import Launch

# Cumulative decays over a tile are split at this many fractional bits: the coarse part then adds up without rounding.
COARSE = 2.0**9


@dataclasses.dataclass(frozen=True)
class Sizes:
    """Sizes of a problem as the kernels see it. Hashable: one set of kernels for each."""

    batch: int
    chunk: int  # C, tokens
    tiles: int  # tiles a chunk, 1 or 2
    num_chunks: int  # N
    groups: int  # G
    heads: int  # H
    value_blocks: int
    key_dim: int
    value_dim: int  # of one block
    dtype: str  # of q, k, v and the states
    precision: str  # "bf16", "tf32" or "f32"
    interpret: bool

    @property
    def tile(self) -> int:
        """Tokens a tile."""
        return self.chunk // self.tiles

    @property
    def length(self) -> int:
        return self.num_chunks * self.chunk

    @property
    def all_heads(self) -> int:
        """R: heads, each as often as it has value blocks."""
        return self.heads * self.value_blocks

    @property
    def group_heads(self) -> int:
        return self.all_heads // self.groups

    @property
    def heights(self) -> int:
        return (self.num_chunks - 1).bit_length()

    @property
    def levels_in_tile(self) -> int:
        return self.tile.bit_length()

    @property
    def levels_inside(self) -> int:
        return self.chunk.bit_length()

    @property
    def levels(self) -> int:
        return self.levels_inside + self.heights

    @property
    def dot_precision(self):
        """What makes lax.dot_general multiply as `precision` says: on the GPU's matrix units, also for full float32."""
        if self.precision != "f32":
            return None
        return lax.Precision.HIGHEST if self.interpret else lax.DotAlgorithmPreset.TF32_TF32_F32_X3


# --- Inside a kernel ------------------------------------------------------------------------------------------------


def _dot(x, y, sizes: Sizes, transpose_x=False, transpose_y=False):
    """x @ y in float32, either transposed."""
    contract = ((0 if transpose_x else 1,), (1 if transpose_y else 0,))
    return lax.dot_general(
        x, y, (contract, ((), ())), precision=sizes.dot_precision, preferred_element_type=jnp.float32
    )


def _lowbit(e):
    return e & -e


def _height(e):
    """Number of trailing zeros of e > 0."""
    return 31 - lax.clz(_lowbit(e))


def _cumulative(log2_decay, sizes: Sizes):
    """Inclusive cumulative sums over a tile with their totals: parts whose differences keep float32's full precision."""
    if sizes.precision == "f32":
        coarse = jnp.floor(log2_decay * COARSE) * (1 / COARSE)
        parts = (coarse, log2_decay - coarse)
    else:
        parts = (log2_decay,)
    return [(jnp.cumsum(part, axis=0), jnp.sum(part)) for part in parts]


def _since_start(cumulative):
    """log2 decay from the start of the tile to just after each token."""
    return sum(until_here for until_here, _ in cumulative)


def _until_end(cumulative):
    """log2 decay from each token to the end of the tile."""
    return jnp.minimum(sum(total - until_here for until_here, total in cumulative), 0.0)


def _total(cumulative):
    """log2 decay over the whole tile."""
    return sum(total for _, total in cumulative)


def _decay_tile(cumulative, query_axis: int):
    """Decay from key to query for each pair of a tile; 1 where the key comes later."""
    between = 0.0
    for until_here, _ in cumulative:
        by_row, by_column = until_here[:, None], until_here[None, :]
        between += by_row - by_column if query_axis == 0 else by_column - by_row
    return jnp.exp2(jnp.minimum(between, 0.0))


def _level_tile(size: int, query_axis: int):
    """Fenwick level of each (query, key) pair in a tile; -1 where the key comes later."""
    row = lax.broadcasted_iota(jnp.int32, (size, size), 0)
    column = lax.broadcasted_iota(jnp.int32, (size, size), 1)
    query, key = (row, column) if query_axis == 0 else (column, row)
    return jnp.where(query >= key, 32 - lax.clz(row ^ column), -1)


def _lam_tile(lam_ref, head, tokens, level, sizes: Sizes, query_axis: int):
    """λ of each pair's level; 0 where the key comes later."""
    tile = jnp.zeros((sizes.tile, sizes.tile), jnp.float32)
    for index in range(sizes.levels_in_tile):
        lam = lam_ref[head, index, tokens]
        tile = jnp.where(level == index, lam[:, None] if query_axis == 0 else lam[None, :], tile)
    return tile


def _suffix_sum(x):
    """Inclusive sum from each token to the end of the tile."""
    return jnp.sum(x) - jnp.cumsum(x, axis=0) + x


def _decay_head(head, launch: Launch, sizes: Sizes):
    """Which head of the block of decays and λ belongs to head `head` of the block of values."""
    return head // sizes.value_blocks if launch.heads >= sizes.value_blocks else 0


# --- Launching ------------------------------------------------------------------------------------------------------


def _call(kernel, name: str, grid, in_specs, out_specs, out_shape, launch: Launch, sizes: Sizes, aliases=None):
    return pl.pallas_call(
        kernel,
        grid=grid,
        in_specs=in_specs,
        out_specs=out_specs,
        out_shape=out_shape,
        input_output_aliases=aliases or {},
        compiler_params=triton.CompilerParams(num_warps=launch.warps, num_stages=launch.stages),
        interpret=sizes.interpret,
        name=name,
    )


class _Specs:
    """BlockSpecs of a grid (chunk or node, block of a group's heads, batch x group), with `launch.heads` heads a program.

    With whole=True a program sees all tokens or chunks of its heads, not only those of its chunk.
    """

    def __init__(self, sizes: Sizes, launch: Launch):
        self.sizes, self.launch = sizes, launch
        self.head_blocks = sizes.group_heads // launch.heads
        self.decay_heads = max(launch.heads // sizes.value_blocks, 1)

    def grid(self, first: int) -> tuple[int, int, int]:
        return first, self.head_blocks, self.sizes.batch * self.sizes.groups

    def _batch(self, z):
        return z // self.sizes.groups

    def _head_block(self, y, z):
        return (z % self.sizes.groups) * self.head_blocks + y

    def _decay_block(self, y, z):
        first = self._head_block(y, z) * self.launch.heads // self.sizes.value_blocks
        return first // self.decay_heads

    def keys(self, whole=False):
        """[tokens, K] of q or k."""
        tokens = self.sizes.length if whole else self.sizes.chunk
        return pl.BlockSpec(
            (None, tokens, None, self.sizes.key_dim),
            lambda x, y, z: (self._batch(z), 0 if whole else x, z % self.sizes.groups, 0),
        )

    def partial_keys(self):
        """[C, K] of one block of heads' part of dq or dk, [head blocks, B, T, G, K]."""
        return pl.BlockSpec(
            (None, None, self.sizes.chunk, None, self.sizes.key_dim),
            lambda x, y, z: (y, self._batch(z), x, z % self.sizes.groups, 0),
        )

    def values(self, whole=False):
        """[tokens, heads, V]."""
        tokens = self.sizes.length if whole else self.sizes.chunk
        return pl.BlockSpec(
            (None, tokens, self.launch.heads, self.sizes.value_dim),
            lambda x, y, z: (self._batch(z), 0 if whole else x, self._head_block(y, z), 0),
        )

    def decay(self, whole=False):
        """[decay heads, tokens]."""
        tokens = self.sizes.length if whole else self.sizes.chunk
        return pl.BlockSpec(
            (None, self.decay_heads, tokens),
            lambda x, y, z: (self._batch(z), self._decay_block(y, z), 0 if whole else x),
        )

    def lam(self, whole=False):
        """[decay heads, L, tokens]."""
        tokens = self.sizes.length if whole else self.sizes.chunk
        return pl.BlockSpec(
            (None, self.decay_heads, self.sizes.levels, tokens),
            lambda x, y, z: (self._batch(z), self._decay_block(y, z), 0, 0 if whole else x),
        )

    def by_chunk(self, whole=False):
        """[decay heads, heights] of since or until; [decay heads, N, heights] if whole."""
        return pl.BlockSpec(
            (None, self.decay_heads, self.sizes.num_chunks if whole else None, self.sizes.heights),
            lambda x, y, z: (self._batch(z), self._decay_block(y, z), 0 if whole else x, 0),
        )

    def states(self):
        """[heads, N, K, V]."""
        s = self.sizes
        return pl.BlockSpec(
            (None, self.launch.heads, s.num_chunks, s.key_dim, s.value_dim),
            lambda x, y, z: (self._batch(z), self._head_block(y, z), 0, 0, 0),
        )

    def per_token(self, levels: int | None = None):
        """[heads, C], or [heads, L, C], of a gradient by head."""
        if levels is None:
            return pl.BlockSpec(
                (None, self.launch.heads, self.sizes.chunk),
                lambda x, y, z: (self._batch(z), self._head_block(y, z), x),
            )
        return pl.BlockSpec(
            (None, self.launch.heads, levels, self.sizes.chunk),
            lambda x, y, z: (self._batch(z), self._head_block(y, z), 0, x),
        )

    def per_chunk(self):
        """[heads, heights] of a gradient by head."""
        return pl.BlockSpec(
            (None, self.launch.heads, None, self.sizes.heights),
            lambda x, y, z: (self._batch(z), self._head_block(y, z), x, 0),
        )


# --- States: bottom-up through the tree -----------------------------------------------------------------------------


def chunk_states(k, v, log2_decay, sizes: Sizes, launch: Launch, span: int):
    """State of every node of up to `span` chunks (a power of two), built in registers; [B, R, N, K, V].

    At the end e of a block of `span` chunks stands the state of that block, not yet joined with what comes before.
    """
    specs = _Specs(sizes, launch)
    kernel = functools.partial(_chunk_states_kernel, sizes=sizes, span=span)
    shape = (sizes.batch, sizes.all_heads, sizes.num_chunks, sizes.key_dim, sizes.value_dim)
    return _call(
        kernel,
        "chunk_states",
        specs.grid(-(-sizes.num_chunks // span)),
        [specs.keys(whole=True), specs.values(whole=True), specs.decay(whole=True)],
        specs.states(),
        jax.ShapeDtypeStruct(shape, sizes.dtype),
        launch,
        sizes,
    )(k, v, log2_decay)


def _chunk_states_kernel(k_ref, v_ref, decay_ref, states_ref, *, sizes: Sizes, span: int):
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
            log2_decay = decay_ref[0, tokens]
            until_end = _until_end(_cumulative(log2_decay, sizes))
            values = v_ref[tokens, 0, :] * jnp.exp2(until_end)[:, None]
            state = _dot(k_ref[tokens, :], values.astype(sizes.dtype), sizes, transpose_x=True)
            return state, jnp.sum(log2_decay)
        half = size // 2
        left, left_decay = build(first, half)
        store(base + first + half, left)
        right, right_decay = build(first + half, half)
        return right + jnp.exp2(right_decay) * left, left_decay + right_decay

    root, _ = build(0, span)
    store(base + span, root)


def merge_states(states, node_decay, sizes: Sizes, launch: Launch, size: int, radix: int, tile: int):
    """Joins nodes of `size` chunks into nodes of up to `size * radix`, in place. node_decay [B, H, N / size], log2."""
    elements = sizes.key_dim * sizes.value_dim
    tile = min(elements, tile)
    num_nodes = node_decay.shape[2]
    kernel = functools.partial(_merge_states_kernel, sizes=sizes, size=size, radix=radix, tile=tile)
    all_states = pl.BlockSpec(
        (None, None, sizes.num_chunks, tile), lambda x, y, z: (z // sizes.all_heads, z % sizes.all_heads, 0, x)
    )
    flat = states.reshape(*states.shape[:3], elements)
    merged = _call(
        kernel,
        "merge_states",
        (elements // tile, -(-num_nodes // radix), sizes.batch * sizes.all_heads),
        [
            all_states,
            pl.BlockSpec(
                (None, None, num_nodes),
                lambda x, y, z: (z // sizes.all_heads, z % sizes.all_heads // sizes.value_blocks, 0),
            ),
        ],
        all_states,
        jax.ShapeDtypeStruct(flat.shape, flat.dtype),
        launch,
        sizes,
        aliases={0: 0},
    )(flat, node_decay)
    return merged.reshape(states.shape)


def _merge_states_kernel(states_ref, decay_ref, merged_ref, *, sizes: Sizes, size: int, radix: int, tile: int):
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


def outputs(q, k, v, log2_decay, lam, since, states, sizes: Sizes, launch: Launch):
    """o [B, T, R, V]."""
    specs = _Specs(sizes, launch)
    in_specs = [specs.keys(), specs.keys(), specs.values(), specs.decay(), specs.lam()]
    operands = [q, k, v, log2_decay, lam]
    if sizes.heights:
        in_specs += [specs.by_chunk(), specs.states()]
        operands += [since, states]
    return _call(
        functools.partial(_outputs_kernel, sizes=sizes, launch=launch),
        "outputs",
        specs.grid(sizes.num_chunks),
        in_specs,
        specs.values(),
        jax.ShapeDtypeStruct(v.shape, sizes.dtype),
        launch,
        sizes,
    )(*operands)


def _outputs_kernel(q_ref, k_ref, v_ref, decay_ref, lam_ref, *refs, sizes: Sizes, launch: Launch):
    *tree_refs, o_ref = refs
    chunk = pl.program_id(0)
    tiles = _token_tiles(sizes)
    q, k = [q_ref[t, :] for t in tiles], [k_ref[t, :] for t in tiles]
    scores = [_dot(x, y, sizes, transpose_y=True) for x, y in zip(q, k, strict=True)]
    level = _level_tile(sizes.tile, query_axis=0)
    if sizes.tiles == 2:
        cross_scores = _dot(q[1], k[0], sizes, transpose_y=True).astype(sizes.dtype)

    def one_head(head, _):
        decay_head = _decay_head(head, launch, sizes)
        cumulative = [_cumulative(decay_ref[decay_head, t], sizes) for t in tiles]
        since_start = [_since_start(x) for x in cumulative]
        values = [v_ref[t, head, :] for t in tiles]
        out = []
        for t, tokens in enumerate(tiles):
            weights = scores[t] * _decay_tile(cumulative[t], 0)
            weights *= _lam_tile(lam_ref, decay_head, tokens, level, sizes, 0)
            out.append(_dot(weights.astype(sizes.dtype), values[t], sizes))
        if sizes.tiles == 2:
            weight = lam_ref[decay_head, sizes.levels_in_tile, tiles[1]] * jnp.exp2(since_start[1])
            decayed = (jnp.exp2(_until_end(cumulative[0]))[:, None] * values[0]).astype(sizes.dtype)
            out[1] += weight[:, None] * _dot(cross_scores, decayed, sizes)
            since_start[1] += _total(cumulative[0])
        if sizes.heights:
            since_ref, states_ref = tree_refs

            def read(_, carry):
                end, *out = carry
                height = _height(end)
                state = states_ref[head, end]
                since = since_ref[decay_head, height]
                for t, tokens in enumerate(tiles):
                    lam = lam_ref[decay_head, sizes.levels_inside + height, tokens]
                    out[t] += (lam * jnp.exp2(since + since_start[t]))[:, None] * _dot(q[t], state, sizes)
                return end & (end - 1), *out

            _, *out = lax.fori_loop(0, lax.population_count(chunk), read, (chunk, *out))
        for t, tokens in enumerate(tiles):
            o_ref[tokens, head, :] = out[t].astype(o_ref.dtype)

    _for_heads(one_head, launch.heads)


# --- Backward: states -----------------------------------------------------------------------------------------------


def read_gradients(q, do, log2_decay, lam, since, sizes: Sizes, launch: Launch):
    """Gradient of each state from the chunks that read it, [B, R, N, K, V]; e = 0 is never written."""
    specs = _Specs(sizes, launch)
    shape = (sizes.batch, sizes.all_heads, sizes.num_chunks, sizes.key_dim, sizes.value_dim)
    return _call(
        functools.partial(_read_gradients_kernel, sizes=sizes),
        "read_gradients",
        specs.grid((1 << sizes.heights) - 1),
        [
            specs.keys(whole=True),
            specs.values(whole=True),
            specs.decay(whole=True),
            specs.lam(whole=True),
            specs.by_chunk(whole=True),
        ],
        specs.states(),
        jax.ShapeDtypeStruct(shape, sizes.dtype),
        launch,
        sizes,
    )(q, do, log2_decay, lam, since)


def _read_gradients_kernel(q_ref, do_ref, decay_ref, lam_ref, since_ref, gradients_ref, *, sizes: Sizes):
    # Programs are numbered from the top of the tree down, so that those with the most chunks start first.
    number = pl.program_id(0) + 1
    depth = 31 - lax.clz(number)
    height = sizes.heights - 1 - depth
    end = (2 * (number - (1 << depth)) + 1) << height

    @pl.when(end < sizes.num_chunks)
    def _():
        def add_chunk(chunk, gradient):
            tokens = pl.ds(chunk * sizes.chunk, sizes.chunk)
            since_start = _since_start(_cumulative(decay_ref[0, tokens], sizes))
            lam = lam_ref[0, sizes.levels_inside + height, tokens]
            weight = lam * jnp.exp2(since_ref[0, chunk, height] + since_start)
            weighted = (weight[:, None] * do_ref[tokens, 0, :]).astype(sizes.dtype)
            return gradient + _dot(q_ref[tokens, :], weighted, sizes, transpose_x=True)

        readers_end = jnp.minimum(end + (1 << height), sizes.num_chunks)
        zeros = jnp.zeros((sizes.key_dim, sizes.value_dim), jnp.float32)
        gradient = lax.fori_loop(end, readers_end, add_chunk, zeros)
        gradients_ref[0, end] = gradient.astype(gradients_ref.dtype)


def spread_gradients(
    read_gradients, states, above, node_decay, sizes: Sizes, launch: Launch, size: int, radix: int, tile: int
):
    """Top-down through the tree: from gradients of nodes of size * radix chunks to those of `size` chunks.

    above: gradients of the larger nodes, [B, R, nodes, K, V]; None at the top of the tree, where they are 0.

    Returns (gradients [B, R, nodes of `size` chunks, K, V]; d_merge [B, R, the same nodes, parts of K x V] float32). d_merge
    at index e / size is the gradient of the log decay over what state[e] was joined with; where e is a multiple of
    size * radix, it is not written.
    """
    elements = sizes.key_dim * sizes.value_dim
    tile = min(elements, tile)
    num_nodes = node_decay.shape[2]

    def nodes(count):
        return pl.BlockSpec(
            (None, None, count, tile), lambda x, y, z: (z // sizes.all_heads, z % sizes.all_heads, 0, x)
        )

    def flat(x):
        return x.reshape(*x.shape[:3], elements)

    in_specs = [
        nodes(sizes.num_chunks),
        nodes(sizes.num_chunks),
        pl.BlockSpec(
            (None, None, num_nodes),
            lambda x, y, z: (z // sizes.all_heads, z % sizes.all_heads // sizes.value_blocks, 0),
        ),
    ]
    operands = [flat(read_gradients), flat(states), node_decay]
    if above is not None:
        in_specs.append(nodes(above.shape[2]))
        operands.append(flat(above))
    shape = (sizes.batch, sizes.all_heads, num_nodes)
    gradients, d_merge = _call(
        functools.partial(_spread_gradients_kernel, sizes=sizes, size=size, radix=radix, tile=tile),
        "spread_gradients",
        (elements // tile, -(-num_nodes // radix), sizes.batch * sizes.all_heads),
        in_specs,
        [
            nodes(num_nodes),
            pl.BlockSpec(
                (None, None, num_nodes, None), lambda x, y, z: (z // sizes.all_heads, z % sizes.all_heads, 0, x)
            ),
        ],
        [
            jax.ShapeDtypeStruct((*shape, elements), sizes.dtype),
            jax.ShapeDtypeStruct((*shape, elements // tile), jnp.float32),
        ],
        launch,
        sizes,
    )(*operands)
    return gradients.reshape(*shape, sizes.key_dim, sizes.value_dim), d_merge


def _spread_gradients_kernel(read_ref, states_ref, decay_ref, *refs, sizes: Sizes, size: int, radix: int, tile: int):
    *above_refs, gradients_ref, d_merge_ref = refs
    group = pl.program_id(1)
    first = group * radix
    last = decay_ref.shape[0] - 1
    decays = [decay_ref[jnp.minimum(first + index, last)] for index in range(radix)]

    def spread(start: int, count: int, gradient):
        """The gradient of `count` nodes together, from first + start, goes down to each."""
        if count == 1:

            @pl.when(first + start <= last)
            def _():
                gradients_ref[first + start, :] = gradient.astype(gradients_ref.dtype)

            return
        half = count // 2
        middle = first + start + half
        exists = middle * size < sizes.num_chunks
        end = jnp.minimum(middle * size, sizes.num_chunks - 1)
        passed_on = jnp.exp2(sum(decays[start + half : start + count])) * gradient

        @pl.when(exists)
        def _():
            d_merge_ref[middle] = jnp.sum(states_ref[end, :].astype(jnp.float32) * passed_on)

        spread(start, half, passed_on + jnp.where(exists, read_ref[end, :].astype(jnp.float32), 0.0))
        spread(start + half, half, gradient)

    top = above_refs[0][group, :].astype(jnp.float32) if above_refs else jnp.zeros((tile,), jnp.float32)
    spread(0, radix, top)


# --- Backward: tokens -----------------------------------------------------------------------------------------------


def query_gradients(q, k, v, do, log2_decay, lam, since, states, sizes: Sizes, launch: Launch):
    """What reaches queries and the weights λ.

    Returns (dq [head blocks, B, T, G, K] float32, each block of heads' part; dlam [B, R, L, T]; d_decay [B, R, T], what
    reaches the log decay of the tokens between a query and the start of its chunk, or its key if that is in the same
    tile; d_since [B, R, N, heights], only with heights).
    """
    specs = _Specs(sizes, launch)
    in_specs = [specs.keys(), specs.keys(), specs.values(), specs.values(), specs.decay(), specs.lam()]
    operands = [q, k, v, do, log2_decay, lam]
    out_specs = [specs.partial_keys(), specs.per_token(sizes.levels), specs.per_token()]
    per_head = (sizes.batch, sizes.all_heads)
    out_shape = [
        jax.ShapeDtypeStruct((specs.head_blocks, *q.shape), jnp.float32),
        jax.ShapeDtypeStruct((*per_head, sizes.levels, sizes.length), jnp.float32),
        jax.ShapeDtypeStruct((*per_head, sizes.length), jnp.float32),
    ]
    if sizes.heights:
        in_specs += [specs.by_chunk(), specs.states()]
        operands += [since, states]
        out_specs += [specs.per_chunk()]
        out_shape += [jax.ShapeDtypeStruct((*per_head, sizes.num_chunks, sizes.heights), jnp.float32)]
    return _call(
        functools.partial(_query_gradients_kernel, sizes=sizes, launch=launch),
        "query_gradients",
        specs.grid(sizes.num_chunks),
        in_specs,
        out_specs,
        out_shape,
        launch,
        sizes,
    )(*operands)


def _query_gradients_kernel(q_ref, k_ref, v_ref, do_ref, decay_ref, lam_ref, *refs, sizes: Sizes, launch: Launch):
    if sizes.heights:
        since_ref, states_ref, dq_ref, dlam_ref, d_decay_ref, d_since_ref = refs
    else:
        dq_ref, dlam_ref, d_decay_ref = refs
    chunk = pl.program_id(0)
    tiles = _token_tiles(sizes)
    q, k = [q_ref[t, :] for t in tiles], [k_ref[t, :] for t in tiles]
    scores = [_dot(x, y, sizes, transpose_y=True) for x, y in zip(q, k, strict=True)]
    level = _level_tile(sizes.tile, query_axis=0)
    if sizes.tiles == 2:
        cross_scores = _dot(q[1], k[0], sizes, transpose_y=True)

    def one_head(head, carry):
        d_scores, d_cross_scores, dq = (list(x) for x in carry)
        decay_head = _decay_head(head, launch, sizes)
        cumulative = [_cumulative(decay_ref[decay_head, t], sizes) for t in tiles]
        since_start = [_since_start(x) for x in cumulative]
        do = [do_ref[t, head, :] for t in tiles]
        values = [v_ref[t, head, :] for t in tiles]
        through_tile = []  # by query: what decays with the tokens of its own tile up to it, and after its key
        for t, tokens in enumerate(tiles):
            decayed = _dot(do[t], values[t], sizes, transpose_y=True) * _decay_tile(cumulative[t], 0)
            lam = _lam_tile(lam_ref, decay_head, tokens, level, sizes, 0)
            d_scores[t] += lam * decayed
            d_lam = scores[t] * decayed
            for index in range(sizes.levels_in_tile):
                dlam_ref[head, index, tokens] = jnp.sum(jnp.where(level == index, d_lam, 0.0), axis=1)
            through_tile.append(jnp.sum(jnp.where(level > 0, lam * d_lam, 0.0), axis=1))
        if sizes.tiles == 2:
            decay = jnp.exp2(since_start[1])
            lam = lam_ref[decay_head, sizes.levels_in_tile, tiles[1]]
            decayed = (jnp.exp2(_until_end(cumulative[0]))[:, None] * values[0]).astype(sizes.dtype)
            d_weights = _dot(do[1], decayed, sizes, transpose_y=True)
            d_cross_scores[0] += (lam * decay)[:, None] * d_weights
            d_lam = decay * jnp.sum(cross_scores * d_weights, axis=1)
            dlam_ref[head, sizes.levels_in_tile, tiles[0]] = jnp.zeros((sizes.tile,), jnp.float32)
            dlam_ref[head, sizes.levels_in_tile, tiles[1]] = d_lam
            through_tile[1] += lam * d_lam
            since_start[1] += _total(cumulative[0])
        from_before = [jnp.zeros((sizes.tile,), jnp.float32) for _ in tiles]
        if sizes.heights:

            def zero(height, _):
                @pl.when(((chunk >> height) & 1) == 0)
                def _():
                    for tokens in tiles:
                        dlam_ref[head, sizes.levels_inside + height, tokens] = jnp.zeros((sizes.tile,), jnp.float32)
                    d_since_ref[head, height] = 0.0

            lax.fori_loop(0, sizes.heights, zero, None)

            def read(_, carry):
                end, dq, from_before = carry
                dq, from_before = list(dq), list(from_before)
                height = _height(end)
                state = states_ref[head, end]
                since = since_ref[decay_head, height]
                d_since = 0.0
                for t, tokens in enumerate(tiles):
                    decay = jnp.exp2(since + since_start[t])
                    lam = lam_ref[decay_head, sizes.levels_inside + height, tokens]
                    d_lam = decay * jnp.sum(_dot(q[t], state, sizes) * do[t], axis=1)
                    dlam_ref[head, sizes.levels_inside + height, tokens] = d_lam
                    from_before[t] += lam * d_lam
                    d_since += jnp.sum(lam * d_lam)
                    weighted = ((lam * decay)[:, None] * do[t]).astype(sizes.dtype)
                    dq[t] += _dot(weighted, state, sizes, transpose_y=True)
                d_since_ref[head, height] = d_since
                return end & (end - 1), tuple(dq), tuple(from_before)

            carry = chunk, tuple(dq), tuple(from_before)
            _, dq, from_before = lax.fori_loop(0, lax.population_count(chunk), read, carry)
        for t, tokens in enumerate(tiles):
            d_decay = _suffix_sum(through_tile[t] + from_before[t])
            if t + 1 < sizes.tiles:
                d_decay += jnp.sum(from_before[t + 1])
            d_decay_ref[head, tokens] = d_decay
        return tuple(d_scores), tuple(d_cross_scores), tuple(dq)

    square = jnp.zeros((sizes.tile, sizes.tile), jnp.float32)
    zeros = jnp.zeros((sizes.tile, sizes.key_dim), jnp.float32)
    carry = (square,) * sizes.tiles, (square,) * (sizes.tiles - 1), (zeros,) * sizes.tiles
    d_scores, d_cross_scores, dq = _fold_heads(one_head, launch.heads, carry)
    for t, tokens in enumerate(tiles):
        total = dq[t] + _dot(d_scores[t].astype(sizes.dtype), k[t], sizes)
        if t == 1:
            total += _dot(d_cross_scores[0].astype(sizes.dtype), k[0], sizes)
        dq_ref[tokens, :] = total


def key_gradients(q, k, v, do, log2_decay, lam, gradients, sizes: Sizes, launch: Launch):
    """What reaches keys and values. gradients [B, R, N, K, V]: of each chunk's own state.

    Returns (dk [head blocks, B, T, G, K] float32, each block of heads' part; dv [B, T, R, V]; d_decay [B, R, T], what reaches
    the log decay of the tokens between a key and the end of its chunk, less what `query_gradients` counts too much).
    """
    specs = _Specs(sizes, launch)
    in_specs = [specs.keys(), specs.keys(), specs.values(), specs.values(), specs.decay(), specs.lam()]
    operands = [q, k, v, do, log2_decay, lam]
    if sizes.heights:
        in_specs += [specs.states()]
        operands += [gradients]
    return _call(
        functools.partial(_key_gradients_kernel, sizes=sizes, launch=launch),
        "key_gradients",
        specs.grid(sizes.num_chunks),
        in_specs,
        [specs.partial_keys(), specs.values(), specs.per_token()],
        [
            jax.ShapeDtypeStruct((specs.head_blocks, *k.shape), jnp.float32),
            jax.ShapeDtypeStruct(v.shape, sizes.dtype),
            jax.ShapeDtypeStruct((sizes.batch, sizes.all_heads, sizes.length), jnp.float32),
        ],
        launch,
        sizes,
    )(*operands)


def _key_gradients_kernel(q_ref, k_ref, v_ref, do_ref, decay_ref, lam_ref, *refs, sizes: Sizes, launch: Launch):
    *gradients_refs, dk_ref, dv_ref, d_decay_ref = refs
    chunk = pl.program_id(0)
    tiles = _token_tiles(sizes)
    q, k = [q_ref[t, :] for t in tiles], [k_ref[t, :] for t in tiles]
    # Keys are rows here, so that no tile needs to be transposed.
    scores = [_dot(x, y, sizes, transpose_y=True) for x, y in zip(k, q, strict=True)]
    level = _level_tile(sizes.tile, query_axis=1)
    if sizes.tiles == 2:
        cross_scores = _dot(k[0], q[1], sizes, transpose_y=True).astype(sizes.dtype)

    def one_head(head, carry):
        d_scores, d_cross_scores, dk = (list(x) for x in carry)
        decay_head = _decay_head(head, launch, sizes)
        cumulative = [_cumulative(decay_ref[decay_head, t], sizes) for t in tiles]
        do = [do_ref[t, head, :] for t in tiles]
        values = [v_ref[t, head, :] for t in tiles]
        dv, d_decay, kept_in_tile = [], [], []  # kept: by key, what decays with the tokens after it to its tile's end
        for t, tokens in enumerate(tiles):
            factor = _decay_tile(cumulative[t], 1) * _lam_tile(lam_ref, decay_head, tokens, level, sizes, 1)
            weights = scores[t] * factor
            d_weights = _dot(values[t], do[t], sizes, transpose_y=True)
            dv.append(_dot(weights.astype(sizes.dtype), do[t], sizes))
            d_scores[t] += factor * d_weights
            d_decay.append(-_suffix_sum(jnp.sum(jnp.where(level > 0, weights * d_weights, 0.0), axis=1)))
            kept_in_tile.append(jnp.zeros((sizes.tile,), jnp.float32))
        until_end = [_until_end(x) for x in cumulative]
        if sizes.tiles == 2:
            lam = lam_ref[decay_head, sizes.levels_in_tile, tiles[1]]
            weighted = ((lam * jnp.exp2(_since_start(cumulative[1])))[:, None] * do[1]).astype(sizes.dtype)
            decay = jnp.exp2(until_end[0])[:, None]
            from_next = decay * _dot(cross_scores, weighted, sizes)
            d_cross_scores[0] += decay * _dot(values[0], weighted, sizes, transpose_y=True)
            dv[0] += from_next
            kept_in_tile[0] += jnp.sum(from_next * values[0], axis=1)
            until_end[0] += _total(cumulative[1])
        kept_before = 0.0
        if sizes.heights:
            gradient = gradients_refs[0][head, chunk]
            for t in range(sizes.tiles):
                decay = jnp.exp2(until_end[t])[:, None]
                dk[t] += _dot((decay * values[t]).astype(sizes.dtype), gradient, sizes, transpose_y=True)
                from_later = decay * _dot(k[t], gradient, sizes)
                dv[t] += from_later
                kept = jnp.sum(from_later * values[t], axis=1)
                kept_in_tile[t] += kept
                d_decay[t] += kept_before
                kept_before += jnp.sum(kept)
        for t, tokens in enumerate(tiles):
            dv_ref[tokens, head, :] = dv[t].astype(dv_ref.dtype)
            if sizes.heights or t + 1 < sizes.tiles:
                d_decay[t] += jnp.cumsum(kept_in_tile[t], axis=0) - kept_in_tile[t]
            d_decay_ref[head, tokens] = d_decay[t]
        return tuple(d_scores), tuple(d_cross_scores), tuple(dk)

    square = jnp.zeros((sizes.tile, sizes.tile), jnp.float32)
    zeros = jnp.zeros((sizes.tile, sizes.key_dim), jnp.float32)
    carry = (square,) * sizes.tiles, (square,) * (sizes.tiles - 1), (zeros,) * sizes.tiles
    d_scores, d_cross_scores, dk = _fold_heads(one_head, launch.heads, carry)
    for t, tokens in enumerate(tiles):
        total = dk[t] + _dot(d_scores[t].astype(sizes.dtype), q[t], sizes)
        if t + 1 < sizes.tiles:
            total += _dot(d_cross_scores[0].astype(sizes.dtype), q[1], sizes)
        dk_ref[tokens, :] = total


def _token_tiles(sizes: Sizes):
    """Where each tile lies in its chunk."""
    return [pl.ds(t * sizes.tile, sizes.tile) for t in range(sizes.tiles)]


def _for_heads(body, heads: int):
    _fold_heads(lambda head, _: body(head, None), heads, None)


def _fold_heads(body, heads: int, carry):
    return body(0, carry) if heads == 1 else lax.fori_loop(0, heads, body, carry)
