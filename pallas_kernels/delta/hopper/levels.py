"""The delta rule's states of all levels from chunk to chunk, and what each token reads of them, with the gradient, on Hopper
GPUs in bfloat16, by the Mosaic GPU lowering of Pallas. A chunk has 64 tokens.

A state S before a chunk is γ S - D S after it; `passes` says which states a chunk has and how they are joined. Names and
shapes are those of `delta.tree`, but decay, lost and states are of the chunks alone. Beside them, of a pass:

  own              [B, H, N / stride, K, V]      the states that join its levels, one every `stride` chunks
  before, d_after  [B, H, levels, N / 2, V, K]   the states that chunks have; the gradients of what they make of them

Inside a program, which has 64 columns of V, a state is [V, K]. States and gradients are carried times -1, as products are only
ever added. One warpgroup fetches, one reads or weighs, the others carry two levels each. Each pass rounds o to bfloat16.
"""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.common.mosaic import (
    BLOCK,
    BY_ROW,
    F32,
    PAIRS,
    TILE,
    add_products,
    add_to_tiles,
    launch,
    limit_registers,
    most_slots,
    num_bytes,
    plain,
    program_index,
    rounded,
    rowwise,
    tiled,
    worker_index,
    zeros,
)
from pallas_kernels.common.partition import of_no_axes
from pallas_kernels.common.ring import Ring, ring_barriers
from pallas_kernels.delta.hopper.level_gradients import level_gradients
from pallas_kernels.delta.hopper.passes import (
    Pass,
    for_target,
    if_has,
    map_slots,
    maps_of,
    passes_for,
    store_negative,
    zero_states,
)
from pallas_kernels.delta.hopper.place import FETCHING, Place, fetch_parts, load_by_row, load_tile
from pallas_kernels.delta.tree import MapSizes

# Registers of a thread that carries, and of one that reads or weighs: so many that next to nothing is spilled.
FORWARD, BACKWARD = (184, 120), (200, 88)


def forward(*operands, sizes: MapSizes, keep: bool):
    """(o, and for the gradient `before` of each pass), from inside, reads, lam, decay, lost and states."""
    out, reads, lam, decay, lost, own = map(of_no_axes, operands)
    sizes, kept = dataclasses.replace(sizes, batch=reads.shape[0], heads=reads.shape[1]), []
    for one in passes_for(sizes):
        out, own, before = _carry(out, reads, lam, decay, lost, own, sizes, one, keep)
        kept.append(before)
    return (out, *kept) if keep else (out,)


def backward(*operands, sizes: MapSizes):
    """The gradients of reads, lam, decay, lost and states, from do, the first four of these, and `before` of each pass."""
    do, reads, lam, decay, lost, *before = map(of_no_axes, operands)
    sizes = dataclasses.replace(sizes, batch=reads.shape[0], heads=reads.shape[1])
    do, d_own, d_after = do.astype(reads.dtype), None, []
    for one in reversed(passes_for(sizes)):
        d_own, found = _carry_back(do, reads, lam, decay, lost, d_own, sizes, one)
        d_after.insert(0, found)
    d_reads, d_lam, d_decay, d_lost = level_gradients(do, reads, lam, before, d_after, sizes)
    return d_reads, d_lam, d_decay, d_lost, d_own


