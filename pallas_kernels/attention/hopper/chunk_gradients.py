"""Gradients from pairs of tokens inside a chunk, and from each chunk's own state to its keys and values.

Sums over queries, for decays, come from dv: Σ_i P_ij (do_i·v_j) = v_j·Σ_i P_ij do_i. So that they and the sums over keys cancel
where they should, both are of the rounded weights P, and without a token's pair with itself, which does not decay.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float

from pallas_kernels.attention.hopper.heads import Heads
from pallas_kernels.attention.hopper.lams import Lams
from pallas_kernels.attention.hopper.pairs import LEVELS_IN_BLOCK, STRIP, STRIPS, LevelSums, Pairs, diagonal
from pallas_kernels.attention.hopper.tiles import HopperTiles
from pallas_kernels.attention.triton import AttentionSizes, ByToken, Decay, Keys, Lam, Values
from pallas_kernels.common.mosaic import (
    BLOCK,
    BY_COLUMN,
    BY_ROW,
    F32,
    PAIRS,
    TILE,
    by_token_type,
    columns_of,
    columnwise,
    exp2_of_decay,
    launch,
    limit_registers,
    most_slots,
    num_bytes,
    plain,
    product,
    products,
    program_index,
    rounded,
    rowwise,
    tiled,
    worker_index,
    write,
    zeros,
    zeros_by_row,
)
from pallas_kernels.common.ring import Ring

WIDE = 16  # keys of a strip of pairs between two blocks, which all have one level
WIDE_PAIRS = (BLOCK, WIDE)


def chunk_gradients(
    q: Keys,
    k: Keys,
    v: Values,
    do: Values,
    decay: Decay,
    lam: Lam,
    gradients: Float[Array, "B R N V K"] | None,
    sizes: AttentionSizes,
    tiles: HopperTiles,
) -> tuple[
    Float[Array, "parts B T G K"],
    Keys,
    Values,
    Float[Array, "B R inside T"] | None,
    list[ByToken],
    ByToken | None,
]:
    """As `attention.triton.chunk_gradients`.

    A program has a chunk and some heads, and a warpgroup for each block of keys. Several programs of a group's heads have a
    part of dq and dk each, in float32. With two blocks of tokens, what the pairs of both add to the gradient of decays is an
    array of its own.
    """
    decay = decay[0]
    # Where keys and values of a head's own are larger than these, those of the next head find no room beside them.
    alone = sizes.group_heads == 1 and max(sizes.key_dim, sizes.value_dim) > 64
    heads = Heads(sizes, 1 if alone else tiles.chunk_gradients)
    lams = Lams(lam, sizes.levels_inside, sizes)
    rows, key_dim, value_dim = sizes.chunk // BLOCK, sizes.key_dim, sizes.value_dim

    def keys_of(slots: int):
        return dict(k=tiled(slots, rows, BLOCK, key_dim), q=tiled(slots, rows, BLOCK, key_dim))

    def slots(depth: int):
        """Shared memory for so many heads."""
        return ({} if heads.share_keys else keys_of(depth)) | dict(
            v=tiled(depth, rows, BLOCK, value_dim),
            do=tiled(depth, rows, BLOCK, value_dim),
            decay=plain(depth, rows, BLOCK),
            lam=lams.slots(depth, rows),
        )

    def gradient_slots(depth: int):
        """For so many blocks of values of the gradient of a state."""
        return {} if gradients is None else dict(gradient=tiled(depth, BLOCK, key_dim))

    once = dict(weights=tiled(rows, *PAIRS)) | (keys_of(1) if heads.share_keys else {})
    if rows > 1:
        once["between"] = plain(STRIPS, BLOCK, STRIP)
    once["d_scores"] = plain(rows, STRIPS, BLOCK, STRIP) if heads.share_keys else tiled(rows, *PAIRS)
    depth = most_slots(num_bytes(once | gradient_slots(1)), num_bytes(slots(1)), min(heads.number, 2))
    gradient_depth = most_slots(
        num_bytes(once | slots(depth)), num_bytes(gradient_slots(1)) or 1, depth * value_dim // BLOCK
    )
    barriers = dict(
        keys_full=plgpu.Barrier(num_arrivals=2 * rows),
        full=plgpu.Barrier(num_arrivals=3 + lams.copies + 2 * (not heads.share_keys), num_barriers=depth * rows),
        empty=plgpu.Barrier(num_arrivals=rows, num_barriers=depth),
        gradient_full=plgpu.Barrier(num_barriers=gradient_depth),
        gradient_empty=plgpu.Barrier(num_arrivals=rows, num_barriers=gradient_depth),
        between_done=plgpu.Barrier(),
        between_read=plgpu.Barrier(),
    )

    def body(ref, shared):
        index, worker = program_index("chunk"), worker_index()
        program = _Program(
            ref, shared, sizes, heads, lams, depth, gradient_depth, index, worker, heads.sequence, heads.first
        )

        @pl.when(program.worker == rows)
        def _fetch():
            limit_registers(40, "decrease", sizes)
            _fetch_all(program)

        @pl.when(program.worker < rows)
        def _multiply():
            limit_registers(232, "increase", sizes)
            _multiply_all(program)

    by_token = by_token_type(sizes)
    inputs = dict(q=q, k=k, v=v, do=do, decay=decay, lam=lams.operand, gradients=gradients)
    results = dict(
        dq=jax.ShapeDtypeStruct((heads.parts, *q.shape), q.dtype if heads.parts == 1 else F32),
        dk=jax.ShapeDtypeStruct((heads.parts, *k.shape), k.dtype if heads.parts == 1 else F32),
        dv=jax.ShapeDtypeStruct(v.shape, v.dtype),
        dlam=None if sizes.one_state else by_token_type(sizes, sizes.levels_inside),
        of_block=by_token,
        of_keys=None if gradients is None else by_token,
        of_two_blocks=by_token if rows > 1 else None,
    )
    grid = dict(**heads.axes, chunk=sizes.num_chunks)
    shared = once | slots(depth) | gradient_slots(gradient_depth) | barriers
    found = launch(body, "chunk_gradients", grid, inputs, results, shared, sizes, warpgroups=rows + 1)
    dk = jnp.sum(found.dk, axis=0).astype(k.dtype) if len(found.dk) > 1 else found.dk[0]
    of_queries = [x for x in (found.of_block, found.of_two_blocks) if x is not None]
    return found.dq, dk, found.dv, found.dlam, of_queries, found.of_keys


@dataclasses.dataclass(frozen=True)
class _Program:
    """A program: its memory by name, its chunk (`index`) and heads, and which block of tokens this warpgroup multiplies.

    The warpgroup after those of all blocks fetches. Where there are several slots, the next head releases that of the one
    before it, whose dv leaves it meanwhile. sequence, first: of `heads`.
    """

    ref: Any
    shared: Any
    sizes: AttentionSizes
    heads: Heads
    lams: Lams
    depth: int
    gradient_depth: int
    index: Any
    worker: Any
    sequence: Any
    first: Any

    def __post_init__(self):
        assert self.releases_late or not self.heads.own_keys  # else a head's keys would go before they are used

    @property
    def rows(self) -> int:
        return self.sizes.chunk // BLOCK

    @property
    def key_shape(self) -> tuple[int, int]:
        return BLOCK, self.sizes.key_dim

    @property
    def value_shape(self) -> tuple[int, int]:
        return BLOCK, self.sizes.value_dim

    @property
    def value_parts(self) -> int:
        """Blocks of values of a state."""
        return self.sizes.value_dim // BLOCK

    @property
    def own_weights(self):
        return self.shared.weights.at[self.worker]

    @property
    def d_scores(self):
        """Gradients of the block's scores: in float32 by strips, of all heads with the same keys; of one head in bfloat16."""
        return self.shared.d_scores.at[self.worker]

    @property
    def ring(self) -> Ring:
        """Slots of heads. Each block of tokens has a barrier of its own that says when the slot is full: `wait`."""
        return Ring(None, self.shared.empty, self.depth)

    @property
    def gradients(self) -> Ring:
        """Slots of blocks of values, of the gradients of chunks' states."""
        return Ring(self.shared.gradient_full, self.shared.gradient_empty, self.gradient_depth)

    def full_at(self, slot, row):
        """The barrier at which copies of this block of tokens into the slot arrive."""
        return self.shared.full.at[slot * self.rows + row]

    @property
    def releases_late(self) -> bool:
        return self.depth > 1

    def tokens(self, row):
        return pl.ds(self.index * self.sizes.chunk + row * BLOCK, BLOCK)

    def place_of_keys(self, number):
        """Where dq and dk of the head of this number, and those that share its keys, are for this block."""
        return self.heads.part, self.sequence, self.tokens(self.worker), self.heads.group(number)

    def release(self, number) -> None:
        """Releases the slot of a head, once its dv has left it."""
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        self.ring.release(self.ring.slot(number))


