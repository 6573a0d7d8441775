"""States of chunks, from their own keys and values."""

from __future__ import annotations

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float

from pallas_kernels.attention.hopper.heads import Heads, states_type
from pallas_kernels.attention.hopper.tiles import HopperTiles
from pallas_kernels.attention.triton import AttentionSizes, Decay, Keys, Values
from pallas_kernels.common.mosaic import (
    BLOCK,
    BY_ROW,
    F32,
    TILE,
    add_products,
    exp2_of_decay,
    launch,
    most_slots,
    num_bytes,
    plain,
    program_index,
    rowwise,
    tiled,
    worker_index,
)


def chunk_states(
    k: Keys,
    v: Values,
    decay: Decay,
    sizes: AttentionSizes,
    tiles: HopperTiles,
) -> Float[Array, "B R N V K"]:
    """States of single chunks and, unless there is one state, of `tiles.span` chunks, [B, R, N, V, K].

    At the end e of a block of so many chunks is the state of that block, not yet joined with what comes before; at others that
    of chunk e - 1. A program has the chunks of a block, 1 or 2, and some heads, which its warpgroups share.
    """
    rows, heads = sizes.chunk // BLOCK, Heads(sizes, tiles.chunk_states)
    span = 1 if sizes.one_state else min(tiles.span, 1 << sizes.heights)
    assert not heads.own_keys
    chunk, num_chunks, key_dim, value_dim = sizes.chunk, sizes.num_chunks, sizes.key_dim, sizes.value_dim
    workers = tiles.sharing_warpgroups(heads.number)
    worker_heads = heads.number // workers

    def slots(depth: int):
        """Shared memory for so many fetches of each warpgroup: values and decays of a head's chunk."""
        return dict(
            decay=plain(workers * depth, rows, BLOCK),
            v=tiled(workers * depth, rows, BLOCK, value_dim),
        )

    once = dict(k=tiled(span, rows, BLOCK, key_dim), out=tiled(workers, value_dim, key_dim))
    depth = most_slots(num_bytes(once), num_bytes(slots(1)), 2)

    def body(ref, shared):
        block, worker = program_index("chunk"), worker_index() if workers > 1 else 0
        sequence, first, own_out = heads.sequence, heads.first + worker * worker_heads, shared.out.at[worker]

        def tokens(part, row):
            return pl.ds((block * span + part) * chunk + row * BLOCK, BLOCK)

        def slot_of(count):
            return worker * depth + lax.rem(count, depth)

        def fetch(number, part, slot):
            head, arrived = first + number, shared.arrived.at[slot]
            for row in range(rows):
                here = tokens(part, row)
                plgpu.copy_gmem_to_smem(ref.v.at[sequence, here, head], shared.v.at[slot, row], arrived)
                plgpu.copy_gmem_to_smem(ref.decay.at[sequence, head, here], shared.decay.at[slot, row], arrived)

        @pl.when(worker == 0)
        def _():
            for part in range(span):
                for row in range(rows):
                    source = ref.k.at[sequence, tokens(part, row), heads.group()]
                    plgpu.copy_gmem_to_smem(source, shared.k.at[part, row], shared.once)

        for count in range(min(depth - 1, worker_heads * span)):
            fetch(count // span, count % span, slot_of(count))
        plgpu.barrier_wait(shared.once)

        def add_chunk(number, part, before):
            """The state of a head's chunk, with that of the chunk before it."""
            count = number * span + part
            slot, ahead = slot_of(count), (part + depth - 1) // span

            @pl.when(number + ahead < worker_heads)
            def _():
                fetch(number + ahead, (part + depth - 1) % span, slot_of(count + depth - 1))

            plgpu.barrier_wait(shared.arrived.at[slot])
            last = shared.decay[slot, rows - 1, BLOCK - 1]
            for row in range(rows):
                until_end = exp2_of_decay(last - plgpu.load(shared.decay.at[slot, row], layout=BY_ROW))
                values = plgpu.load(shared.v.at[slot, row], layout=TILE).astype(F32)
                shared.v[slot, row] = (rowwise(until_end, (BLOCK, value_dim)) * values).astype(shared.v.dtype)
            plgpu.commit_smem()
            factors = [(shared.v.at[slot, row].T, shared.k.at[part, row]) for row in range(rows)]
            start = None if before is None else before * jnp.exp2(last)
            state = add_products(start, factors, (value_dim, key_dim), sizes)
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            own_out[...] = state.astype(own_out.dtype)
            plgpu.commit_smem()
            end = block * span + part + 1

            @pl.when(end < num_chunks)  # nobody reads the state of all chunks
            def _():
                plgpu.copy_smem_to_gmem(own_out, ref.states.at[sequence, first + number, end])

            return state

        def one_head(number, _):
            state = None
            for part in range(span):
                state = add_chunk(number, part, state)

        lax.fori_loop(0, worker_heads, one_head, None)
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)

    barriers = dict(
        arrived=plgpu.Barrier(num_arrivals=2 * rows, num_barriers=workers * depth),
        once=plgpu.Barrier(num_arrivals=span * rows),
    )
    grid = dict(**heads.axes, chunk=-(-(num_chunks - 1) // span))
    inputs, outputs = dict(k=k, v=v, decay=decay[0]), dict(states=states_type(sizes))
    return launch(
        body, "chunk_states", grid, inputs, outputs, once | slots(depth) | barriers, sizes, warpgroups=workers
    ).states