def _carry(inside, reads, lam, decay, lost, own, sizes: MapSizes, one: Pass, keep: bool):
    """(o; `own` of the next pass, None in the last; before, if `keep`)."""
    blocks, workers = sizes.key_dim // BLOCK, one.workers
    rows, read_worker, fetch_worker = range(blocks), workers, workers + 1

    def slots(depth: int):
        of_chunk = dict(own=tiled(depth, blocks, *PAIRS), lam=plain(depth, one.num_levels, BLOCK))
        return map_slots(depth, blocks) | of_chunk

    once = dict(levels=tiled(one.num_levels, blocks, *PAIRS), joined=tiled(blocks, *PAIRS), out=tiled(*PAIRS))
    depth = most_slots(num_bytes(once), num_bytes(slots(1)), 3)

    def body(ref, shared):
        block, worker = program_index("block"), worker_index()
        place, (start, count) = Place(sizes, program_index("head")), one.chunks()
        ring, levels, joined = Ring(*shared.of_ring, depth), Ring(*shared.of_levels, 1), Ring(*shared.of_joined, 1)

        @pl.when(worker == fetch_worker)
        def _fetch():
            limit_registers(FETCHING, "decrease", sizes)

            def fetch(number, _):
                slot, chunk = ring.to_fill(number), start + number
                joining = (one.joined_at(chunk),)
                parts = [
                    *maps_of(place, ref, shared, slot, chunk, blocks),
                    *((place.tile(ref.own, joining, row, block), shared.own.at[slot, row]) for row in rows),
                    (place.levels(ref.lam, chunk, one.first, one.num_levels), shared.lam.at[slot]),
                ]
                fetch_parts(parts, ring.full_at(slot))

            lax.fori_loop(0, count, fetch, None)
            ring.drain(count)

        def carry(carrier: int):
            limit_registers(FORWARD[0], "increase", sizes)
            of_worker, is_first = one.levels_of(carrier), carrier == 0

            def decay_of(number):
                return ref.decay[place.sequence, place.head, start + jnp.minimum(number, count - 1)]

            def step(number, states_and_decay):
                states, decay = states_and_decay
                following = decay_of(number + 1)  # loaded a step before it is used
                slot, chunk = ring.to_use(number), start + number
                target = one.joins_at(chunk)
                levels.to_fill(number)
                store_negative(shared.levels, one, chunk, of_worker, states)
                plgpu.barrier_arrive(levels.full_at(0))

                def after(level, *state):
                    factors = [
                        [(shared.levels.at[level, row], shared.lost.at[slot, column, row].T) for row in rows]
                        for column in rows
                    ]
                    return add_to_tiles([decay * tile for tile in state], factors, sizes)

                states = if_has(one, chunk, of_worker, after, states)
                levels.release(0)

                def join(target, *states):
                    """The state with this index becomes what joins it: the chunk's own state and the levels below."""
                    hands_on = target == len(states)
                    if not is_first:
                        joined.wait(0)
                    elif hands_on:
                        joined.to_fill(one.num_handed_on(number + 1) - 1)
                    found = []
                    for row in rows:
                        total = -load_tile(shared.own.at[slot, row].T) if is_first else load_tile(shared.joined.at[row])
                        found.append(sum((state[row] for state in states[:target]), total))
                        if hands_on:
                            shared.joined[row] = rounded(found[-1], shared.joined.dtype)
                    plgpu.commit_smem()
                    if not is_first:
                        joined.release(0)
                    elif hands_on:
                        plgpu.barrier_arrive(joined.full_at(0))
                    return tuple(tuple(found) if index == target else state for index, state in enumerate(states))

                hands_on = one.is_handed_on(target) if is_first and workers > 1 else None
                states = for_target(target - of_worker.start, join, states, hands_on)
                ring.release(slot)
                return states, following

            states, _ = lax.fori_loop(0, count, step, (zero_states(of_worker, blocks), decay_of(0)))
            levels.drain(count)
            if is_first and workers > 1:
                joined.drain(one.num_handed_on(count))
            if not is_first and not one.is_last:

                @pl.when(count == one.segment)
                def _end():
                    joined.wait(0)
                    totals = [sum((state[row] for state in states), load_tile(shared.joined.at[row])) for row in rows]
                    plgpu.commit_smem()  # what has been read may be overwritten
                    for row in rows:
                        shared.joined.at[row].T[...] = rounded(-totals[row], shared.joined.dtype)
                    plgpu.commit_smem()
                    for row in rows:
                        end = place.tile(ref.ends, (program_index("segment"),), row, block)
                        plgpu.copy_smem_to_gmem(shared.joined.at[row], end)
                    plgpu.wait_smem_to_gmem(0)
                    joined.release(0)

        for number in range(workers):
            pl.when(worker == number)(functools.partial(carry, number))

        @pl.when(worker == read_worker)
        def _read():
            limit_registers(FORWARD[1], "decrease", sizes)

            def inside_of(number):
                here = place.values(ref.inside, start + jnp.minimum(number, count - 1), block)
                return plgpu.load(here, layout=TILE, optimized=False)

            def step(number, inside):
                following = inside_of(number + 1)  # loaded a step before it is used
                chunk, slot, out = start + number, ring.to_use(number), inside.astype(F32)
                levels.wait(0)

                def read(level, out):
                    if keep:
                        for row in rows:
                            kept = place.tile(ref.before, one.kept_at(chunk, level), block, row)
                            plgpu.copy_smem_to_gmem(shared.levels.at[level, row], kept)
                    factors = [(shared.reads.at[slot, row], shared.levels.at[level, row].T) for row in rows]
                    of_level = add_products(None, factors, PAIRS, sizes)
                    return out + rowwise(load_by_row(shared.lam.at[slot, level]), PAIRS) * of_level

                out = one.for_levels(chunk, read, out)
                plgpu.wait_smem_to_gmem(0, wait_read_only=True)
                levels.release(0)
                shared.out[...] = out.astype(shared.out.dtype)
                plgpu.commit_smem()
                ring.release(slot)
                plgpu.copy_smem_to_gmem(shared.out, place.values(ref.o, chunk, block))
                return following

            lax.fori_loop(0, count, step, inside_of(0))
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)

    barriers = dict(
        of_ring=ring_barriers(depth, blocks * (blocks + 2) + 1, workers + 1),
        of_levels=ring_barriers(1, workers, workers + 1),
        of_joined=ring_barriers(1, 1, 1),
    )
    inputs = dict(inside=inside, reads=reads, lam=lam, decay=decay, lost=lost, own=own)
    ends = jax.ShapeDtypeStruct((*own.shape[:2], one.num_chunks // one.segment, *own.shape[3:]), own.dtype)
    outputs = dict(
        o=jax.ShapeDtypeStruct(inside.shape, reads.dtype),
        ends=None if one.is_last else ends,
        before=one.kept_type(sizes) if keep else None,
    )
    shared = once | slots(depth) | barriers
    found = launch(body, "delta_levels", one.grid(sizes), inputs, outputs, shared, sizes, warpgroups=workers + 2)
    return found.o, found.ends, found.before


def _carry_back(do, reads, lam, decay, lost, d_ends, sizes: MapSizes, one: Pass):
    """(d_own, d_after). d_ends: d_own of the next pass, None in the last."""
    blocks, workers = sizes.key_dim // BLOCK, one.workers
    rows, weigh_worker, fetch_worker = range(blocks), workers, workers + 1
    once = dict(
        levels=tiled(one.num_levels, blocks, *PAIRS),
        joined=tiled(blocks, *PAIRS),
        d_own=tiled(blocks, *PAIRS),
        weighted=tiled(one.num_levels, *PAIRS),
    )
    depth = most_slots(num_bytes(once), num_bytes(map_slots(1, blocks)), 3)

    def body(ref, shared):
        block, worker = program_index("block"), worker_index()
        place, (start, count) = Place(sizes, program_index("head")), one.chunks()
        ring, weighted, joined = Ring(*shared.of_ring, depth), Ring(*shared.of_weighted, 1), Ring(*shared.of_joined, 1)

        def chunk_of(number):
            return start + count - 1 - number

        @pl.when(worker == fetch_worker)
        def _fetch():
            limit_registers(FETCHING, "decrease", sizes)

            def fetch(number, _):
                slot = ring.to_fill(number)
                fetch_parts(maps_of(place, ref, shared, slot, chunk_of(number), blocks), ring.full_at(slot))

            lax.fori_loop(0, count, fetch, None)
            ring.drain(count)

        @pl.when(worker == weigh_worker)
        def _weigh():
            """-λ dO of each level."""
            limit_registers(BACKWARD[1], "decrease", sizes)

            def step(number, _):
                chunk = chunk_of(number)
                do = plgpu.load(place.values(ref.do, chunk, block), layout=TILE, optimized=False).astype(F32)
                lam = place.levels(ref.lam, chunk, one.first, one.num_levels)
                lam = [plgpu.load(lam.at[level], layout=BY_ROW, optimized=False) for level in range(one.num_levels)]
                weighted.to_fill(number)
                for level in range(one.num_levels):

                    @pl.when(one.has(chunk, level))
                    def _store(level=level):
                        shared.weighted[level] = rounded(rowwise(-lam[level], PAIRS) * do, shared.weighted.dtype)

                plgpu.commit_smem()
                plgpu.barrier_arrive(weighted.full_at(0))

            lax.fori_loop(0, count, step, None)
            weighted.drain(count)

        def carry(carrier: int):
            limit_registers(BACKWARD[0], "increase", sizes)
            of_worker, is_first = one.levels_of(carrier), carrier == 0

            def begin():
                """All levels of a segment were joined at its end."""
                for row in rows:
                    end = place.tile(ref.d_ends, (program_index("segment"),), row, block)
                    plgpu.copy_gmem_to_smem(end, shared.d_own.at[row], shared.of_end)
                plgpu.barrier_wait(shared.of_end)
                state = tuple(-load_tile(shared.d_own.at[row].T) for row in rows)
                for row in rows:
                    shared.joined[row] = rounded(state[row], shared.joined.dtype)
                plgpu.commit_smem()
                plgpu.barrier_arrive(joined.full_at(0))
                return (state,) * len(of_worker)

            def store_own(chunk):
                for row in rows:
                    own = place.tile(ref.d_own, (one.joined_at(chunk),), row, block)
                    plgpu.copy_smem_to_gmem(shared.d_own.at[row], own)

            def decay_of(number):
                return ref.decay[place.sequence, place.head, jnp.maximum(chunk_of(number), start)]

            def step(number, states_and_decay):
                states, decay = states_and_decay
                following = decay_of(number + 1)  # loaded a step before it is used
                slot, chunk = ring.to_use(number), chunk_of(number)
                target = one.joins_at(chunk)
                plgpu.wait_smem_to_gmem(0, wait_read_only=True)

                def part(target, *states):
                    """What joined the state with this index has its gradient."""
                    is_handed_on = target == len(states)
                    if not is_first:
                        joined.to_fill(one.num_handed_on(count) - one.num_handed_on(count - number))
                    elif is_handed_on:
                        joined.wait(0)
                    found = []
                    for row in rows:
                        found.append(load_tile(shared.joined.at[row]) if is_handed_on else states[target][row])
                        if is_first:
                            shared.d_own.at[row].T[...] = rounded(-found[-1], shared.d_own.dtype)
                        else:
                            shared.joined[row] = rounded(found[-1], shared.joined.dtype)
                    plgpu.commit_smem()
                    if is_first:
                        store_own(chunk)
                        if is_handed_on:
                            joined.release(0)
                    else:
                        plgpu.barrier_arrive(joined.full_at(0))
                    return tuple(tuple(found) if index < target else state for index, state in enumerate(states))

                hands_on = one.is_handed_on(target) if is_first and workers > 1 else None
                states = for_target(target - of_worker.start, part, states, hands_on)
                store_negative(shared.levels, one, chunk, of_worker, states)
                weighted.wait(0)

                def before(level, *state):
                    for row in rows:
                        kept = place.tile(ref.d_after, one.kept_at(chunk, level), block, row)
                        plgpu.copy_smem_to_gmem(shared.levels.at[level, row], kept)
                    factors = [
                        [
                            *((shared.levels.at[level, row], shared.lost.at[slot, row, column]) for row in rows),
                            (shared.weighted.at[level].T, shared.reads.at[slot, column]),
                        ]
                        for column in rows
                    ]
                    return add_to_tiles([decay * tile for tile in state], factors, sizes)

                states = if_has(one, chunk, of_worker, before, states)
                weighted.release(0)
                ring.release(slot)
                return states, following

            states = zero_states(of_worker, blocks)
            if not is_first and not one.is_last:
                states = lax.cond(count == one.segment, begin, lambda: states)
            if is_first and one.is_last:

                @pl.when(count == one.segment)
                def _nothing_reads_the_last():
                    for row in rows:
                        shared.d_own[row] = zeros(BLOCK).astype(shared.d_own.dtype)
                    plgpu.commit_smem()
                    store_own(one.num_chunks - 1)

            lax.fori_loop(0, count, step, (states, decay_of(0)))
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            if not is_first:
                joined.drain(one.num_handed_on(count))

        for number in range(workers):
            pl.when(worker == number)(functools.partial(carry, number))

    barriers = dict(
        of_ring=ring_barriers(depth, blocks * (blocks + 1), workers),
        of_weighted=ring_barriers(1, 1, workers),
        of_joined=ring_barriers(1, 1, 1),
        of_end=plgpu.Barrier(num_arrivals=blocks),
    )
    inputs = dict(do=do, reads=reads, lam=lam, decay=decay, lost=lost, d_ends=d_ends)
    own = (*lost.shape[:2], one.num_chunks // one.stride, sizes.key_dim, sizes.value_dim)
    outputs = dict(d_own=jax.ShapeDtypeStruct(own, reads.dtype), d_after=one.kept_type(sizes))
    shared = once | map_slots(depth, blocks) | barriers
    found = launch(body, "delta_levels_back", one.grid(sizes), inputs, outputs, shared, sizes, warpgroups=workers + 2)
    return found.d_own, found.d_after