@dataclasses.dataclass(frozen=True)
class _Head:
    """A head of a program: its number there and in the sequence, its slot, and that of its keys."""

    program: _Program
    number: Any
    head: Any
    slot: Any
    keys: Any

    @property
    def values(self):
        """The block's values; in the end dv takes their place."""
        return self.program.shared.v.at[self.slot, self.program.worker]

    def do(self, row):
        return self.program.shared.do.at[self.slot, row]

    def since(self, row):
        """Decay since the chunk's start, by row."""
        return plgpu.load(self.program.shared.decay.at[self.slot, row], layout=BY_ROW)

    def since_key(self, first: int, number: int):
        """The same of some keys of the block, by column."""
        here = self.program.shared.decay.at[self.slot, self.program.worker, pl.ds(first, number)]
        return plgpu.load(here, layout=BY_COLUMN)

    def lam(self, level: int, row):
        return self.program.lams.load(self.program.shared.lam, self.slot, row, self.head, level)

    def weigh(self, row):
        """(scores, do·v) of a block of queries with the own keys and values."""
        shared, worker = self.program.shared, self.program.worker
        queries, gradient = shared.q.at[self.keys, row], self.do(row)
        return products((queries, shared.k.at[self.keys, worker].T, PAIRS), (gradient, self.values.T, PAIRS))


