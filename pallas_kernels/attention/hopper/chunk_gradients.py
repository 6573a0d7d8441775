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
from pallas_kernels.attention.hopper.parts import (
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
from pallas_kernels.attention.hopper.ring import Ring
from pallas_kernels.attention.hopper.tiles import HopperTiles
from pallas_kernels.attention.triton import AttentionSizes, ByToken, Decay, Keys, Lam, Values

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
        return (keys_of(depth) if heads.own_keys else {}) | dict(
            v=tiled(depth, rows, BLOCK, value_dim),
            do=tiled(depth, rows, BLOCK, value_dim),
            gradient=tiled(depth, value_dim, key_dim),
            decay=plain(depth, rows, BLOCK),
            lam=lams.slots(depth, rows),
        )

    once = dict(weights=tiled(rows, *PAIRS)) | ({} if heads.own_keys else keys_of(1))
    if rows > 1:
        once["between"] = tiled(*PAIRS, dtype=F32)
    depth = most_slots(num_bytes(once), num_bytes(slots(1)), 2)
    of_tree = 0 if gradients is None else 1
    barriers = (
        plgpu.Barrier(num_arrivals=2 * rows),
        plgpu.Barrier(num_arrivals=(3 + lams.copies + 2 * heads.own_keys) * rows + of_tree, num_barriers=depth),
        plgpu.Barrier(num_arrivals=rows, num_barriers=depth),
        plgpu.Barrier(),
        plgpu.Barrier(),
    )

    def body(ref, shared):
        index, worker = program_index("chunk"), worker_index()
        program = _Program(ref, shared, sizes, heads, lams, depth, index, worker, heads.sequence, heads.first)

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
    shared = once | slots(depth) | dict(barriers=barriers)
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
    def own_weights(self):
        return self.shared.weights.at[self.worker]

    @property
    def arrived(self):
        """The barrier of queries and keys that all heads share."""
        return self.shared.barriers[0]

    @property
    def ring(self) -> Ring:
        """Slots of heads."""
        return Ring(self.shared.barriers[1], self.shared.barriers[2], self.depth)

    @property
    def between_done(self):
        """The barrier that says to the second block that gradients between the blocks are in shared memory."""
        return self.shared.barriers[3]

    @property
    def between_read(self):
        """The barrier that says to the first block that the second has read them."""
        return self.shared.barriers[4]

    @property
    def releases_late(self) -> bool:
        return self.depth > 1

    def tokens(self, row):
        return pl.ds(self.index * self.sizes.chunk + row * BLOCK, BLOCK)

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
    keys, blocks = [(ref.q, shared.q), (ref.k, shared.k)], [tokens(row) for row in range(rows)]
    if not heads.own_keys:
        heads.fetch(keys, 0, 0, blocks, program.arrived)

    def fetch(number, _):
        head, slot = program.first + number, ring.to_fill(number)
        full = ring.full_at(slot)
        if heads.own_keys:
            heads.fetch(keys, number, slot, blocks, full)
        for row in range(rows):
            plgpu.copy_gmem_to_smem(ref.v.at[sequence, tokens(row), head], shared.v.at[slot, row], full)
            plgpu.copy_gmem_to_smem(ref.do.at[sequence, tokens(row), head], shared.do.at[slot, row], full)
            plgpu.copy_gmem_to_smem(ref.decay.at[sequence, head, tokens(row)], shared.decay.at[slot, row], full)
            lams.fetch(ref.lam, sequence, tokens(row), head, shared.lam, slot, row, full)
        if ref.gradients is not None:
            plgpu.copy_gmem_to_smem(ref.gradients.at[sequence, head, program.index], shared.gradient.at[slot], full)

    lax.fori_loop(0, heads.number, fetch, None)
    ring.drain(heads.number)


def _multiply_all(program: _Program) -> None:
    """What a warpgroup that multiplies does, for its block of keys."""
    shared, heads, worker = program.shared, program.heads, program.worker
    if not heads.own_keys:
        plgpu.barrier_wait(program.arrived)
    own_scores = None  # of each query with its own key, if they are the same for several heads
    if heads.number > 1 and not heads.own_keys:
        own_scores = diagonal(product(shared.q.at[0, worker], shared.k.at[0, worker].T, PAIRS))

    def of_heads(start, stop):
        """dq and dk of heads with the same keys."""
        here = (heads.part, program.sequence, program.tokens(worker), heads.group(start))

        def finish(d_scores, dk_sum):
            return _finish(program, d_scores, dk_sum, heads.key_slot(lax.rem(start, program.depth)), here)

        def of_one_head(number, d_scores):
            """(its d_scores, what adds the rest of its gradients to dk_sum)."""
            return _one_head(program, number, start, d_scores, own_scores)

        def add_heads(dk_sum):
            def add(number, d_scores):
                d_scores, add_rest = of_one_head(number, d_scores)
                add_rest(dk_sum)
                return d_scores

            return finish(lax.fori_loop(start, stop, add, (zeros(STRIP),) * STRIPS), dk_sum)

        dk_type = plgpu.ACC(program.key_shape, F32)
        if heads.own_keys or heads.number == 1:  # then dk takes no registers before the end
            d_scores, add_rest = of_one_head(start, (zeros(STRIP),) * STRIPS)
            d_scores = lax.optimization_barrier([x.astype(program.shared.weights.dtype) for x in d_scores])

            def add_head(dk_sum):
                add_rest(dk_sum)
                return finish(d_scores, dk_sum)

            dk = pl.run_scoped(add_head, dk_type)
        else:
            dk = pl.run_scoped(add_heads, dk_type)
        write(program.ref.dk.at[here], dk, program.sizes)

    def of_own_keys(number, _):
        of_heads(number, number + 1)
        if program.rows == 2:

            @pl.when(jnp.logical_and(worker == 1, number < heads.number - 1))
            def _():
                plgpu.barrier_arrive(program.between_read)

    if heads.own_keys:
        lax.fori_loop(0, heads.number, of_own_keys, None)
    else:
        of_heads(0, heads.number)
    if program.releases_late:
        program.release(heads.number - 1)
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)


