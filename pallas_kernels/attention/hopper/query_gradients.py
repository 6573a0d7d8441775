"""What reading states gives to the queries, to λ and to decays."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float

from pallas_kernels.attention.hopper.heads import Heads, chunks_by_reads, for_states_read
from pallas_kernels.attention.hopper.tiles import HopperTiles
from pallas_kernels.attention.triton import Above, AttentionSizes, ByToken, Keys, Values, Weight
from pallas_kernels.common.mosaic import (
    BLOCK,
    BY_ROW,
    F32,
    TILE,
    by_token_type,
    launch,
    limit_registers,
    most_slots,
    num_bytes,
    plain,
    product,
    program_index,
    rowwise,
    tiled,
    worker_index,
    write,
    zeros,
    zeros_by_row,
)
from pallas_kernels.common.ring import Ring

HEAD_DEPTH = 2  # heads whose gradients of outputs are in shared memory


def query_gradients(
    q: Keys,
    do: Values,
    weight: Weight,
    states: Float[Array, "B R N V K"] | None,
    initial: Float[Array, "B R U V K"] | None,
    above: Above | None,
    dq: Float[Array, "parts B T G K"],
    sizes: AttentionSizes,
    tiles: HopperTiles,
) -> tuple[Keys, Float[Array, "B R heights T"], ByToken]:
    """As `attention.triton.query_gradients`; read is written only where a state is read.

    A program has a chunk and some heads, and a warpgroup for each block of queries. If it has all heads of a group, it adds dq
    to its own part.
    """
    rows, heads = sizes.chunk // BLOCK, Heads(sizes, tiles.query_gradients)
    key_dim, value_dim, heights = sizes.key_dim, sizes.value_dim, sizes.read_heights
    key_shape = (BLOCK, key_dim)
    once = dict(
        q=tiled(HEAD_DEPTH if heads.own_keys else 1, rows, BLOCK, key_dim),
        do=tiled(HEAD_DEPTH, rows, BLOCK, value_dim),
        weight=plain(HEAD_DEPTH, rows, heights, BLOCK),
        read=plain(rows, heights, BLOCK),
    )
    depth = most_slots(num_bytes(once), num_bytes(dict(states=tiled(1, value_dim, key_dim))), 4)

    def body(ref, shared):
        arrived, do_full, do_empty, state_full, state_empty = shared.barriers
        of_heads, of_states = Ring(do_full, do_empty, HEAD_DEPTH), Ring(state_full, state_empty, depth)
        index, worker = ref.order[program_index("chunk")], worker_index()
        sequence, first = heads.sequence, heads.first

        def tokens(row):
            return pl.ds((index * rows + row) * BLOCK, BLOCK)

        @pl.when(worker == rows)
        def _fetch():
            limit_registers(40, "decrease", sizes)
            queries, blocks = [(ref.q, shared.q)], {row: tokens(row) for row in range(rows)}
            if not heads.own_keys:
                heads.fetch(queries, 0, 0, blocks, arrived)

            def one_head(number, count):
                head, slot = first + number, of_heads.to_fill(number)
                full = of_heads.full_at(slot)
                if heads.own_keys:
                    heads.fetch(queries, number, slot, blocks, full)
                for row in range(rows):
                    plgpu.copy_gmem_to_smem(ref.do.at[sequence, tokens(row), head], shared.do.at[slot, row], full)
                    weights = ref.weight.at[sequence, head, :, tokens(row)]
                    plgpu.copy_gmem_to_smem(weights, shared.weight.at[slot, row], full)

                def fetch_state(height, states, place, count):
                    del height
                    slot = of_states.to_fill(count)
                    source = states.at[sequence, head, place]
                    plgpu.copy_gmem_to_smem(source, shared.states.at[slot], of_states.full_at(slot))
                    return count + 1

                return for_states_read(ref, sizes, sequence, index, fetch_state, count)

            count = lax.fori_loop(0, heads.number, one_head, jnp.int32(0))
            of_heads.drain(heads.number)
            of_states.drain(count)

        def queries_in(slot):
            return plgpu.load(shared.q.at[slot, worker], layout=TILE).astype(F32)

        def one_head(number, carry, queries=None):
            """(how many states were read, dq) with those of a head."""
            head, do_slot = first + number, of_heads.to_use(number)
            queries = queries_in(do_slot) if queries is None else queries
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)  # of the head before

            def read(height, states, place, carry):
                del states, place
                count, dq, weighted = carry
                slot = of_states.slot(count)
                of_states.wait(slot)
                to_query = product(shared.do.at[do_slot, worker], shared.states.at[slot], key_shape)
                of_states.release(slot)
                read = jnp.sum(queries * to_query, axis=1)
                shared.read[worker, height] = read
                by_row = plgpu.load(shared.weight.at[do_slot, worker, height], layout=BY_ROW)
                return count + 1, dq + rowwise(by_row, key_shape) * to_query, weighted + by_row * read

            start = (*carry, zeros_by_row())
            count, dq, weighted = for_states_read(ref, sizes, sequence, index, read, start)
            ref.of_reads[sequence, head, tokens(worker)] = weighted
            plgpu.commit_smem()
            of_heads.release(do_slot)
            plgpu.copy_smem_to_gmem(shared.read.at[worker], ref.read.at[sequence, head, :, tokens(worker)])
            return count, dq

        def from_inside(group):
            """What is known of dq before, if the program adds it."""
            if heads.parts > 1:
                return zeros(key_dim)
            parts = [
                plgpu.load(ref.dq_inside.at[part, sequence, tokens(worker), group], layout=TILE, optimized=False)
                for part in range(ref.dq_inside.shape[0])
            ]
            return sum((part.astype(F32) for part in parts[1:]), parts[0].astype(F32))

        def write_dq(group, dq):
            write(ref.dq.at[heads.part, sequence, tokens(worker), group], dq, sizes)

        def one_group(number, count):
            """The head of this number, with keys of its own."""
            group = heads.group(number)
            count, dq = one_head(number, (count, from_inside(group)))
            write_dq(group, dq)
            return count

        @pl.when(worker < rows)
        def _multiply():
            limit_registers(232, "increase", sizes)
            if heads.own_keys:
                lax.fori_loop(0, heads.number, one_group, jnp.int32(0))
            else:
                dq = from_inside(heads.group())
                plgpu.barrier_wait(arrived)
                one = functools.partial(one_head, queries=queries_in(0))
                write_dq(heads.group(), lax.fori_loop(0, heads.number, one, (jnp.int32(0), dq))[1])
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)

    shared = once | dict(
        states=tiled(depth, value_dim, key_dim),
        barriers=(
            plgpu.Barrier(num_arrivals=rows),
            plgpu.Barrier(num_arrivals=(2 + heads.own_keys) * rows, num_barriers=HEAD_DEPTH),
            plgpu.Barrier(num_arrivals=rows, num_barriers=HEAD_DEPTH),
            plgpu.Barrier(num_barriers=depth),
            plgpu.Barrier(num_arrivals=rows, num_barriers=depth),
        ),
    )
    grid = dict(chunk=sizes.num_chunks, **heads.axes)
    inputs = dict(order=chunks_by_reads(sizes), q=q, do=do, weight=weight, dq_inside=dq)
    inputs |= dict(states=states, initial=initial, above=above)
    results = dict(
        dq=jax.ShapeDtypeStruct((heads.parts, *q.shape), q.dtype if heads.parts == 1 else F32),
        read=jax.ShapeDtypeStruct(weight.shape, F32),
        of_reads=by_token_type(sizes),
    )
    found = launch(body, "query_gradients", grid, inputs, results, shared, sizes, warpgroups=rows + 1)
    dq = found.dq[0] if heads.parts == 1 else jnp.sum(jnp.concatenate([dq, found.dq]), axis=0).astype(q.dtype)
    return dq, found.read, found.of_reads