def _fetch_all(program: _Program) -> None:
    """What the warpgroup that fetches does."""
    ref, shared, heads, lams, ring = program.ref, program.shared, program.heads, program.lams, program.ring
    sequence, rows, tokens = program.sequence, program.rows, program.tokens
    keys = [(ref.q, shared.q), (ref.k, shared.k)]
    if heads.share_keys:
        heads.fetch(keys, 0, 0, {row: tokens(row) for row in range(rows)}, shared.keys_full)

    def fetch(number, _):
        head, slot = program.first + number, ring.to_fill(number)
        for row in range(rows):
            full, here = program.full_at(slot, row), (sequence, tokens(row))
            if not heads.share_keys:
                heads.fetch(keys, number, slot, {row: tokens(row)}, full)
            plgpu.copy_gmem_to_smem(ref.v.at[*here, head], shared.v.at[slot, row], full)
            plgpu.copy_gmem_to_smem(ref.do.at[*here, head], shared.do.at[slot, row], full)
            plgpu.copy_gmem_to_smem(ref.decay.at[sequence, head, tokens(row)], shared.decay.at[slot, row], full)
            lams.fetch(ref.lam, sequence, tokens(row), head, shared.lam, slot, row, full)
        if ref.gradients is not None:
            for part in range(program.value_parts):
                place = program.gradients.to_fill(number * program.value_parts + part)
                source = ref.gradients.at[sequence, head, program.index, pl.ds(part * BLOCK, BLOCK)]
                plgpu.copy_gmem_to_smem(source, shared.gradient.at[place], program.gradients.full_at(place))

    lax.fori_loop(0, heads.number, fetch, None)
    ring.drain(heads.number)
    if ref.gradients is not None:
        program.gradients.drain(heads.number * program.value_parts)


