"""The chunkwise Fenwick scan's kernels for Hopper GPUs in bfloat16, by the Mosaic GPU lowering of Pallas.

Names, shapes and functions are those of `attention.triton`, with these differences. A block has 64 tokens, as many as the
matrix unit of a warpgroup takes rows; a chunk has one or two blocks, in which all pairs of tokens are multiplied out. A state
is [V, K], so that one instruction builds it. Values are not cut into blocks. λ is read as it comes, [B, T, H, L].

In most kernels one warpgroup of a program fetches, and the others multiply. What it fetches waits in a ring of slots: a barrier
says that a slot is full, another that all have used it.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.attention.hopper.tiles import HopperTiles
from pallas_kernels.attention.triton import AttentionSizes
from pallas_kernels.common.launch import pad

BLOCK = 64
TILE = plgpu.Layout.WGMMA
BY_ROW, BY_COLUMN = TILE.reduce(1), TILE.reduce(0)
F32 = jnp.float32
LEVELS_IN_BLOCK = BLOCK.bit_length()
PAIRS = (BLOCK, BLOCK)
STRIP = 8  # keys; of a tile of pairs as few as a warpgroup can have by themselves
STRIP_PAIRS = (BLOCK, STRIP)
STRIPS = BLOCK // STRIP
NEAR_LEVELS = STRIP.bit_length()
WIDE = 16
WIDE_PAIRS = (BLOCK, WIDE)
# Of the 227 KiB that a program may have; barriers, and arrays up to whole KiB, take a little.
SHARED_MEMORY = 225 * 1024


def _tiled(*shape, dtype=jnp.bfloat16):
    """Shared memory of matrices that the tensor cores or TMA read."""
    swizzle = plgpu.find_swizzle(shape[-1] * jnp.dtype(dtype).itemsize * 8)
    transforms = (plgpu.TilingTransform((8, swizzle // jnp.dtype(dtype).itemsize)), plgpu.SwizzleTransform(swizzle))
    return plgpu.SMEM(shape, dtype, transforms=transforms)


def _product(x, y, shape):
    """x y in float32; y in shared memory, x too."""

    def multiply(sum_ref):
        plgpu.wgmma(sum_ref, x, y)
        return sum_ref[...]

    # Reading the sum waits for it; the barrier keeps what uses it behind that wait.
    return lax.optimization_barrier(pl.run_scoped(multiply, plgpu.ACC(shape, F32)))


def _products(*operands):
    """Several `_product`s, in flight together."""

    def multiply(*sum_refs):
        for sum_ref, (x, y, _) in zip(sum_refs, operands, strict=True):
            plgpu.wgmma(sum_ref, x, y)
        return tuple(sum_ref[...] for sum_ref in sum_refs)

    return lax.optimization_barrier(pl.run_scoped(multiply, *(plgpu.ACC(shape, F32) for *_, shape in operands)))


def _add_products(start, factors, shape, sizes: AttentionSizes):
    """start + Σ x y over (x, y) of factors; start may be None. By an addition in the interpreter, where no sum has a start."""

    def multiply(sum_ref):
        if start is not None and not sizes.interpret:
            sum_ref[...] = start
        for x, y in factors:
            plgpu.wgmma(sum_ref, x, y)
        return sum_ref[...]

    products = lax.optimization_barrier(pl.run_scoped(multiply, plgpu.ACC(shape, F32)))
    return start + products if start is not None and sizes.interpret else products


def _add_product(sum_ref, x, y, staged):
    """sum += x y, x in registers; not waited for. By way of shared memory in the interpreter, which has no such operand."""
    if staged is None:
        plgpu.wgmma(sum_ref, x, y)
    else:
        staged[...] = x
        plgpu.commit_smem()
        plgpu.wgmma(sum_ref, staged, y)
        plgpu.wgmma_wait(0)


def _write(ref, x, sizes: AttentionSizes):
    """x into global memory. JAX 0.12 wants to be told that rows in bfloat16 may fill parts of its sectors."""
    if hasattr(plgpu, "store") and not sizes.interpret:
        plgpu.store(ref, x.astype(ref.dtype), optimized=False)
    else:
        ref[...] = x.astype(ref.dtype)


def _rows(vector, shape):
    """vector[i] for all of row i."""
    return lax.broadcast_in_dim(vector, shape, (0,))


def _columns(vector, shape):
    return lax.broadcast_in_dim(vector, shape, (1,))


def _exp2_of_decay(x):
    """exp2(min(x, 0)), NaN of NaN."""
    return jnp.exp2(jnp.where(x > 0.0, 0.0, x))


class _Pairs:
    """Pairs of a query (row) and a key (column) of a block, by strips of STRIP keys, as many as share the levels above 3 with
    each query.

    The barrier keeps what is made of the rows' numbers out of the registers of loops: an instruction makes it anew.
    """

    def __init__(self):
        self.query = lax.optimization_barrier(plgpu.broadcasted_iota(jnp.int32, (BLOCK,), 0, layout=BY_ROW))
        self.key = plgpu.broadcasted_iota(jnp.int32, STRIP_PAIRS, 1, layout=TILE)

    def near(self):
        """Where query and key are of one strip, the XOR of their numbers in it, whose highest bit is the level less one."""
        return _rows(self.query & STRIP - 1, STRIP_PAIRS) ^ self.key

    def has_bit(self, bit: int):
        """Whether the number of the query's strip has this bit, [queries]."""
        return (self.query & STRIP << bit) != 0

    def decay(self, strip: int, since_query, since_key):
        """Decay of each pair; 0 where the key comes later."""
        decay = jnp.exp2(_rows(since_query, STRIP_PAIRS) - _columns(since_key, STRIP_PAIRS))
        return jnp.where(_rows(self.query, STRIP_PAIRS) >= self.key + strip * STRIP, decay, 0.0)

    def is_before(self, strip: int):
        """Whether the key comes before the query."""
        return _rows(self.query, STRIP_PAIRS) > self.key + strip * STRIP

    def latest(self, strip: int, x, before):
        """x where the query is of this strip or a later one, else what was there before."""
        return jnp.where(_rows(self.query >= strip * STRIP, STRIP_PAIRS), x, before)

    def near_lam(self, lams):
        """lams[level] [queries] of each pair's level, where query and key are of one strip."""
        lam, near = _rows(lams[NEAR_LEVELS - 1], STRIP_PAIRS), self.near()
        for level in reversed(range(NEAR_LEVELS - 1)):
            lam = jnp.where(near < 1 << level, _rows(lams[level], STRIP_PAIRS), lam)
        return lam

    def lam(self, strip: int, near_lam, lams):
        """lams[level] [queries] of each pair's level; any where the key comes later.

        A query of a later strip is at level NEAR_LEVELS + i, where i is the highest bit in which the numbers of the two strips
        differ, and this one's has it not: there are as few levels as it has such bits.
        """
        lam = None
        for bit in reversed(_missing_bits(strip)):
            level = lams[NEAR_LEVELS + bit]
            until = (strip >> bit + 1) + 1 << bit + 1
            lam = level if lam is None else jnp.where(self.query < until * STRIP, level, lam)
        if lam is None:
            return near_lam
        return jnp.where(_rows(self.query < (strip + 1) * STRIP, STRIP_PAIRS), near_lam, _rows(lam, STRIP_PAIRS))


def _missing_bits(strip: int) -> list[int]:
    return [bit for bit in range((STRIPS - 1).bit_length()) if not strip >> bit & 1]