def _one_head(program: _Program, number, first_of_keys, d_scores, own_scores):
    """(d_scores with those of a head, a function that adds the rest of its gradients to dk_sum). Both write what is the head's
    own. first_of_keys: the first head with these keys."""
    worker, head_number, slot = program.worker, program.first + number, program.ring.slot(number)
    head = _Head(program, number, head_number, slot, program.heads.key_slot(slot))
    program.ring.wait(slot)
    since = head.since(worker)
    d_scores, by_query, own_weight, dv = _own_block(head, since, d_scores, own_scores)
    if program.rows > 1:
        dv = lax.fori_loop(worker + 1, program.rows, lambda row, dv: dv + _between_block(head, row, first_of_keys), dv)
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

    return d_scores, add_rest


def _own_block(head: _Head, since, d_scores, own_scores):
    """(d_scores with those of pairs of the block's queries and keys, the sum of each query's weights for its decay, its weight
    of its own key, dv without that)."""
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
    weights, new_d_scores = [], []
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
        weight, d_score, near_lam, by_query = d_lams.keep(
            weight, d_scores[strip] + lam * of_weights, near_lam, by_query
        )
        weights.append(weight)
        new_d_scores.append(d_score)
    if program.rows == 2 and program.heads.own_keys:

        @pl.when(jnp.logical_and(worker == 0, head.number > 0))
        def _():
            plgpu.barrier_wait(program.between_read)

    program.own_weights[...] = jnp.concatenate(weights, axis=1)
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
    return tuple(new_d_scores), by_query, own_weight, dv