def _multiply_all(program: _Program) -> None:
    """What a warpgroup that multiplies does, for its block of keys."""
    shared, heads, worker = program.shared, program.heads, program.worker
    if heads.share_keys:
        plgpu.barrier_wait(shared.keys_full)
    own_scores = None  # of each query with its own key, if they are the same for several heads
    if heads.share_keys:
        own_scores = diagonal(product(shared.q.at[0, worker], shared.k.at[0, worker].T, PAIRS))
        for strip in range(STRIPS):
            shared.d_scores[worker, strip] = zeros(STRIP)
        if program.rows > 1:

            @pl.when(worker == 0)
            def _():
                for strip in range(STRIPS):
                    shared.between[strip] = zeros(STRIP)

    def with_own_dk(number):
        """dq and dk of a head with keys of its own; dk takes no registers before the head's end."""
        add_rest = _one_head(program, number, own_scores)

        def add(dk_sum):
            add_rest(dk_sum)
            return _finish(program, number, dk_sum)

        write_dk(number, pl.run_scoped(add, plgpu.ACC(program.key_shape, F32)))

    def with_shared_dk(dk_sum):
        lax.fori_loop(0, heads.number, lambda number, _: _one_head(program, number, own_scores)(dk_sum), None)
        program.own_weights[...] = _loaded(program.d_scores).astype(shared.weights.dtype)
        return _finish(program, 0, dk_sum)

    def write_dk(number, dk):
        write(program.ref.dk.at[program.place_of_keys(number)], dk, program.sizes)

    def of_own_keys(number, _):
        with_own_dk(number)
        if program.rows == 2:

            @pl.when(jnp.logical_and(worker == 1, number < heads.number - 1))
            def _():
                plgpu.barrier_arrive(program.shared.between_read)

    if heads.share_keys:
        write_dk(0, pl.run_scoped(with_shared_dk, plgpu.ACC(program.key_shape, F32)))
    else:
        lax.fori_loop(0, heads.number, of_own_keys, None)
    if program.releases_late:
        program.release(heads.number - 1)
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)


def _one_head(program: _Program, number, own_scores):
    """Puts d_scores of a head into shared memory, or adds them there where heads share keys; returns a function that adds the
    rest of the gradients of its keys to dk_sum. Both write what is the head's own."""
    program = dataclasses.replace(program, worker=lax.optimization_barrier(program.worker))
    worker, head_number, slot = program.worker, program.first + number, program.ring.slot(number)
    head = _Head(program, number, head_number, slot, program.heads.key_slot(slot))
    plgpu.barrier_wait(program.full_at(slot, worker))
    since = head.since(worker)
    by_query, own_weight, dv = _own_block(head, since, own_scores)
    if program.rows > 1:
        dv = lax.fori_loop(worker + 1, program.rows, lambda row, dv: dv + _between_block(head, row), dv)
    own_values = plgpu.load(head.values, layout=TILE).astype(F32)
    here = (program.sequence, head.head)
    program.ref.of_block[*here, program.tokens(worker)] = by_query - jnp.sum(own_values * dv, axis=1)
    dv += rowwise(own_weight, program.value_shape) * plgpu.load(head.do(worker), layout=TILE).astype(F32)

    def add_rest(dk_sum):
        gradient = dv
        if program.ref.gradients is not None:
            gradient = _tree_part(head, since, gradient, dk_sum)
        plgpu.commit_smem()  # after the products that read the values
        head.values[...] = gradient.astype(head.values.dtype)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(head.values, program.ref.dv.at[program.sequence, program.tokens(worker), head.head])
        if not program.releases_late:
            program.release(number)

    return add_rest


