"""Gradients of states, from the chunks that read them."""

from __future__ import annotations

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from loglinear_jax.fenwick import highest_bit
from pallas_kernels.attention.hopper.heads import Heads
from pallas_kernels.attention.hopper.parts import (
    BLOCK,
    BY_ROW,
    F32,
    TILE,
    launch,
    limit_registers,
    most_slots,
    num_bytes,
    plain,
    program_index,
    rowwise,
    states_type,
    tiled,
)
from pallas_kernels.attention.hopper.ring import Ring
from pallas_kernels.attention.hopper.tiles import HopperTiles
from pallas_kernels.attention.triton import AttentionSizes


def state_gradients(q, do, weight, sizes: AttentionSizes, tiles: HopperTiles):
    """Gradient of each state from the chunks that read it, [B, R, N, V, K]; e = 0 is never written.

    A program has a node of the tree and some heads, each of which has a warpgroup.
    """
    rows, workers = sizes.chunk // BLOCK, tiles.state_gradients
    heads = Heads(sizes, workers)
    assert not heads.own_keys
    key_dim, value_dim, num_chunks, heights = sizes.key_dim, sizes.value_dim, sizes.num_chunks, sizes.heights

    def slots(depth: int):
        """Shared memory for so many blocks of queries."""
        return dict(
            q=tiled(depth, BLOCK, key_dim),
            do=tiled(depth, workers, BLOCK, value_dim),
            weight=plain(depth, workers, BLOCK),
        )

    once = dict(out=tiled(workers, value_dim, key_dim))
    depth = most_slots(num_bytes(once), num_bytes(slots(1)), 3)

    def body(ref, shared):
        ring = Ring(shared.full, shared.empty, depth)
        # Nodes are numbered from the top of the tree down, so that those with the most readers start first.
        number = program_index("node") + 1
        sequence, group, first = heads.sequence, heads.group(), heads.first
        worker = lax.axis_index("worker")
        level = highest_bit(number)
        height = heights - 1 - level
        one = jnp.int32(1)
        end = lax.shift_left(2 * (number - lax.shift_left(one, level)) + 1, height)
        readers = rows * (jnp.minimum(end + lax.shift_left(one, height), num_chunks) - end)

        def tokens(index):
            return pl.ds(end * sizes.chunk + index * BLOCK, BLOCK)

        @pl.when(jnp.logical_and(end < num_chunks, worker == workers))
        def _fetch():
            limit_registers(40, "decrease", sizes)

            def fetch(index, _):
                slot = ring.to_fill(index)
                full = ring.full_at(slot)
                plgpu.copy_gmem_to_smem(ref.q.at[sequence, tokens(index), group], shared.q.at[slot], full)
                for head in range(workers):
                    source = ref.do.at[sequence, tokens(index), first + head]
                    plgpu.copy_gmem_to_smem(source, shared.do.at[slot, head], full)
                    weights = ref.weight.at[sequence, first + head, height, tokens(index)]
                    plgpu.copy_gmem_to_smem(weights, shared.weight.at[slot, head], full)

            lax.fori_loop(0, readers, fetch, None)
            ring.drain(readers)

        @pl.when(jnp.logical_and(end < num_chunks, worker < workers))
        def _multiply():
            def add_all(sum_ref):
                def add_block(index, _):
                    slot = ring.to_use(index)
                    own_do = shared.do.at[slot, worker]
                    by_row = plgpu.load(shared.weight.at[slot, worker], layout=BY_ROW)
                    values = plgpu.load(own_do, layout=TILE).astype(F32)
                    own_do[...] = (rowwise(by_row, (BLOCK, value_dim)) * values).astype(own_do.dtype)
                    plgpu.commit_smem()
                    plgpu.wgmma(sum_ref, own_do.T, shared.q.at[slot])
                    plgpu.wgmma_wait(0)
                    ring.release(slot)

                lax.fori_loop(0, readers, add_block, None)
                return sum_ref[...]

            gradient = lax.optimization_barrier(pl.run_scoped(add_all, plgpu.ACC((value_dim, key_dim), F32)))
            shared.out[worker] = gradient.astype(shared.out.dtype)
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(shared.out.at[worker], ref.gradients.at[sequence, first + worker, end])
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)

    barriers = dict(
        full=plgpu.Barrier(num_arrivals=1 + 2 * workers, num_barriers=depth),
        empty=plgpu.Barrier(num_arrivals=workers, num_barriers=depth),
    )
    grid = dict(node=(1 << heights) - 1, **heads.axes)
    inputs, results = dict(q=q, do=do, weight=weight), dict(gradients=states_type(sizes))
    shared = once | slots(depth) | barriers
    return launch(body, "state_gradients", grid, inputs, results, shared, sizes, warpgroups=workers + 1).gradients
