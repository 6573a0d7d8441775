"""Gradients of the delta rule's reads, λ and maps of chunks, from the states before each chunk and the gradients of those after
it. Names and shapes are those of `levels`."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.common.mosaic import (
    BLOCK,
    F32,
    PAIRS,
    TILE,
    add_products,
    launch,
    limit_registers,
    most_slots,
    num_bytes,
    plain,
    program_index,
    rowwise,
    tiled,
    worker_index,
    zeros,
    zeros_by_row,
)
from pallas_kernels.common.ring import Ring, ring_barriers
from pallas_kernels.common.support import gpu
from pallas_kernels.delta.hopper.passes import Pass, passes_for
from pallas_kernels.delta.hopper.place import FETCHING, Place, fetch_parts, load_by_row, load_tile
from pallas_kernels.delta.tree import MapSizes


def level_gradients(do, reads, lam, before, d_after, sizes: MapSizes):
    """The gradients of reads, lam, decay and lost. before, d_after: of each pass.

    A program has every so many-th chunk of all heads. A warpgroup has 64 keys, another fetches.
    """
    blocks, value_blocks, passes = sizes.key_dim // BLOCK, sizes.value_dim // BLOCK, passes_for(sizes)
    rows, fetch_worker, units = range(blocks), blocks, sizes.batch * sizes.heads * sizes.num_chunks
    programs = min(gpu().multiprocessors, units)
    all_levels = Pass(0, sizes.heights, sizes.num_chunks)

    def token_slots(depth: int):
        of_tokens = dict(reads=tiled(depth, blocks, *PAIRS), do=tiled(depth, value_blocks, *PAIRS))
        return of_tokens | dict(lam=plain(depth, sizes.heights, BLOCK))

    def state_slots(depth: int):
        return {name: tiled(depth, blocks, *PAIRS) for name in ("before", "d_after")}

    once = dict(d_lost=tiled(blocks, blocks, *PAIRS))
    depth = most_slots(num_bytes(once | token_slots(2)), num_bytes(state_slots(1)), 4)

    def body(ref, shared):
        worker, program = worker_index(), program_index("program")
        of_tokens, of_states = Ring(*shared.of_tokens, 2), Ring(*shared.of_states, depth)
        own_units = lax.div(units - program + programs - 1, programs)

        def unit(number):
            index = program + number * programs
            return Place(sizes, lax.div(index, sizes.num_chunks)), lax.rem(index, sizes.num_chunks)

        @pl.when(worker == fetch_worker)
        def _fetch():
            limit_registers(FETCHING, "decrease", sizes)

            def fetch(number, count):
                place, chunk = unit(number)
                slot = of_tokens.to_fill(number)
                parts = [
                    (place.levels(ref.lam, chunk, 0, sizes.heights), shared.lam.at[slot]),
                    *((place.tile(ref.reads, (chunk,), 0, row), shared.reads.at[slot, row]) for row in rows),
                    *((place.values(ref.do, chunk, x), shared.do.at[slot, x]) for x in range(value_blocks)),
                ]
                fetch_parts(parts, of_tokens.full_at(slot))
                for index, one in enumerate(passes):

                    def fetch_level(level, count, index=index, one=one):
                        here = one.kept_at(chunk, level)
                        for block in range(value_blocks):
                            slot, parts = of_states.to_fill(count + block), []
                            for name in ("before", "d_after"):
                                source, target = getattr(ref, f"{name}{index}"), getattr(shared, name)
                                parts += [(place.tile(source, here, block, row), target.at[slot, row]) for row in rows]
                            fetch_parts(parts, of_states.full_at(slot))
                        return count + value_blocks

                    count = one.for_levels(chunk, fetch_level, count)
                return count

            of_states.drain(lax.fori_loop(0, own_units, fetch, 0))
            of_tokens.drain(own_units)

        @pl.when(worker < blocks)
        def _multiply():
            limit_registers(232, "increase", sizes)
            row_of = plgpu.broadcasted_iota(jnp.int32, PAIRS, 0, layout=TILE)
            column_of = plgpu.broadcasted_iota(jnp.int32, PAIRS, 1, layout=TILE)

            def one_unit(number, count):
                place, chunk = unit(number)
                slot = of_tokens.to_use(number)
                reads = shared.reads.at[slot, worker]

                def of_level(level, carry):
                    count, d_reads, *d_lost = carry
                    of_state = None
                    for block in range(value_blocks):
                        here = of_states.to_use(count + block)
                        before, d_after = shared.before.at[here], shared.d_after.at[here, worker]
                        factors = [(shared.do.at[slot, block], before.at[worker])]
                        of_state = add_products(of_state, factors, PAIRS, sizes)
                        for row in rows:
                            d_lost[row] = add_products(d_lost[row], [(d_after.T, before.at[row])], PAIRS, sizes)
                        of_states.release(here)
                    d_lam = jnp.sum(of_state * load_tile(reads), axis=1)
                    ref.d_lam.at[place.sequence, place.head, worker, level, place.tokens(chunk)][...] = d_lam
                    lam = load_by_row(shared.lam.at[slot, level])
                    return count + value_blocks, d_reads + rowwise(lam, PAIRS) * of_state, *d_lost

                start = count, *(zeros(BLOCK) for _ in range(1 + blocks))
                count, d_reads, *d_lost = all_levels.for_levels(chunk, of_level, start)
                trace = zeros_by_row()
                plgpu.wait_smem_to_gmem(0, wait_read_only=True)
                for row in rows:
                    shared.d_lost[worker, row] = (-d_lost[row]).astype(shared.d_lost.dtype)
                    trace += jnp.sum(jnp.where((row_of == column_of) & (worker == row), d_lost[row], 0.0), axis=1)
                ref.trace.at[place.sequence, place.head, chunk, place.columns(worker)][...] = trace
                reads[...] = d_reads.astype(reads.dtype)
                plgpu.commit_smem()
                for row in rows:
                    target = place.tile(ref.d_lost, (chunk,), worker, row)
                    plgpu.copy_smem_to_gmem(shared.d_lost.at[worker, row], target)
                plgpu.copy_smem_to_gmem(reads, place.tile(ref.d_reads, (chunk,), 0, worker))
                plgpu.wait_smem_to_gmem(0, wait_read_only=True)
                of_tokens.release(slot)
                return count

            lax.fori_loop(0, own_units, one_unit, 0)

    barriers = dict(
        of_tokens=ring_barriers(2, 1 + blocks + value_blocks, blocks),
        of_states=ring_barriers(depth, 2 * blocks, blocks),
    )
    kept = {f"before{index}": x for index, x in enumerate(before)}
    kept |= {f"d_after{index}": x for index, x in enumerate(d_after)}
    by_head, by_token = reads.shape[:3], (blocks, sizes.heights, sizes.num_chunks * BLOCK)
    outputs = dict(
        d_reads=jax.ShapeDtypeStruct(reads.shape, reads.dtype),
        d_lost=jax.ShapeDtypeStruct((*by_head, sizes.key_dim, sizes.key_dim), reads.dtype),
        d_lam=jax.ShapeDtypeStruct((*by_head[:2], *by_token), F32),
        trace=jax.ShapeDtypeStruct((*by_head, sizes.key_dim), F32),
    )
    found = launch(
        body,
        "delta_level_gradients",
        dict(program=programs),
        dict(do=do, reads=reads, lam=lam) | kept,
        outputs,
        once | token_slots(2) | state_slots(depth) | barriers,
        sizes,
        warpgroups=blocks + 1,
    )
    has_level = all_levels.has(jnp.arange(sizes.num_chunks), jnp.arange(sizes.heights)[:, None])
    d_lam = jnp.where(jnp.repeat(has_level, BLOCK, axis=1), jnp.sum(found.d_lam, axis=2), 0.0)
    return found.d_reads, d_lam, jnp.sum(found.trace, axis=3), found.d_lost