def _own_block(head: _Head, since, own_scores):
    """(The sum of each query's weights for its decay, its weight of its own key, dv without that), of pairs of the block's
    queries and keys. Puts or adds their d_scores into shared memory."""
    program, ref = head.program, head.program.ref
    worker, here = program.worker, (program.sequence, head.head)
    scores, d_weights = head.weigh(worker)
    if program.releases_late:

        @pl.when(head.number > 0)
        def _():
            program.release(head.number - 1)

    own = [head.lam(level, worker) for level in range(LEVELS_IN_BLOCK)]
    own_weight = own[0] * (diagonal(scores) if own_scores is None else own_scores)
    near_lam = Pairs().near_lam(own)
    weights, d_scores = [], []
    by_query, d_lams = zeros(STRIP), LevelSums()
    for strip in range(STRIPS):
        pairs = Pairs()
        decayed = pairs.decay(strip, since, head.since_key(strip * STRIP, STRIP))
        lam = pairs.lam(strip, near_lam, own)
        of_scores, of_weights = columns_of(scores, strip, STRIP), columns_of(d_weights, strip, STRIP)
        weight = jnp.where(pairs.is_before(strip), of_scores * decayed * lam, 0.0)
        weight = rounded(weight, program.own_weights.dtype)
        by_query += weight.astype(F32) * of_weights
        of_weights *= decayed
        if ref.dlam is not None:
            d_lams.add(strip, pairs, of_scores * of_weights)
        d_score = lam * of_weights
        if program.heads.share_keys:
            d_score += plgpu.load(program.d_scores.at[strip], layout=TILE)
            program.d_scores[strip] = d_score
        weight, d_score, near_lam, by_query = d_lams.keep(weight, d_score, near_lam, by_query)
        weights.append(weight)
        d_scores.append(d_score)
    if program.rows == 2 and program.heads.own_keys:

        @pl.when(jnp.logical_and(worker == 0, head.number > 0))
        def _():
            plgpu.barrier_wait(program.shared.between_read)

    program.own_weights[...] = jnp.concatenate(weights, axis=1)
    if not program.heads.share_keys:
        program.d_scores[...] = jnp.concatenate(d_scores, axis=1).astype(program.d_scores.dtype)
    plgpu.commit_smem()
    by_query = jnp.sum(by_query, axis=1)
    for level, d_lam in enumerate(d_lams.sums(Pairs()) if ref.dlam is not None else ()):
        ref.dlam[*here, level, program.tokens(worker)] = d_lam
    if program.rows > 1:

        @pl.when(worker == 0)
        def _():
            # The pairs of the two blocks are of the last level, and no other tokens have any of it.
            nothing = zeros_by_row()
            if ref.dlam is not None:
                ref.dlam[*here, LEVELS_IN_BLOCK, program.tokens(0)] = nothing
            ref.of_two_blocks[*here, program.tokens(0)] = nothing

    dv = product(program.own_weights.T, head.do(worker), program.value_shape)
    return by_query, own_weight, dv