class _LevelSums:
    """Sums of pairs over the keys of a block, by level, if pairs are 0 where the key comes later.

    They are added strip after strip. A strip has one level for each query, but for queries in it. Those of a level beyond
    strips have a bit in their strip's number that the keys' strips have not, and are next to each other: where they begin,
    the sum of the level starts anew. What is found for queries without the bit is none.
    """

    def __init__(self):
        self.by_bit, self.odd = [None] * (STRIPS - 1).bit_length(), None

    def add(self, strip: int, pairs: _Pairs, x):
        """x [queries, STRIP]"""

        def latest(before):
            return x if before is None else pairs.latest(strip, x, before)

        if strip & 1:
            self.odd = latest(self.odd)
        for bit in _missing_bits(strip):
            starts = strip & (2 << bit) - 1 == 0
            self.by_bit[bit] = latest(self.by_bit[bit]) if starts else self.by_bit[bit] + x

    def keep(self, *others):
        """A barrier for the sums and others, which it returns; what comes later is not computed before it."""
        sums = [x for x in (*self.by_bit, self.odd) if x is not None]
        found = iter(lax.optimization_barrier((*sums, *others)))
        self.by_bit = [None if x is None else next(found) for x in self.by_bit]
        self.odd = None if self.odd is None else next(found)
        return tuple(found)

    def own_strip(self, pairs: _Pairs):
        """Of the pairs in the query's own strip, [queries, STRIP]."""
        return jnp.where(_rows(pairs.has_bit(0), STRIP_PAIRS), self.odd, self.by_bit[0])

    def sums(self, pairs: _Pairs) -> list:
        """[queries] of each level."""
        own, distance = self.own_strip(pairs), pairs.near()
        near = [jnp.sum(_of_level(own, distance, level), axis=1) for level in range(NEAR_LEVELS)]
        far = [jnp.where(pairs.has_bit(bit), jnp.sum(x, axis=1), 0.0) for bit, x in enumerate(self.by_bit)]
        return near + far


def _of_level(x, distance, level: int):
    """x where the highest bit of distance says this level, counted from 0; else 0."""
    is_level = distance == 0 if level == 0 else lax.shift_right_logical(distance, level - 1) == 1
    return jnp.where(is_level, x, 0.0)


def _columns_of(tile, number: int, columns: int):
    return tile[:, number * columns : (number + 1) * columns]


def _diagonal(tile):
    """[queries], of a tile of all pairs of a block."""
    pairs, own_strip = _Pairs(), _columns_of(tile, 0, STRIP)
    for strip in range(1, STRIPS):
        own_strip = pairs.latest(strip, _columns_of(tile, strip, STRIP), own_strip)
    return jnp.sum(_of_level(own_strip, pairs.near(), 0), axis=1)


