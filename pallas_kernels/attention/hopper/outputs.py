"""Outputs of the attention: what a chunk's queries read of its own keys and of earlier chunks' states."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float

from pallas_kernels.attention.hopper.heads import Heads, chunks_by_reads, for_states_read
from pallas_kernels.attention.hopper.lams import Lams
from pallas_kernels.attention.hopper.pairs import LEVELS_IN_BLOCK, STRIP, STRIPS, Pairs
from pallas_kernels.attention.hopper.tiles import HopperTiles
from pallas_kernels.attention.triton import Above, AttentionSizes, Decay, Keys, Lam, Values, Weight
from pallas_kernels.common.launch import pad
from pallas_kernels.common.mosaic import (
    BLOCK,
    BY_COLUMN,
    BY_ROW,
    F32,
    PAIRS,
    TILE,
    add_product,
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
    program_index,
    rowwise,
    tiled,
    worker_index,
)
from pallas_kernels.common.ring import Ring

SINCE = 32  # numbers of `since` that are fetched of each head: no tree is higher, and Pallas fetches whole 128 bytes


def outputs(
    q: Keys,
    k: Keys,
    v: Values,
    decay: Decay,
    lam: Lam,
    since: Float[Array, "B H N heights"] | None,
    states: Float[Array, "B R N V K"] | None,
    initial: Float[Array, "B R U V K"] | None,
    above: Above | None,
    sizes: AttentionSizes,
    tiles: HopperTiles,
    keep: bool,
) -> tuple[Values, Weight | None]:
    """As `attention.triton.outputs`. weight is written only if it is wanted, and only where a state is read.

    A program has a chunk and some heads, and a warpgroup for each block of queries.
    """
    rows, heads = sizes.chunk // BLOCK, Heads(sizes, tiles.outputs)
    chunk, key_dim, value_dim = sizes.chunk, sizes.key_dim, sizes.value_dim
    value_shape = (BLOCK, value_dim)
    heights, lams = sizes.read_heights, Lams(lam, sizes.levels, sizes)
    reads_states, keep = heights > 0, keep and heights > 0

    def keys_of(slots: int):
        return dict(k=tiled(slots, rows, BLOCK, key_dim), q=tiled(slots, rows, BLOCK, key_dim))

    def head_slots(depth: int):
        """Shared memory for so many heads."""
        return (keys_of(depth) if heads.own_keys else {}) | dict(
            v=tiled(depth, rows, BLOCK, value_dim),
            vec_decay=plain(depth, rows, BLOCK),
            vec_lam=lams.slots(depth, rows),
        )

    once = dict(out=tiled(rows, BLOCK, value_dim), vec_since=plain(heads.number, SINCE))
    once |= {} if heads.own_keys else keys_of(1)
    state_bytes = num_bytes(dict(states=tiled(1, value_dim, key_dim)))
    head_depth = most_slots(num_bytes(once) + 2 * state_bytes, num_bytes(head_slots(1)), 2)
    depth = most_slots(num_bytes(once) + num_bytes(head_slots(head_depth)), state_bytes, 4)

    def body(ref, shared):
        arrived, head_full, head_empty, state_full, state_empty = shared.barriers
        of_heads, of_states = Ring(head_full, head_empty, head_depth), Ring(state_full, state_empty, depth)
        index, worker = ref.order[program_index("chunk")], worker_index()
        sequence, first = heads.sequence, heads.first

        def tokens(row):
            return pl.ds(index * chunk + row * BLOCK, BLOCK)

        def read_states(body, carry):
            return for_states_read(ref, sizes, sequence, index, body, carry)

        @pl.when(worker == rows)
        def _fetch():
            limit_registers(40, "decrease", sizes)
            keys, blocks = [(ref.q, shared.q), (ref.k, shared.k)], {row: tokens(row) for row in range(rows)}
            if not heads.own_keys:
                heads.fetch(keys, 0, 0, blocks, arrived)
            if reads_states:
                source = ref.since.at[sequence, index, pl.ds(first, heads.number)]
                plgpu.copy_gmem_to_smem(source, shared.vec_since, arrived)

            def one_head(number, count):
                head, slot = first + number, of_heads.to_fill(number)
                full = of_heads.full_at(slot)
                if heads.own_keys:
                    heads.fetch(keys, number, slot, blocks, full)
                for row in range(rows):
                    plgpu.copy_gmem_to_smem(ref.v.at[sequence, tokens(row), head], shared.v.at[slot, row], full)
                    plgpu.copy_gmem_to_smem(
                        ref.decay.at[sequence, head, tokens(row)], shared.vec_decay.at[slot, row], full
                    )
                    lams.fetch(ref.lam, sequence, tokens(row), head, shared.vec_lam, slot, row, full)

                def fetch_state(height, states, place, count):
                    del height
                    slot = of_states.to_fill(count)
                    source = states.at[sequence, head, place]
                    plgpu.copy_gmem_to_smem(source, shared.states.at[slot], of_states.full_at(slot))
                    return count + 1

                return read_states(fetch_state, count)

            count = lax.fori_loop(0, heads.number, one_head, jnp.int32(0))
            of_heads.drain(heads.number)
            of_states.drain(count)

        def scores_of(slot):
            """Queries as they read states, and their scores with the keys of their block and of the one before."""
            queries = shared.q.at[slot, worker]
            reading = queries if sizes.interpret else plgpu.load(queries, layout=TILE)
            # The first block has no keys before it, and makes nothing of its second scores.
            scores = [product(queries, shared.k.at[slot, row].T, PAIRS) for row in [worker, 0][:rows]]
            return reading, *scores, *[None] * (2 - rows)

        def in_chunk(slot, scores, scores_before, since, lam):
            """What the chunk's own keys give; lam: of each level."""
            staged = None if shared.staged is None else shared.staged.at[worker]

            def attend(sum_ref):
                pairs = Pairs()
                near_lam, weights = pairs.near_lam(lam), []
                for strip in range(STRIPS):
                    since_key = plgpu.load(
                        shared.vec_decay.at[slot, worker, pl.ds(strip * STRIP, STRIP)], layout=BY_COLUMN
                    )
                    decayed = pairs.decay(strip, since, since_key) * pairs.lam(strip, near_lam, lam)
                    weights.append((columns_of(scores, strip, STRIP) * decayed).astype(shared.v.dtype))
                weights = jnp.concatenate(weights, axis=1)
                add_product(sum_ref, weights, shared.v.at[slot, worker], staged)

                def attend_before(other, _):
                    last = shared.vec_decay[slot, other, BLOCK - 1]
                    from_key = exp2_of_decay(last - plgpu.load(shared.vec_decay.at[slot, other], layout=BY_COLUMN))
                    by_row = lam[LEVELS_IN_BLOCK] * exp2_of_decay(since - last)
                    weights = scores_before * rowwise(by_row, PAIRS) * columnwise(from_key, PAIRS)
                    add_product(sum_ref, weights.astype(shared.v.dtype), shared.v.at[slot, other], staged)

                if rows > 1:
                    lax.fori_loop(0, worker, attend_before, None)
                return sum_ref[...]

            return lax.optimization_barrier(pl.run_scoped(attend, plgpu.ACC(value_shape, F32)))

        @pl.when(worker < rows)
        def _multiply():
            limit_registers(232, "increase", sizes)
            if reads_states or not heads.own_keys:
                plgpu.barrier_wait(arrived)
            # Scores of all heads stay in registers, unless the output of a wide V needs these.
            of_all = None if heads.own_keys or value_dim > BLOCK else scores_of(0)

            def one_head(number, count):
                head, head_slot = first + number, of_heads.to_use(number)
                reading, scores, scores_before = of_all or scores_of(heads.key_slot(head_slot))
                since = plgpu.load(shared.vec_decay.at[head_slot, worker], layout=BY_ROW)

                def lam_of(level):
                    return lams.load(shared.vec_lam, head_slot, worker, head, level)

                lam = [lam_of(level) for level in range(sizes.levels_inside)]
                out = in_chunk(head_slot, scores, scores_before, since, lam)

                def read(height, states, place, carry):
                    del states, place
                    count, out = carry
                    slot = of_states.slot(count)
                    of_states.wait(slot)
                    of_state = product(reading, shared.states.at[slot].T, value_shape)
                    of_states.release(slot)
                    weight = lam_of(sizes.levels_inside + height) * jnp.exp2(shared.vec_since[number, height] + since)
                    if keep:
                        ref.weight[sequence, head, height, tokens(worker)] = weight
                    return count + 1, out + rowwise(weight, value_shape) * of_state

                count, out = read_states(read, (count, out))
                plgpu.wait_smem_to_gmem(0, wait_read_only=True)
                shared.out[worker] = out.astype(shared.out.dtype)
                plgpu.commit_smem()
                of_heads.release(head_slot)
                plgpu.copy_smem_to_gmem(shared.out.at[worker], ref.o.at[sequence, tokens(worker), head])
                return count

            lax.fori_loop(0, heads.number, one_head, jnp.int32(0))
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)

    inputs = dict(order=chunks_by_reads(sizes), q=q, k=k, v=v, decay=decay[0], lam=lams.operand)
    if reads_states:
        inputs |= dict(since=pad(jnp.swapaxes(since, 1, 2), (3, SINCE)), states=states, initial=initial, above=above)
    results = dict(
        o=jax.ShapeDtypeStruct(v.shape, v.dtype),
        weight=by_token_type(sizes, heights) if keep else None,
    )
    shared = once | head_slots(head_depth) | dict(
        states=tiled(depth, value_dim, key_dim),
        staged=tiled(rows, *PAIRS) if sizes.interpret else None,
        barriers=(
            plgpu.Barrier(num_arrivals=max(2 * rows * (not heads.own_keys) + reads_states, 1)),
            plgpu.Barrier(num_arrivals=(2 + lams.copies + 2 * heads.own_keys) * rows, num_barriers=head_depth),
            plgpu.Barrier(num_arrivals=rows, num_barriers=head_depth),
            plgpu.Barrier(num_barriers=depth),
            plgpu.Barrier(num_arrivals=rows, num_barriers=depth),
        ),
    )  # fmt: skip
    grid = dict(chunk=sizes.num_chunks, **heads.axes)
    found = launch(body, "outputs", grid, inputs, results, shared, sizes, warpgroups=rows + 1)
    return found.o, found.weight