def _between_block(head: _Head, row, first_of_keys):
    """dv from the queries of a later block. Writes dλ and the weights for decays of those queries, and adds the gradients of
    scores in shared memory."""
    program, shared, ref = head.program, head.program.shared, head.program.ref
    worker, here = program.worker, (program.sequence, head.head)
    scores, d_weights = head.weigh(row)
    last = shared.decay[head.slot, worker, BLOCK - 1]
    to_query = exp2_of_decay(head.since(row) - last)
    by_row = to_query * head.lam(LEVELS_IN_BLOCK, row)
    weights, d_betweens, d_lam_sum, weighted_sum = [], [], zeros(WIDE), zeros(WIDE)
    for part in range(BLOCK // WIDE):
        from_key = columnwise(exp2_of_decay(last - head.since_key(part * WIDE, WIDE)), WIDE_PAIRS)
        of_scores = columns_of(scores, part, WIDE) * from_key
        of_weights = columns_of(d_weights, part, WIDE)
        weights_part = rounded(of_scores * rowwise(by_row, WIDE_PAIRS), program.own_weights.dtype)
        d_lam_sum += of_scores * of_weights
        weighted_sum += weights_part.astype(F32) * of_weights
        d_betweens.append(rowwise(by_row, WIDE_PAIRS) * from_key * of_weights)
        weights.append(weights_part)
    plgpu.commit_smem()  # after the product that read the weights before
    program.own_weights[...] = jnp.concatenate(weights, axis=1)
    plgpu.commit_smem()
    d_between = jnp.concatenate(d_betweens, axis=1)

    @pl.when(head.number == first_of_keys)
    def _():
        shared.between[...] = d_between

    @pl.when(head.number > first_of_keys)
    def _():
        shared.between[...] = plgpu.load(shared.between, layout=TILE) + d_between

    if ref.dlam is not None:
        ref.dlam[*here, LEVELS_IN_BLOCK, program.tokens(row)] = to_query * jnp.sum(d_lam_sum, axis=1)
    ref.of_two_blocks[*here, program.tokens(row)] = jnp.sum(weighted_sum, axis=1)
    return product(program.own_weights.T, head.do(row), program.value_shape)


def _tree_part(head: _Head, since, dv, dk_sum):
    """dv with what later chunks give to the block's values by way of the chunk's state; adds what they give to its keys."""
    program, shared, worker = head.program, head.program.shared, head.program.worker
    gradient, values = shared.gradient.at[head.slot], head.values
    until_end = exp2_of_decay(shared.decay[head.slot, program.rows - 1, BLOCK - 1] - since)
    own_values = plgpu.load(values, layout=TILE)
    values[...] = (rowwise(until_end, program.value_shape) * own_values.astype(F32)).astype(values.dtype)
    plgpu.commit_smem()
    plgpu.wgmma(dk_sum, values, gradient)
    dv_parts, of_keys = [], zeros_by_row()
    for part in range(program.sizes.value_dim // BLOCK):
        from_state = product(shared.k.at[head.keys, worker], gradient.at[pl.ds(part * BLOCK, BLOCK)].T, PAIRS)
        from_later = rowwise(until_end, PAIRS) * from_state
        of_keys += jnp.sum(from_later * columns_of(own_values, part, BLOCK).astype(F32), axis=1)
        dv_parts.append(columns_of(dv, part, BLOCK) + from_later)
    program.ref.of_keys[program.sequence, head.head, program.tokens(worker)] = of_keys
    plgpu.wgmma_wait(0)
    return jnp.concatenate(dv_parts, axis=1)


def _finish(program: _Program, d_scores, dk_sum, keys, here):
    """dk of the keys in this slot, of the scores' gradients from all heads; writes dq of the queries there."""
    shared, worker, own_weights = program.shared, program.worker, program.own_weights
    own_weights[...] = jnp.concatenate(d_scores, axis=1).astype(own_weights.dtype)
    plgpu.commit_smem()
    plgpu.wgmma(dk_sum, own_weights.T, shared.q.at[keys, worker])

    def of_queries(dq_sum):
        plgpu.wgmma(dq_sum, own_weights, shared.k.at[keys, worker])
        if program.rows == 2:

            @pl.when(worker == 1)
            def _():
                plgpu.barrier_wait(program.between_done)
                plgpu.wgmma(dq_sum, shared.weights.at[0], shared.k.at[keys, 0])

        return dq_sum[...]

    write(program.ref.dq.at[here], pl.run_scoped(of_queries, plgpu.ACC(program.key_shape, F32)), program.sizes)
    if program.rows == 2:

        @pl.when(worker == 0)
        def _():
            plgpu.commit_smem()  # after the products that read the weights
            own_weights[...] = plgpu.load(shared.between, layout=TILE).astype(own_weights.dtype)
            plgpu.commit_smem()
            plgpu.barrier_arrive(program.between_done)
            plgpu.wgmma(dk_sum, own_weights.T, shared.q.at[keys, 1])

    return dk_sum[...]
