"""Gradients of states, from the chunks that read them."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float

from loglinear_jax.fenwick import highest_bit
from pallas_kernels.attention.hopper.heads import Heads, states_type
from pallas_kernels.attention.hopper.tiles import HopperTiles
from pallas_kernels.attention.triton import Above, AttentionSizes, Keys, Values, Weight
from pallas_kernels.common.mosaic import (
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
    tiled,
    worker_index,
)
from pallas_kernels.common.ring import Ring

PART = 32  # chunks of which a program adds what they give to a state of what came before
CHUNKS = 4  # of which a program has the gradients of what they read, where that is one state


def state_gradients(
    q: Keys,
    do: Values,
    weight: Weight,
    above: Above | None,
    sizes: AttentionSizes,
    tiles: HopperTiles,
) -> tuple[Float[Array, "B R N V K"] | None, Float[Array, "B R U V K"] | None]:
    """As `attention.triton.state_gradients`.

    A program has a node of the tree, or a state of what came before for a part of the chunks, and some heads, each of which has
    a warpgroup.
    """
    rows, workers = sizes.chunk // BLOCK, tiles.state_gradients
    heads = Heads(sizes, workers)
    assert not heads.own_keys
    key_dim, value_dim, num_chunks, heights = sizes.key_dim, sizes.value_dim, sizes.num_chunks, sizes.heights
    nodes, parts = (1 << heights) - 1, -(-num_chunks // PART)
    if sizes.one_state:
        nodes = -(-(num_chunks - 1) // CHUNKS)

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
        program = program_index("node")
        sequence, group, first = heads.sequence, heads.group(), heads.first
        worker, in_tree = worker_index(), program < nodes
        # Nodes are numbered from the top of the tree down, so that those with the most readers start first.
        number = jnp.where(in_tree, program + 1, 1)
        level = highest_bit(number)
        height = heights - 1 - level
        one = jnp.int32(1)
        end = lax.shift_left(2 * (number - lax.shift_left(one, level)) + 1, jnp.maximum(height, 0))
        start, stop = end, end + lax.shift_left(one, jnp.maximum(height, 0))
        if sizes.one_state:
            height, end = 0, 1 + program * CHUNKS
            start, stop = end, end + CHUNKS
        upper = part = jnp.int32(0)
        if sizes.upper:
            upper, part = lax.div(program - nodes, parts), lax.rem(program - nodes, parts)
            is_there = lax.shift_right_logical(ref.above[sequence], jnp.maximum(upper, 0)) & 1
            height = jnp.where(in_tree, height, heights + upper)
            start = jnp.where(in_tree, start, part * PART)
            stop = jnp.where(in_tree, stop, start + is_there * PART)
        readers = rows * (jnp.minimum(stop, num_chunks) - start)
        exists = start < num_chunks

        def tokens(index):
            return pl.ds(start * sizes.chunk + index * BLOCK, BLOCK)

        @pl.when(jnp.logical_and(exists, worker == workers))
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

        @pl.when(jnp.logical_and(exists, worker < workers))
        def _multiply():
            count, blocks = (lax.div(readers, rows), rows) if sizes.one_state else (1, readers)

            def one_state(number, _):
                """The gradient of a state, from so many blocks."""

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

                    lax.fori_loop(number * blocks, (number + 1) * blocks, add_block, None)
                    return sum_ref[...]

                gradient = lax.optimization_barrier(pl.run_scoped(add_all, plgpu.ACC((value_dim, key_dim), F32)))
                plgpu.wait_smem_to_gmem(0, wait_read_only=True)  # of the state before
                shared.out[worker] = gradient.astype(shared.out.dtype)
                plgpu.commit_smem()
                if heights:

                    @pl.when(in_tree)
                    def _():
                        place = (sequence, first + worker, end + number)
                        plgpu.copy_smem_to_gmem(shared.out.at[worker], ref.gradients.at[place])

                if sizes.upper:

                    @pl.when(jnp.logical_not(in_tree))
                    def _():
                        place = (part, sequence, first + worker, upper)
                        plgpu.copy_smem_to_gmem(shared.out.at[worker], ref.initial.at[place])

            lax.fori_loop(0, count, one_state, None)
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)

    barriers = dict(
        full=plgpu.Barrier(num_arrivals=1 + 2 * workers, num_barriers=depth),
        empty=plgpu.Barrier(num_arrivals=workers, num_barriers=depth),
    )
    grid = dict(node=nodes + sizes.upper * parts, **heads.axes)
    inputs = dict(q=q, do=do, weight=weight, above=above)
    of_initial = jax.ShapeDtypeStruct((parts, sizes.batch, sizes.heads, sizes.upper, value_dim, key_dim), sizes.dtype)
    results = dict(
        gradients=states_type(sizes) if heights else None,
        initial=of_initial if sizes.upper else None,
    )
    shared = once | slots(depth) | barriers
    found = launch(body, "state_gradients", grid, inputs, results, shared, sizes, warpgroups=workers + 1)
    return found.gradients, None if found.initial is None else jnp.sum(found.initial.astype(F32), axis=0)