def _slots(fixed: int, slot: int, most: int) -> int:
    """How many slots of a ring, or other parts of this size, shared memory has beside what takes `fixed` bytes."""
    return max(min((SHARED_MEMORY - fixed) // slot, most), 1)  # one has room in every shape that the kernels take


def _call(
    body, name: str, grid: dict, out_type, scratch: dict, sizes: AttentionSizes, warpgroups: int = 1, column_sums=0
):
    """The kernel. grid: sizes by name, the last changes fastest. warpgroups: of a program, by the name "worker"; of several,
    the body itself has to put a barrier, `commit_smem`, wherever threads use shared memory after others of their warpgroup.
    column_sums: bytes of shared memory for them."""
    return plgpu.kernel(
        body,
        out_type=out_type,
        scratch_types=scratch,
        grid=tuple(grid.values()),
        grid_names=tuple(grid),
        num_threads=warpgroups if warpgroups > 1 else None,
        thread_name="worker" if warpgroups > 1 else None,
        compiler_params=plgpu.CompilerParams(
            approx_math=True,
            lowering_semantics=plgpu.LoweringSemantics.Lane,
            reduction_scratch_bytes=column_sums,
            unsafe_no_auto_barriers=warpgroups > 1,
        ),
        interpret=plgpu.InterpretGPUParams(detect_races=True) if sizes.interpret else None,
        kernel_name=f"hopper_{name}",
    )


def _limit_registers(number: int, action: str, sizes: AttentionSizes):
    """Of each thread of this warpgroup, as those that only fetch need few; the interpreter has no registers."""
    if not sizes.interpret:
        plgpu.set_max_registers(number, action=action)


class _Heads:
    """The heads of a program, `number` of them from `first` on: of one group, or, if each head has keys of its own, of several.

    axes: of the grid, those that tell which heads a program has; `sequence`, `first`, `part` and `group` read them.
    """

    def __init__(self, sizes: AttentionSizes, number: int):
        self.number, self.sizes = number, sizes
        self.own_keys = sizes.group_heads == 1 and number > 1

    @property
    def axes(self) -> dict[str, int]:
        sizes = self.sizes
        if self.own_keys:
            return dict(sequence=sizes.batch, block=sizes.heads // self.number)
        return dict(sequence=sizes.batch * sizes.groups, block=sizes.group_heads // self.number)

    @property
    def parts(self) -> int:
        """How many programs have heads of the same group, and so a part of dq and dk each."""
        return 1 if self.own_keys else self.axes["block"]

    @property
    def part(self):
        return 0 if self.own_keys else lax.axis_index("block")

    @property
    def sequence(self):
        z = lax.axis_index("sequence")
        return z if self.own_keys else lax.div(z, self.sizes.groups)

    @property
    def first(self):
        before = 0 if self.own_keys else lax.rem(lax.axis_index("sequence"), self.sizes.groups) * self.sizes.group_heads
        return before + lax.axis_index("block") * self.number

    def group(self, number=0):
        """Of the program's head of this number."""
        return self.first + number if self.own_keys else lax.rem(lax.axis_index("sequence"), self.sizes.groups)

    def fetch(self, pairs, number, slot, blocks, barrier):
        """What the group of the program's head of this number has in arrays [B, T, G, K]: blocks of tokens, into this slot.

        pairs: of such an array and shared memory [slot, block, tokens, K].
        """
        for source, target in pairs:
            for row, tokens in enumerate(blocks):
                here = source.at[self.sequence, tokens, self.group(number)]
                plgpu.copy_gmem_to_smem(here, target.at[slot, row], barrier)

    def key_slot(self, slot):
        """Where the queries and keys of the head in this slot are: in one of their own, or in one for all heads."""
        return slot if self.own_keys else 0


def _for_ends_read(chunk, body, carry):
    """body(end of a state that the chunk reads, carry) for each."""
    step = lambda x: (x[0] & (x[0] - 1), body(*x))  # noqa: E731
    return lax.while_loop(lambda x: x[0] != 0, step, (chunk, carry))[1]


def _free_slot(empty, count, depth: int):
    """The slot for fetch number `count`, once what it held has been used."""
    slot = lax.rem(count, depth)

    @pl.when(count >= depth)
    def _():
        plgpu.barrier_wait(empty.at[slot])

    return slot


def _wait_for_ring(empty, count, depth: int):
    """Until the last `depth` of `count` fetches have been used."""
    for slot in range(depth):

        @pl.when(count > slot)
        def _(slot=slot):
            plgpu.barrier_wait(empty.at[slot])


def _states_type(sizes: AttentionSizes) -> jax.ShapeDtypeStruct:
    shape = (sizes.batch, sizes.heads, sizes.num_chunks, sizes.value_dim, sizes.key_dim)
    return jax.ShapeDtypeStruct(shape, sizes.dtype)


def chunk_states(k, v, decay, sizes: AttentionSizes, tiles: HopperTiles):
    """States of single chunks and of `tiles.span` chunks, [B, R, N, V, K].

    At the end e of a block of so many chunks stands the state of that block, not yet joined with what comes before; at
    others that of chunk e - 1. A program has the chunks of a block, 1 or 2, and some heads, which its warpgroups share.
    """
    rows, heads, span = sizes.chunk // BLOCK, _Heads(sizes, tiles.chunk_states), min(tiles.span, 1 << sizes.heights)
    assert not heads.own_keys
    chunk, num_chunks, key_dim, value_dim = sizes.chunk, sizes.num_chunks, sizes.key_dim, sizes.value_dim
    keys_bytes, state_bytes, slot_bytes = (
        2 * span * chunk * key_dim,
        2 * key_dim * value_dim,
        chunk * (2 * value_dim + 4),
    )
    workers = tiles.sharing_warpgroups(heads.number)
    depth = _slots(keys_bytes + workers * state_bytes, workers * slot_bytes, 2)
    worker_heads = heads.number // workers
    value_shape = (BLOCK, value_dim)

    def body(k_ref, v_ref, decay_ref, states_ref, *, k_s, v_s, decay_s, out_s, once, arrived):
        block, worker = lax.axis_index("chunk"), lax.axis_index("worker") if workers > 1 else 0
        sequence, first, own_out = heads.sequence, heads.first + worker * worker_heads, out_s.at[worker]

        def tokens(part, row):
            return pl.ds((block * span + part) * chunk + row * BLOCK, BLOCK)

        def slot_of(count):
            return worker * depth + lax.rem(count, depth)

        def fetch(number, part, slot):
            head = first + number
            for row in range(rows):
                here = tokens(part, row)
                plgpu.copy_gmem_to_smem(v_ref.at[sequence, here, head], v_s.at[slot, row], arrived.at[slot])
                plgpu.copy_gmem_to_smem(decay_ref.at[sequence, head, here], decay_s.at[slot, row], arrived.at[slot])

        @pl.when(worker == 0)
        def _():
            for part in range(span):
                for row in range(rows):
                    plgpu.copy_gmem_to_smem(
                        k_ref.at[sequence, tokens(part, row), heads.group()], k_s.at[part, row], once
                    )

        for count in range(min(depth - 1, worker_heads * span)):
            fetch(count // span, count % span, slot_of(count))
        plgpu.barrier_wait(once)

        def add_chunk(number, part, before):
            """The state of a head's chunk, with that of the chunk before it."""
            count = number * span + part
            slot, ahead = slot_of(count), (part + depth - 1) // span

            @pl.when(number + ahead < worker_heads)
            def _():
                fetch(number + ahead, (part + depth - 1) % span, slot_of(count + depth - 1))

            plgpu.barrier_wait(arrived.at[slot])
            last = decay_s[slot, rows - 1, BLOCK - 1]
            for row in range(rows):
                until_end = _exp2_of_decay(last - plgpu.load(decay_s.at[slot, row], layout=BY_ROW))
                values = plgpu.load(v_s.at[slot, row], layout=TILE).astype(F32)
                v_s[slot, row] = (_rows(until_end, value_shape) * values).astype(v_s.dtype)
            plgpu.commit_smem()
            factors = [(v_s.at[slot, row].T, k_s.at[part, row]) for row in range(rows)]
            start = None if before is None else before * jnp.exp2(last)
            state = _add_products(start, factors, (value_dim, key_dim), sizes)
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            own_out[...] = state.astype(own_out.dtype)
            plgpu.commit_smem()
            end = block * span + part + 1

            @pl.when(end < num_chunks)  # nobody reads the state of all chunks
            def _():
                plgpu.copy_smem_to_gmem(own_out, states_ref.at[sequence, first + number, end])

            return state

        def one_head(number, _):
            state = None
            for part in range(span):
                state = add_chunk(number, part, state)

        lax.fori_loop(0, worker_heads, one_head, None)
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)

    scratch = dict(
        k_s=_tiled(span, rows, BLOCK, key_dim),
        v_s=_tiled(workers * depth, rows, BLOCK, value_dim),
        decay_s=plgpu.SMEM((workers * depth, rows, BLOCK), F32),
        out_s=_tiled(workers, value_dim, key_dim),
        once=plgpu.Barrier(num_arrivals=span * rows),
        arrived=plgpu.Barrier(num_arrivals=2 * rows, num_barriers=workers * depth),
    )
    grid = dict(**heads.axes, chunk=-(-(num_chunks - 1) // span))
    return _call(body, "chunk_states", grid, _states_type(sizes), scratch, sizes, workers)(k, v, decay[0])


class _Lams:
    """λ [B, T, H, L] as kernels fetch it: of a block's tokens and a head, the `needed` first levels.

    TMA takes FLOATS numbers at a time, 16 bytes, and begins at multiples of so many; a start elsewhere ends in an illegal
    instruction. So what lies around the levels comes with them. An odd multiple of FLOATS a token leaves the tokens that a
    warp reads at once in different banks of shared memory.
    """

    FLOATS = 4

    def __init__(self, lam, needed: int, sizes: AttentionSizes):
        levels = max(lam.shape[3], sizes.levels)
        while levels * sizes.heads % self.FLOATS:
            levels += 1
        self.levels, self.width = levels, levels * sizes.heads
        before = max(head * levels % self.FLOATS for head in range(sizes.heads))
        parts = -(-(before + needed) // self.FLOATS)
        self.fetched = min((parts | 1) * self.FLOATS, self.width)
        self.operand = pad(lam, (3, levels)).reshape(*lam.shape[:2], self.width)

    def _start(self, head):
        first = lax.div(head * self.levels, self.FLOATS) * self.FLOATS
        return jnp.minimum(first, self.width - self.fetched)

    def source(self, lam_ref, sequence, tokens, head):
        return lam_ref.at[sequence, tokens, pl.ds(self._start(head), self.fetched)]

    def load(self, fetched_ref, head, level):
        """[tokens] of a level."""
        here = fetched_ref.at[:, head * self.levels - self._start(head) + level]
        return plgpu.load(here, layout=BY_ROW, optimized=False)  # as tokens are not next to each other


def _chunks_by_reads(sizes: AttentionSizes):
    """Chunks in the order in which programs start, those that read the most states first, so that all are done together."""
    chunks = np.arange(sizes.num_chunks)
    return jnp.asarray(sorted(chunks, key=lambda chunk: -int(chunk).bit_count()), jnp.int32)


SINCE = 32  # numbers of `since` that are fetched of each head: no tree is higher, and Pallas fetches whole 128 bytes


def outputs(q, k, v, decay, lam, since, states, sizes: AttentionSizes, tiles: HopperTiles, keep: bool):
    """As `attention.triton.outputs`. weight is written only if it is wanted, and only where a state is read.

    A program has a chunk and some heads, a warpgroup that multiplies a block's queries.
    """
    rows, heads = sizes.chunk // BLOCK, _Heads(sizes, tiles.outputs)
    chunk, key_dim, value_dim = sizes.chunk, sizes.key_dim, sizes.value_dim
    value_shape = (BLOCK, value_dim)
    heights, lams = sizes.heights, _Lams(lam, sizes.levels, sizes)
    keep = keep and heights > 0
    key_bytes = 4 * chunk * key_dim
    once_bytes = 2 * rows * BLOCK * value_dim + 4 * heads.number * SINCE + key_bytes * (not heads.own_keys)
    head_bytes = chunk * (2 * value_dim + 4 * (1 + lams.fetched)) + key_bytes * heads.own_keys
    state_bytes = 2 * key_dim * value_dim
    head_depth = _slots(once_bytes + 2 * state_bytes, head_bytes, 2)
    depth = _slots(once_bytes + head_depth * head_bytes, state_bytes, 4)

    def body(
        order_ref,
        q_ref,
        k_ref,
        v_ref,
        decay_ref,
        lam_ref,
        *refs,
        q_s,
        k_s,
        v_s,
        vectors,
        states_s,
        out_s,
        staged,
        barriers,
    ):
        tree_refs, (o_ref, *weight_ref) = refs[: 2 * (heights > 0)], refs[2 * (heights > 0) :]
        decay_s, lam_s, since_s = vectors
        once, head_full, head_empty, state_full, state_empty = barriers
        index, worker = order_ref[lax.axis_index("chunk")], lax.axis_index("worker")
        sequence, first = heads.sequence, heads.first

        def tokens(row):
            return pl.ds(index * chunk + row * BLOCK, BLOCK)

        def read_states(body, carry):
            """body(end of a state that the chunk reads, carry) for each."""
            return _for_ends_read(index, body, carry) if tree_refs else carry

        @pl.when(worker == rows)
        def _produce():
            _limit_registers(40, "decrease", sizes)

            keys, blocks = [(q_ref, q_s), (k_ref, k_s)], [tokens(row) for row in range(rows)]
            if not heads.own_keys:
                heads.fetch(keys, 0, 0, blocks, once)
            if tree_refs:
                plgpu.copy_gmem_to_smem(tree_refs[0].at[sequence, index, pl.ds(first, heads.number)], since_s, once)

            def one_head(number, count):
                head, slot = first + number, _free_slot(head_empty, number, head_depth)
                full = head_full.at[slot]
                if heads.own_keys:
                    heads.fetch(keys, number, slot, blocks, full)
                for row in range(rows):
                    plgpu.copy_gmem_to_smem(v_ref.at[sequence, tokens(row), head], v_s.at[slot, row], full)
                    plgpu.copy_gmem_to_smem(decay_ref.at[sequence, head, tokens(row)], decay_s.at[slot, row], full)
                    plgpu.copy_gmem_to_smem(
                        lams.source(lam_ref, sequence, tokens(row), head), lam_s.at[slot, row], full
                    )

                def fetch(end, count):
                    slot = _free_slot(state_empty, count, depth)
                    plgpu.copy_gmem_to_smem(
                        tree_refs[1].at[sequence, head, end], states_s.at[slot], state_full.at[slot]
                    )
                    return count + 1

                return read_states(fetch, count)

            count = lax.fori_loop(0, heads.number, one_head, jnp.int32(0))
            _wait_for_ring(head_empty, heads.number, head_depth)
            _wait_for_ring(state_empty, count, depth)

        @pl.when(worker < rows)
        def _consume():
            _limit_registers(232, "increase", sizes)
            if tree_refs or not heads.own_keys:
                plgpu.barrier_wait(once)
            own_staged = None if staged is None else staged.at[worker]

            def score(slot):
                """Queries as they read states, and their scores with the keys of their block and of the one before."""
                queries = q_s.at[slot, worker]
                reading = queries if sizes.interpret else plgpu.load(queries, layout=TILE)
                # The first block has no keys before it, and makes nothing of its second scores.
                scores = [_product(queries, k_s.at[slot, row].T, PAIRS) for row in [worker, 0][:rows]]
                return reading, *scores, *[None] * (2 - rows)

            of_all = None if heads.own_keys else score(0)

            def one_head(number, count):
                head, head_slot = first + number, lax.rem(number, head_depth)
                plgpu.barrier_wait(head_full.at[head_slot])
                reading, scores, scores_before = of_all or score(head_slot)
                since = plgpu.load(decay_s.at[head_slot, worker], layout=BY_ROW)

                def lam_of(level):
                    return lams.load(lam_s.at[head_slot, worker], head, level)

                lam = [lam_of(level) for level in range(sizes.levels_inside)]
                out = in_chunk(head_slot, scores, scores_before, since, lam)

                def read(end, carry):
                    count, out = carry
                    slot, height = lax.rem(count, depth), 31 - lax.clz(end & -end)
                    plgpu.barrier_wait(state_full.at[slot])
                    product = _product(reading, states_s.at[slot].T, value_shape)
                    plgpu.barrier_arrive(state_empty.at[slot])
                    weight = lam_of(sizes.levels_inside + height) * jnp.exp2(since_s[number, height] + since)
                    if keep:
                        weight_ref[0][sequence, head, height, tokens(worker)] = weight
                    return count + 1, out + _rows(weight, value_shape) * product

                count, out = read_states(read, (count, out))
                plgpu.wait_smem_to_gmem(0, wait_read_only=True)
                out_s[worker] = out.astype(out_s.dtype)
                plgpu.commit_smem()
                plgpu.barrier_arrive(head_empty.at[head_slot])
                plgpu.copy_smem_to_gmem(out_s.at[worker], o_ref.at[sequence, tokens(worker), head])
                return count

            def in_chunk(slot, scores, scores_before, since, lam):
                """What the chunk's own keys give; lam: of each level."""

                def attend(sum_ref):
                    pairs = _Pairs()
                    near_lam, weights = pairs.near_lam(lam), []
                    for strip in range(STRIPS):
                        since_key = plgpu.load(decay_s.at[slot, worker, pl.ds(strip * STRIP, STRIP)], layout=BY_COLUMN)
                        decayed = pairs.decay(strip, since, since_key) * pairs.lam(strip, near_lam, lam)
                        weights.append((_columns_of(scores, strip, STRIP) * decayed).astype(v_s.dtype))
                    weights = jnp.concatenate(weights, axis=1)
                    _add_product(sum_ref, weights, v_s.at[slot, worker], own_staged)

                    def attend_before(other, _):
                        last = decay_s[slot, other, BLOCK - 1]
                        from_key = _exp2_of_decay(last - plgpu.load(decay_s.at[slot, other], layout=BY_COLUMN))
                        by_row = lam[LEVELS_IN_BLOCK] * _exp2_of_decay(since - last)
                        weights = (scores_before * _rows(by_row, PAIRS) * _columns(from_key, PAIRS)).astype(v_s.dtype)
                        _add_product(sum_ref, weights, v_s.at[slot, other], own_staged)

                    if rows > 1:
                        lax.fori_loop(0, worker, attend_before, None)
                    return sum_ref[...]

                return lax.optimization_barrier(pl.run_scoped(attend, plgpu.ACC(value_shape, F32)))

            lax.fori_loop(0, heads.number, one_head, jnp.int32(0))
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)

    operands = [_chunks_by_reads(sizes), q, k, v, decay[0], lams.operand]
    out_type = [jax.ShapeDtypeStruct(v.shape, v.dtype)]
    if heights:
        operands += [pad(jnp.swapaxes(since, 1, 2), (3, SINCE)), states]
    if keep:
        out_type.append(jax.ShapeDtypeStruct((sizes.batch, sizes.heads, heights, sizes.length), F32))
    key_slots = head_depth if heads.own_keys else 1
    scratch = dict(
        q_s=_tiled(key_slots, rows, BLOCK, key_dim),
        k_s=_tiled(key_slots, rows, BLOCK, key_dim),
        v_s=_tiled(head_depth, rows, BLOCK, value_dim),
        vectors=(
            plgpu.SMEM((head_depth, rows, BLOCK), F32),
            plgpu.SMEM((head_depth, rows, BLOCK, lams.fetched), F32),
            plgpu.SMEM((heads.number, SINCE), F32),
        ),
        states_s=_tiled(depth, value_dim, key_dim),
        out_s=_tiled(rows, BLOCK, value_dim),
        staged=_tiled(rows, *PAIRS) if sizes.interpret else None,
        barriers=(
            plgpu.Barrier(num_arrivals=max(2 * rows * (not heads.own_keys) + (heights > 0), 1)),
            plgpu.Barrier(num_arrivals=(3 + 2 * heads.own_keys) * rows, num_barriers=head_depth),
            plgpu.Barrier(num_arrivals=rows, num_barriers=head_depth),
            plgpu.Barrier(num_barriers=depth),
            plgpu.Barrier(num_arrivals=rows, num_barriers=depth),
        ),
    )
    grid = dict(chunk=sizes.num_chunks, **heads.axes)
    out, *weight = _call(body, "outputs", grid, out_type, scratch, sizes, rows + 1)(*operands)
    return out, weight[0] if keep else None


def state_gradients(q, do, weight, sizes: AttentionSizes, tiles: HopperTiles):
    """Gradient of each state from the chunks that read it, [B, R, N, V, K]; e = 0 is never written.

    A program has a node of the tree and some heads, each of which has a warpgroup.
    """
    rows, heads_per_program = sizes.chunk // BLOCK, tiles.state_gradients
    heads = _Heads(sizes, heads_per_program)
    assert not heads.own_keys
    chunk, key_dim, value_dim = sizes.chunk, sizes.key_dim, sizes.value_dim
    num_chunks, heights = sizes.num_chunks, sizes.heights
    once_bytes = 2 * heads_per_program * key_dim * value_dim
    depth = _slots(once_bytes, 2 * BLOCK * (key_dim + heads_per_program * (value_dim + 2)), 3)
    value_shape = (BLOCK, value_dim)

    def body(q_ref, do_ref, weight_ref, gradients_ref, *, q_s, do_s, weight_s, out_s, full, empty):
        # Nodes are numbered from the top of the tree down, so that those with the most readers start first.
        number = lax.axis_index("node") + 1
        sequence, group, first = heads.sequence, heads.group(), heads.first
        worker = lax.axis_index("worker")
        level = 31 - lax.clz(number)
        height = heights - 1 - level
        one = jnp.int32(1)
        end = lax.shift_left(2 * (number - lax.shift_left(one, level)) + 1, height)
        readers = rows * (jnp.minimum(end + lax.shift_left(one, height), num_chunks) - end)

        def tokens(index):
            return pl.ds(end * chunk + index * BLOCK, BLOCK)

        @pl.when(jnp.logical_and(end < num_chunks, worker == heads_per_program))
        def _produce():
            _limit_registers(40, "decrease", sizes)

            def fetch(index, _):
                slot = _free_slot(empty, index, depth)
                plgpu.copy_gmem_to_smem(q_ref.at[sequence, tokens(index), group], q_s.at[slot], full.at[slot])
                for head in range(heads_per_program):
                    source = do_ref.at[sequence, tokens(index), first + head]
                    plgpu.copy_gmem_to_smem(source, do_s.at[slot, head], full.at[slot])
                    weights = weight_ref.at[sequence, first + head, height, tokens(index)]
                    plgpu.copy_gmem_to_smem(weights, weight_s.at[slot, head], full.at[slot])

            lax.fori_loop(0, readers, fetch, None)
            _wait_for_ring(empty, readers, depth)

        @pl.when(jnp.logical_and(end < num_chunks, worker < heads_per_program))
        def _consume():
            def add_all(sum_ref):
                def add_block(index, _):
                    slot = lax.rem(index, depth)
                    plgpu.barrier_wait(full.at[slot])
                    by_row = plgpu.load(weight_s.at[slot, worker], layout=BY_ROW)
                    values = plgpu.load(do_s.at[slot, worker], layout=TILE).astype(F32)
                    do_s[slot, worker] = (_rows(by_row, value_shape) * values).astype(do_s.dtype)
                    plgpu.commit_smem()
                    plgpu.wgmma(sum_ref, do_s.at[slot, worker].T, q_s.at[slot])
                    plgpu.wgmma_wait(0)
                    plgpu.barrier_arrive(empty.at[slot])

                lax.fori_loop(0, readers, add_block, None)
                return sum_ref[...]

            gradient = lax.optimization_barrier(pl.run_scoped(add_all, plgpu.ACC((value_dim, key_dim), F32)))
            out_s[worker] = gradient.astype(out_s.dtype)
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(out_s.at[worker], gradients_ref.at[sequence, first + worker, end])
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)

    scratch = dict(
        q_s=_tiled(depth, BLOCK, key_dim),
        do_s=_tiled(depth, heads_per_program, BLOCK, value_dim),
        weight_s=plgpu.SMEM((depth, heads_per_program, BLOCK), F32),
        out_s=_tiled(heads_per_program, value_dim, key_dim),
        full=plgpu.Barrier(num_arrivals=1 + 2 * heads_per_program, num_barriers=depth),
        empty=plgpu.Barrier(num_arrivals=heads_per_program, num_barriers=depth),
    )
    grid = dict(node=(1 << heights) - 1, **heads.axes)
    call = _call(body, "state_gradients", grid, _states_type(sizes), scratch, sizes, heads_per_program + 1)
    return call(q, do, weight)


def query_gradients(q, do, weight, states, dq, sizes: AttentionSizes, tiles: HopperTiles):
    """As `attention.triton.query_gradients`; read is written only where a state is read.

    A program has a chunk and some heads, a warpgroup that multiplies a block's queries. With all heads of a group it adds dq.
    """
    rows, heads = sizes.chunk // BLOCK, _Heads(sizes, tiles.query_gradients)
    key_dim, value_dim, heights = sizes.key_dim, sizes.value_dim, sizes.heights
    key_slots = 2 if heads.own_keys else 1
    key_shape = (BLOCK, key_dim)
    once_bytes = BLOCK * rows * (2 * key_dim * key_slots + 4 * value_dim + 12 * heights)
    depth = _slots(once_bytes, 2 * key_dim * value_dim, 4)

    def body(
        order_ref, q_ref, do_ref, weight_ref, states_ref, inside_ref, dq_ref, read_ref, of_reads_ref,
        *, q_s, do_s, weight_s, states_s, read_s, barriers,
    ):  # fmt: skip
        once, do_full, do_empty, state_full, state_empty = barriers
        index, worker = order_ref[lax.axis_index("chunk")], lax.axis_index("worker")
        sequence, first = heads.sequence, heads.first

        def tokens(row):
            return pl.ds((index * rows + row) * BLOCK, BLOCK)

        @pl.when(worker == rows)
        def _produce():
            _limit_registers(40, "decrease", sizes)

            queries, blocks = [(q_ref, q_s)], [tokens(row) for row in range(rows)]
            if not heads.own_keys:
                heads.fetch(queries, 0, 0, blocks, once)

            def one_head(number, count):
                head, slot = first + number, _free_slot(do_empty, number, 2)
                if heads.own_keys:
                    heads.fetch(queries, number, slot, blocks, do_full.at[slot])
                for row in range(rows):
                    full = do_full.at[slot]
                    plgpu.copy_gmem_to_smem(do_ref.at[sequence, tokens(row), head], do_s.at[slot, row], full)
                    plgpu.copy_gmem_to_smem(weight_ref.at[sequence, head, :, tokens(row)], weight_s.at[slot, row], full)

                def fetch(end, count):
                    slot = _free_slot(state_empty, count, depth)
                    plgpu.copy_gmem_to_smem(states_ref.at[sequence, head, end], states_s.at[slot], state_full.at[slot])
                    return count + 1

                return _for_ends_read(index, fetch, count)

            count = lax.fori_loop(0, heads.number, one_head, jnp.int32(0))
            _wait_for_ring(do_empty, heads.number, 2)
            _wait_for_ring(state_empty, count, depth)

        @pl.when(worker < rows)
        def _consume():
            _limit_registers(232, "increase", sizes)

            def one_head(number, carry):
                head, do_slot = first + number, lax.rem(number, 2)
                plgpu.barrier_wait(do_full.at[do_slot])
                plgpu.wait_smem_to_gmem(0, wait_read_only=True)  # of the head before

                def read(end, carry):
                    count, dq, weighted = carry
                    slot, height = lax.rem(count, depth), 31 - lax.clz(end & -end)
                    plgpu.barrier_wait(state_full.at[slot])
                    to_query = _product(do_s.at[do_slot, worker], states_s.at[slot], key_shape)
                    plgpu.barrier_arrive(state_empty.at[slot])
                    queries = plgpu.load(q_s.at[heads.key_slot(do_slot), worker], layout=TILE).astype(F32)
                    read = jnp.sum(queries * to_query, axis=1)
                    read_s[worker, height] = read
                    by_row = plgpu.load(weight_s.at[do_slot, worker, height], layout=BY_ROW)
                    return count + 1, dq + _rows(by_row, key_shape) * to_query, weighted + by_row * read

                nothing = plgpu.layout_cast(jnp.zeros((BLOCK,), F32), BY_ROW)
                count, dq, weighted = _for_ends_read(index, read, (*carry, nothing))
                of_reads_ref[sequence, head, tokens(worker)] = weighted
                plgpu.commit_smem()
                plgpu.barrier_arrive(do_empty.at[do_slot])
                plgpu.copy_smem_to_gmem(read_s.at[worker], read_ref.at[sequence, head, :, tokens(worker)])
                return count, dq

            def from_inside(group):
                """What is known of dq before, if the program adds it."""
                if heads.parts > 1:
                    return plgpu.layout_cast(jnp.zeros(key_shape, F32), TILE)
                parts = [
                    plgpu.load(inside_ref.at[part, sequence, tokens(worker), group], layout=TILE, optimized=False)
                    for part in range(inside_ref.shape[0])
                ]
                return sum((part.astype(F32) for part in parts[1:]), parts[0].astype(F32))

            def write(group, dq):
                _write(dq_ref.at[heads.part, sequence, tokens(worker), group], dq, sizes)

            def one_group(number, count):
                """The head of this number, with keys of its own."""
                group = heads.group(number)
                count, dq = one_head(number, (count, from_inside(group)))
                write(group, dq)
                return count

            if heads.own_keys:
                lax.fori_loop(0, heads.number, one_group, jnp.int32(0))
            else:
                dq = from_inside(heads.group())
                plgpu.barrier_wait(once)
                write(heads.group(), lax.fori_loop(0, heads.number, one_head, (jnp.int32(0), dq))[1])
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)

    scratch = dict(
        q_s=_tiled(key_slots, rows, BLOCK, key_dim),
        do_s=_tiled(2, rows, BLOCK, value_dim),
        weight_s=plgpu.SMEM((2, rows, heights, BLOCK), F32),
        states_s=_tiled(depth, value_dim, key_dim),
        read_s=plgpu.SMEM((rows, heights, BLOCK), F32),
        barriers=(
            plgpu.Barrier(num_arrivals=rows),
            plgpu.Barrier(num_arrivals=(2 + heads.own_keys) * rows, num_barriers=2),
            plgpu.Barrier(num_arrivals=rows, num_barriers=2),
            plgpu.Barrier(num_barriers=depth),
            plgpu.Barrier(num_arrivals=rows, num_barriers=depth),
        ),
    )
    grid = dict(chunk=sizes.num_chunks, **heads.axes)
    out_type = [
        jax.ShapeDtypeStruct((heads.parts, *q.shape), q.dtype if heads.parts == 1 else F32),
        jax.ShapeDtypeStruct(weight.shape, F32),
        jax.ShapeDtypeStruct((sizes.batch, sizes.heads, sizes.length), F32),
    ]
    call = _call(body, "query_gradients", grid, out_type, scratch, sizes, rows + 1)
    dq_read, read, of_reads = call(_chunks_by_reads(sizes), q, do, weight, states, dq)
    dq = dq_read[0] if heads.parts == 1 else jnp.sum(jnp.concatenate([dq, dq_read]), axis=0).astype(q.dtype)
    return dq, read, of_reads


def chunk_gradients(q, k, v, do, decay, lam, gradients, sizes: AttentionSizes, tiles: HopperTiles):
    """As `attention.triton.chunk_gradients`.

    A program has a chunk and some heads, and a warpgroup for each block of keys.
    """
    dq, dk, dv, dlam, *by_token = _chunk_gradients(q, k, v, do, decay[0], lam, gradients, sizes, tiles)
    dk = jnp.sum(dk, axis=0).astype(k.dtype) if len(dk) > 1 else dk[0]
    of_keys = None if gradients is None else by_token.pop(1)
    return dq, dk, dv, dlam, by_token, of_keys


def _chunk_gradients(q, k, v, do, decay, lam, gradients, sizes: AttentionSizes, tiles: HopperTiles):
    """The kernel of `chunk_gradients`. Several blocks of heads have a part of dq and dk each, in float32. With two blocks of
    tokens, what the pairs of both add to the gradient of decays comes by itself.

    Sums over queries, for decays, come from dv: Σ_i P_ij (do_i·v_j) = v_j·Σ_i P_ij do_i. So that they and the sums over keys
    cancel where they should, both are of the rounded weights P, and without a token's pair with itself, which does not decay.
    """
    chunk, key_dim, value_dim = sizes.chunk, sizes.key_dim, sizes.value_dim
    # Where keys and values of a head's own are larger than these, those of the next head find no room beside them.
    alone = sizes.group_heads == 1 and max(key_dim, value_dim) > 64
    rows, heads, levels = chunk // BLOCK, _Heads(sizes, 1 if alone else tiles.chunk_gradients), sizes.levels_inside
    key_shape, value_shape = (BLOCK, key_dim), (BLOCK, value_dim)
    num_trees, lams = int(gradients is not None), _Lams(lam, levels, sizes)
    key_bytes = 4 * chunk * key_dim
    once_bytes = 2 * rows * BLOCK**2 + (rows - 1) * 4 * BLOCK**2 + key_bytes * (not heads.own_keys)
    head_bytes = 4 * chunk * (value_dim + 1 + lams.fetched) + 2 * key_dim * value_dim + key_bytes * heads.own_keys
    depth = _slots(once_bytes, head_bytes, 2)

    def body(
        q_ref, k_ref, v_ref, do_ref, decay_ref, lam_ref, *refs,
        q_s, k_s, v_s, do_s, gradient_s, decay_s, lam_s, weights_s, between_s, barriers,
    ):  # fmt: skip
        tree_refs, (dq_ref, dk_ref, dv_ref, dlam_ref, own_ref, *more_refs) = refs[:num_trees], refs[num_trees:]
        once, full, empty, between_done, between_read = barriers
        index, worker = lax.axis_index("chunk"), lax.axis_index("worker")
        sequence, first = heads.sequence, heads.first

        def tokens(row):
            return pl.ds(index * chunk + row * BLOCK, BLOCK)

        @pl.when(worker == rows)
        def _produce():
            _limit_registers(40, "decrease", sizes)

            keys, blocks = [(q_ref, q_s), (k_ref, k_s)], [tokens(row) for row in range(rows)]
            if not heads.own_keys:
                heads.fetch(keys, 0, 0, blocks, once)

            def fetch(number, _):
                head, slot = first + number, _free_slot(empty, number, depth)
                bar = full.at[slot]
                if heads.own_keys:
                    heads.fetch(keys, number, slot, blocks, bar)
                for row in range(rows):
                    plgpu.copy_gmem_to_smem(v_ref.at[sequence, tokens(row), head], v_s.at[slot, row], bar)
                    plgpu.copy_gmem_to_smem(do_ref.at[sequence, tokens(row), head], do_s.at[slot, row], bar)
                    plgpu.copy_gmem_to_smem(decay_ref.at[sequence, head, tokens(row)], decay_s.at[slot, row], bar)
                    plgpu.copy_gmem_to_smem(lams.source(lam_ref, sequence, tokens(row), head), lam_s.at[slot, row], bar)
                if tree_refs:
                    plgpu.copy_gmem_to_smem(tree_refs[0].at[sequence, head, index], gradient_s.at[slot], bar)

            lax.fori_loop(0, heads.number, fetch, None)
            _wait_for_ring(empty, heads.number, depth)

        @pl.when(worker < rows)
        def _consume():
            _limit_registers(232, "increase", sizes)
            if not heads.own_keys:
                plgpu.barrier_wait(once)
            weights_own = weights_s.at[worker]

            own_scores = None  # of each query with its own key, if they are the same for several heads
            if heads.number > 1 and not heads.own_keys:
                own_scores = _diagonal(_product(q_s.at[0, worker], k_s.at[0, worker].T, PAIRS))

            def zeros(columns):
                return plgpu.layout_cast(jnp.zeros((BLOCK, columns), F32), TILE)

            # Where there are several slots, the next head releases that of the one before it, whose dv leaves it meanwhile.
            releases_late = depth > 1
            assert releases_late or not heads.own_keys  # else a head's keys would go before they are used

            def release(number):
                """The slot of a head whose dv has left it."""
                plgpu.wait_smem_to_gmem(0, wait_read_only=True)
                plgpu.barrier_arrive(empty.at[lax.rem(number, depth)])

            def one_head(number, d_scores, dk_sum, first_of_keys):
                """d_scores with those of the head. first_of_keys: the first head with these keys."""
                head, slot = first + number, lax.rem(number, depth)
                values, keys = v_s.at[slot, worker], heads.key_slot(slot)
                plgpu.barrier_wait(full.at[slot])
                since = plgpu.load(decay_s.at[slot, worker], layout=BY_ROW)

                def lam_of(level, row=worker):
                    return lams.load(lam_s.at[slot, row], head, level)

                def weigh(row):
                    """(scores, do·v) of a block of queries with the own keys and values."""
                    queries, gradient = q_s.at[keys, row], do_s.at[slot, row]
                    return _products((queries, k_s.at[keys, worker].T, PAIRS), (gradient, values.T, PAIRS))

                scores, d_weights = weigh(worker)
                if releases_late:

                    @pl.when(number > 0)
                    def _():
                        release(number - 1)

                own = [lam_of(level) for level in range(LEVELS_IN_BLOCK)]
                own_weight = own[0] * (_diagonal(scores) if own_scores is None else own_scores)
                near_lam = _Pairs().near_lam(own)
                weights, new_d_scores = [], []
                by_query, d_lams = zeros(STRIP), _LevelSums()
                for strip in range(STRIPS):
                    pairs = _Pairs()
                    since_key = plgpu.load(decay_s.at[slot, worker, pl.ds(strip * STRIP, STRIP)], layout=BY_COLUMN)
                    decayed = pairs.decay(strip, since, since_key)
                    lam = pairs.lam(strip, near_lam, own)
                    of_scores, of_weights = _columns_of(scores, strip, STRIP), _columns_of(d_weights, strip, STRIP)
                    weight = jnp.where(pairs.is_before(strip), of_scores * decayed * lam, 0.0).astype(weights_s.dtype)
                    by_query += weight.astype(F32) * of_weights
                    of_weights *= decayed
                    d_lams.add(strip, pairs, of_scores * of_weights)
                    weight, d_score, near_lam, by_query = d_lams.keep(
                        weight, d_scores[strip] + lam * of_weights, near_lam, by_query
                    )
                    weights.append(weight)
                    new_d_scores.append(d_score)
                d_scores = tuple(new_d_scores)
                if rows == 2 and heads.own_keys:

                    @pl.when(jnp.logical_and(worker == 0, number > 0))
                    def _():
                        plgpu.barrier_wait(between_read)

                weights_own[...] = jnp.concatenate(weights, axis=1)
                plgpu.commit_smem()
                by_query = jnp.sum(by_query, axis=1)
                for level, d_lam in enumerate(d_lams.sums(_Pairs())):
                    dlam_ref[sequence, head, level, tokens(worker)] = d_lam
                if rows > 1:

                    @pl.when(worker == 0)
                    def _():
                        # The pairs of the two blocks are of the last level, and no other tokens have any of it.
                        nothing = plgpu.layout_cast(jnp.zeros((BLOCK,), F32), BY_ROW)
                        dlam_ref[sequence, head, LEVELS_IN_BLOCK, tokens(0)] = nothing
                        more_refs[-1][sequence, head, tokens(0)] = nothing

                dv = _product(weights_own.T, do_s.at[slot, worker], value_shape)

                def later_queries(row, dv):
                    scores, d_weights = weigh(row)
                    last = decay_s[slot, worker, BLOCK - 1]
                    to_query = _exp2_of_decay(plgpu.load(decay_s.at[slot, row], layout=BY_ROW) - last)
                    by_row = to_query * lam_of(LEVELS_IN_BLOCK, row)
                    weights, d_betweens, d_lam_sum, weighted_sum = [], [], zeros(WIDE), zeros(WIDE)
                    for part in range(BLOCK // WIDE):
                        since_key = plgpu.load(decay_s.at[slot, worker, pl.ds(part * WIDE, WIDE)], layout=BY_COLUMN)
                        from_key = _columns(_exp2_of_decay(last - since_key), WIDE_PAIRS)
                        of_scores = _columns_of(scores, part, WIDE) * from_key
                        of_weights = _columns_of(d_weights, part, WIDE)
                        weights_part = (of_scores * _rows(by_row, WIDE_PAIRS)).astype(weights_s.dtype)
                        d_lam_sum += of_scores * of_weights
                        weighted_sum += weights_part.astype(F32) * of_weights
                        d_betweens.append(_rows(by_row, WIDE_PAIRS) * from_key * of_weights)
                        weights.append(weights_part)
                    plgpu.commit_smem()  # after the product that read the weights before
                    weights_own[...] = jnp.concatenate(weights, axis=1)
                    plgpu.commit_smem()
                    d_between = jnp.concatenate(d_betweens, axis=1)

                    @pl.when(number == first_of_keys)
                    def _():
                        between_s[...] = d_between

                    @pl.when(number > first_of_keys)
                    def _():
                        between_s[...] = plgpu.load(between_s, layout=TILE) + d_between

                    dlam_ref[sequence, head, LEVELS_IN_BLOCK, tokens(row)] = to_query * jnp.sum(d_lam_sum, axis=1)
                    more_refs[-1][sequence, head, tokens(row)] = jnp.sum(weighted_sum, axis=1)
                    dv += _product(weights_own.T, do_s.at[slot, row], value_shape)
                    return dv

                if rows > 1:
                    dv = lax.fori_loop(worker + 1, rows, later_queries, dv)
                own_values = plgpu.load(values, layout=TILE).astype(F32)
                own_ref[sequence, head, tokens(worker)] = by_query - jnp.sum(own_values * dv, axis=1)
                dv += _rows(own_weight, value_shape) * plgpu.load(do_s.at[slot, worker], layout=TILE).astype(F32)
                if tree_refs:
                    until_end = _exp2_of_decay(decay_s[slot, rows - 1, BLOCK - 1] - since)
                    values[...] = (_rows(until_end, value_shape) * own_values).astype(values.dtype)
                    plgpu.commit_smem()
                    plgpu.wgmma(dk_sum, values, gradient_s.at[slot])
                    from_later = _rows(until_end, value_shape) * _product(
                        k_s.at[keys, worker], gradient_s.at[slot].T, value_shape
                    )
                    more_refs[0][sequence, head, tokens(worker)] = jnp.sum(from_later * own_values, axis=1)
                    dv += from_later
                    plgpu.wgmma_wait(0)
                plgpu.commit_smem()  # after the products that read the values
                values[...] = dv.astype(values.dtype)
                plgpu.commit_smem()
                plgpu.copy_smem_to_gmem(values, dv_ref.at[sequence, tokens(worker), head])
                if not releases_late:
                    release(number)
                return d_scores

            def finish(d_scores, dk_sum, keys, here):
                """dq and dk of the queries and keys in this slot, of the scores' gradients from all heads."""
                weights_own[...] = jnp.concatenate(d_scores, axis=1).astype(weights_s.dtype)
                plgpu.commit_smem()
                plgpu.wgmma(dk_sum, weights_own.T, q_s.at[keys, worker])

                def of_queries(dq_sum):
                    plgpu.wgmma(dq_sum, weights_own, k_s.at[keys, worker])
                    if rows == 2:

                        @pl.when(worker == 1)
                        def _():
                            plgpu.barrier_wait(between_done)
                            plgpu.wgmma(dq_sum, weights_s.at[0], k_s.at[keys, 0])

                    return dq_sum[...]

                _write(dq_ref.at[here], pl.run_scoped(of_queries, plgpu.ACC(key_shape, F32)), sizes)
                if rows == 2:

                    @pl.when(worker == 0)
                    def _():
                        plgpu.commit_smem()  # after the products that read the weights
                        weights_own[...] = plgpu.load(between_s, layout=TILE).astype(weights_s.dtype)
                        plgpu.commit_smem()
                        plgpu.barrier_arrive(between_done)
                        plgpu.wgmma(dk_sum, weights_own.T, q_s.at[keys, 1])

                return dk_sum[...]

            def of_heads(start, stop):
                """dq and dk of heads with the same keys."""
                here = (heads.part, sequence, tokens(worker), heads.group(start))

                def add_heads(dk_sum):
                    d_scores = (zeros(STRIP),) * STRIPS
                    d_scores = lax.fori_loop(start, stop, lambda i, carry: one_head(i, carry, dk_sum, start), d_scores)
                    return finish(d_scores, dk_sum, heads.key_slot(lax.rem(start, depth)), here)

                _write(dk_ref.at[here], pl.run_scoped(add_heads, plgpu.ACC(key_shape, F32)), sizes)

            def of_own_keys(number, _):
                of_heads(number, number + 1)
                if rows == 2:

                    @pl.when(jnp.logical_and(worker == 1, number < heads.number - 1))
                    def _():
                        plgpu.barrier_arrive(between_read)

            if heads.own_keys:
                lax.fori_loop(0, heads.number, of_own_keys, None)
            else:
                of_heads(0, heads.number)
            if releases_late:
                release(heads.number - 1)
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)

    by_token = jax.ShapeDtypeStruct((sizes.batch, sizes.heads, sizes.length), F32)
    operands = [q, k, v, do, decay, lams.operand]
    out_type = [
        jax.ShapeDtypeStruct((heads.parts, *q.shape), q.dtype if heads.parts == 1 else F32),
        jax.ShapeDtypeStruct((heads.parts, *k.shape), k.dtype if heads.parts == 1 else F32),
        jax.ShapeDtypeStruct(v.shape, v.dtype),
        jax.ShapeDtypeStruct((sizes.batch, sizes.heads, levels, sizes.length), F32),
        by_token,
    ]
    if gradients is not None:
        operands.append(gradients)
        out_type.append(by_token)
    if rows > 1:
        out_type.append(by_token)
    key_slots = depth if heads.own_keys else 1
    scratch = dict(
        q_s=_tiled(key_slots, rows, BLOCK, key_dim),
        k_s=_tiled(key_slots, rows, BLOCK, key_dim),
        v_s=_tiled(depth, rows, BLOCK, value_dim),
        do_s=_tiled(depth, rows, BLOCK, value_dim),
        gradient_s=_tiled(depth, value_dim, key_dim),
        decay_s=plgpu.SMEM((depth, rows, BLOCK), F32),
        lam_s=plgpu.SMEM((depth, rows, BLOCK, lams.fetched), F32),
        weights_s=_tiled(rows, *PAIRS),
        between_s=_tiled(*PAIRS, dtype=F32) if rows > 1 else None,
        barriers=(
            plgpu.Barrier(num_arrivals=2 * rows),
            plgpu.Barrier(num_arrivals=(4 + 2 * heads.own_keys) * rows + num_trees, num_barriers=depth),
            plgpu.Barrier(num_arrivals=rows, num_barriers=depth),
            plgpu.Barrier(),
            plgpu.Barrier(),
        ),
    )
    grid = dict(**heads.axes, chunk=sizes.num_chunks)
    return _call(body, "chunk_gradients", grid, out_type, scratch, sizes, rows + 1)(*operands)


# --- The tree of states: element by element -----------------------------------------------------------------------------

ELEMENTS = 512  # of a state that a program has, four a thread
BY_THREAD = plgpu.Layout.WG_STRIDED((ELEMENTS,), vec_size=4)


def merge_states(states, node_decay, sizes: AttentionSizes, tiles: HopperTiles, size: int):
    """Joins nodes of `size` chunks into nodes of up to size * tiles.radix, in place. node_decay [B, H, N / size], log2."""
    radix, heads, num_chunks = tiles.radix, sizes.heads, sizes.num_chunks
    elements = sizes.key_dim * sizes.value_dim
    num_nodes = node_decay.shape[2]

    def body(states_ref, decay_ref):
        z, group, strip = lax.axis_index("head"), lax.axis_index("group"), lax.axis_index("strip")
        sequence, head = lax.div(z, heads), lax.rem(z, heads)
        first = group * radix
        ends = [(first + index + 1) * size for index in range(radix)]

        def node(end):
            return states_ref.at[sequence, head, end, pl.ds(strip * ELEMENTS, ELEMENTS)]

        nodes = [plgpu.load(node(jnp.minimum(end, num_chunks - 1)), layout=BY_THREAD).astype(F32) for end in ends]
        decays = [decay_ref[sequence, head, jnp.minimum(first + index, num_nodes - 1)] for index in range(radix)]
        step = 1
        while step < radix:
            for index in range(2 * step - 1, radix, 2 * step):
                nodes[index] += jnp.exp2(decays[index]) * nodes[index - step]
                decays[index] += decays[index - step]
            step *= 2
        for index in range(1, radix, 2):

            @pl.when(ends[index] < num_chunks)
            def _(index=index):
                node(ends[index])[...] = nodes[index].astype(states_ref.dtype)

    ref = jax.new_ref(states.reshape(*states.shape[:3], elements))
    grid = dict(head=sizes.batch * heads, group=-(-num_nodes // radix), strip=elements // ELEMENTS)
    _call(body, "merge_states", grid, (), {}, sizes)(ref, node_decay)
    return jax.freeze(ref).reshape(states.shape)


def spread_gradients(
    state_gradients, states, above, node_decay, sizes: AttentionSizes, tiles: HopperTiles, size: int, radix: int
):
    """As `attention.triton.spread_gradients`."""
    heads, num_chunks = sizes.heads, sizes.num_chunks
    elements = sizes.key_dim * sizes.value_dim
    strips = elements // ELEMENTS
    num_nodes = node_decay.shape[2]

    def flat(x):
        return x.reshape(*x.shape[:3], elements)

    def body(read_ref, states_ref, decay_ref, *refs):
        *above_refs, gradients_ref, d_merge_ref = refs if size > 1 else (*refs[:-1], read_ref, refs[-1])
        z, group, strip = lax.axis_index("head"), lax.axis_index("group"), lax.axis_index("strip")
        sequence, head = lax.div(z, heads), lax.rem(z, heads)
        first, last = group * radix, num_nodes - 1

        def part(ref, index):
            return ref.at[sequence, head, index, pl.ds(strip * ELEMENTS, ELEMENTS)]

        decays = [decay_ref[sequence, head, jnp.minimum(first + index, last)] for index in range(radix)]
        top = plgpu.layout_cast(jnp.zeros((ELEMENTS,), F32), BY_THREAD)
        if above_refs:
            top = plgpu.load(part(above_refs[0], group), layout=BY_THREAD).astype(F32)
        # All is read before anything is written: the memory may be the same, and the reads go together.
        exists = [(first + index) * size < num_chunks for index in range(radix)]
        ends = [jnp.minimum((first + index) * size, num_chunks - 1) for index in range(radix)]
        reads, of_states = (
            [plgpu.load(part(ref, end), layout=BY_THREAD) for end in ends] for ref in (read_ref, states_ref)
        )

        def spread(start: int, count: int, gradient):
            """The gradient of `count` nodes together, from first + start, goes down to each."""
            if count == 1:

                @pl.when(first + start <= last)
                def _():
                    part(gradients_ref, first + start)[...] = gradient.astype(gradients_ref.dtype)

                return
            half = count // 2
            middle = start + half
            passed_on = jnp.exp2(sum(decays[middle : start + count])) * gradient
            read = jnp.where(exists[middle], reads[middle].astype(F32), 0.0)

            @pl.when(exists[middle])
            def _():
                d_merge_ref[sequence, head, first + middle, strip] = jnp.sum(of_states[middle].astype(F32) * passed_on)

            spread(start, half, passed_on + read)
            spread(middle, half, gradient)

        spread(0, radix, top)

    read_ref = jax.new_ref(flat(state_gradients))
    operands = [read_ref, flat(states), node_decay] + ([] if above is None else [flat(above)])
    shape = (sizes.batch, heads, num_nodes)
    gradients_type = jax.ShapeDtypeStruct((*shape, elements), states.dtype)
    d_merge_type = jax.ShapeDtypeStruct((*shape, strips), F32)
    out_type = [d_merge_type] if size == 1 else [gradients_type, d_merge_type]
    grid = dict(head=sizes.batch * heads, group=-(-num_nodes // radix), strip=strips)
    *gradients, d_merge = _call(body, "spread_gradients", grid, out_type, {}, sizes, column_sums=1024)(*operands)
    gradients = jax.freeze(read_ref) if size == 1 else gradients[0]
    return gradients.reshape(*shape, *states.shape[3:]), d_merge