def _between_block(head: _Head, row):
    """dv from the queries of a later block. Writes dλ and the weights for decays of those queries, and puts or adds the
    gradients of scores into shared memory."""
    program, shared, ref = head.program, head.program.shared, head.program.ref
    worker, here = program.worker, (program.sequence, head.head)
    plgpu.barrier_wait(program.full_at(head.slot, row))
    scores, d_weights = head.weigh(row)
    last = shared.decay[head.slot, worker, BLOCK - 1]
    to_query = exp2_of_decay(head.since(row) - last)
    by_row = to_query * head.lam(LEVELS_IN_BLOCK, row)
    weights, d_lam_sum, weighted_sum = [], zeros(WIDE), zeros(WIDE)
    for part in range(BLOCK // WIDE):
        from_key = columnwise(exp2_of_decay(last - head.since_key(part * WIDE, WIDE)), WIDE_PAIRS)
        of_scores = columns_of(scores, part, WIDE) * from_key
        of_weights = columns_of(d_weights, part, WIDE)
        weights_part = rounded(of_scores * rowwise(by_row, WIDE_PAIRS), program.own_weights.dtype)
        d_lam_sum += of_scores * of_weights
        weighted_sum += weights_part.astype(F32) * of_weights
        d_between = rowwise(by_row, WIDE_PAIRS) * from_key * of_weights
        for column in range(WIDE // STRIP):
            d_strip, sums = columns_of(d_between, column, STRIP), shared.between.at[part * (WIDE // STRIP) + column]
            sums[...] = d_strip + plgpu.load(sums, layout=TILE) if program.heads.share_keys else d_strip
        weights.append(weights_part)
    plgpu.commit_smem()  # after the product that read the weights before
    program.own_weights[...] = jnp.concatenate(weights, axis=1)
    plgpu.commit_smem()

    if ref.dlam is not None:
        ref.dlam[*here, LEVELS_IN_BLOCK, program.tokens(row)] = to_query * jnp.sum(d_lam_sum, axis=1)
    ref.of_two_blocks[*here, program.tokens(row)] = jnp.sum(weighted_sum, axis=1)
    return product(program.own_weights.T, head.do(row), program.value_shape)


def _loaded(strips):
    """A tile of pairs, from shared memory [strip, query, key]."""
    return jnp.concatenate([plgpu.load(strips.at[strip], layout=TILE) for strip in range(STRIPS)], axis=1)


def _tree_part(head: _Head, since, dv, dk_sum):
    """dv with what later chunks give to the block's values by way of the chunk's state; adds what they give to its keys."""
    program, shared, worker = head.program, head.program.shared, head.program.worker
    values = head.values
    until_end = exp2_of_decay(shared.decay[head.slot, program.rows - 1, BLOCK - 1] - since)
    own_values = plgpu.load(values, layout=TILE).astype(F32)  # again, as registers are few
    values[...] = (rowwise(until_end, program.value_shape) * own_values).astype(values.dtype)
    plgpu.commit_smem()
    dv_parts, of_keys = [], zeros_by_row()
    for part in range(program.value_parts):
        slot = lax.optimization_barrier(program.gradients.slot(head.number * program.value_parts + part))
        gradient, part_values = shared.gradient.at[slot], values.at[:, pl.ds(part * BLOCK, BLOCK)]
        program.gradients.wait(slot)
        plgpu.wgmma(dk_sum, part_values, gradient)
        of_state = product(shared.k.at[head.keys, worker], gradient.T, PAIRS)
        of_keys += jnp.sum(of_state * plgpu.load(part_values, layout=TILE).astype(F32), axis=1)
        dv_parts.append(columns_of(dv, part, BLOCK) + rowwise(until_end, PAIRS) * of_state)
        plgpu.wgmma_wait(0)
        program.gradients.release(slot)
    program.ref.of_keys[program.sequence, head.head, program.tokens(worker)] = of_keys
    return jnp.concatenate(dv_parts, axis=1)


def _finish(program: _Program, number, dk_sum):
    """dk of the head of this number and of those that share its keys, from all their scores' gradients; writes their dq."""
    shared, worker, own_weights = program.shared, program.worker, program.own_weights
    keys = program.heads.key_slot(program.ring.slot(number))
    plgpu.commit_smem()
    d_scores = own_weights if program.heads.share_keys else program.d_scores
    plgpu.wgmma(dk_sum, d_scores.T, shared.q.at[keys, worker])

    def of_queries(dq_sum):
        plgpu.wgmma(dq_sum, d_scores, shared.k.at[keys, worker])
        if program.rows == 2:

            @pl.when(worker == 1)
            def _():
                plgpu.barrier_wait(program.shared.between_done)  # the other one has waited for the first block's keys
                plgpu.wgmma(dq_sum, shared.weights.at[0], shared.k.at[keys, 0])

        return dq_sum[...]

    write(
        program.ref.dq.at[program.place_of_keys(number)],
        pl.run_scoped(of_queries, plgpu.ACC(program.key_shape, F32)),
        program.sizes,
    )
    if program.rows == 2:

        @pl.when(worker == 0)
        def _():
            plgpu.commit_smem()  # after the products that read the weights
            own_weights[...] = _loaded(shared.between).astype(own_weights.dtype)
            plgpu.commit_smem()
            plgpu.barrier_arrive(program.shared.between_done)
            plgpu.wgmma(dk_sum, own_weights.T, shared.q.at[keys, 1])

    return dk_sum[...]
