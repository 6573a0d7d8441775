"""The gated delta rule with one state a head, with its gradient, on Hopper GPUs in bfloat16, by the Mosaic GPU lowering of
Pallas. A chunk has 64 tokens.

Of a chunk by itself only T = (I + A)⁻¹ and P are made, by a kernel of Triton. What a chunk writes is solved for when the state
before it is there: Z = T R, R = β (V - Γ₀ K S). With G = Tᵀ dZ, the gradient of R, that of A is -G Zᵀ.

Names and shapes are those of `delta.one_state`, with the letters of `loglinear_jax.ops.delta.transitions`. Beside them:

  pairs     [B, H, N, 2, C, C]   T; P
  vectors   [B, H, N, 4, C]      float32: log2 decay since the chunk's start; `since`; `until`; β
  solved    [B, H, N, C, V]      G

One warpgroup of a program fetches, the others multiply.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.common.chunks import since_chunk_start
from pallas_kernels.common.launch import call
from pallas_kernels.common.mosaic import (
    BLOCK,
    BY_COLUMN,
    F32,
    PAIRS,
    TILE,
    add_products,
    by_token_type,
    columnwise,
    exp2_of_decay,
    launch,
    limit_registers,
    most_slots,
    num_bytes,
    plain,
    product,
    program_index,
    rounded,
    rowwise,
    tiled,
    worker_index,
    write,
    zeros_by_row,
)
from pallas_kernels.common.partition import of_no_axes
from pallas_kernels.common.ring import Ring, ring_barriers
from pallas_kernels.common.support import gpu
from pallas_kernels.delta.chunks import ChunkSizes, ChunkSpecs, ChunkTiles, decays_gradient, decays_of_ends, inverse_of
from pallas_kernels.delta.hopper.place import Place, fetch_parts, load_by_row, load_tile

INVERSE, PRODUCTS = range(2)
VECTORS = DECAY, SINCE, UNTIL, BETA = range(4)


def forward(q, k, v, decays, beta, first, *, sizes: ChunkSizes, keep: bool):
    """(o, last), and for the gradient pairs, vectors, writes, before."""
    sizes = sizes.of_arrays(q, v.shape[2])
    decay = since_chunk_start(jnp.moveaxis(decays, 1, 0), sizes)
    specs, chunk = ChunkSpecs(sizes, sizes.launch()), sizes.chunk
    pairs, vectors = call(
        functools.partial(_pairs_kernel, sizes=sizes),
        "delta_pairs",
        specs.grid(sizes.num_chunks),
        [specs.keys(), specs.keys(), specs.decay(), specs.by_token()],
        [specs.by_chunk(2, chunk, chunk), specs.by_chunk(len(VECTORS), chunk)],
        [
            jax.ShapeDtypeStruct(sizes.by_chunk(2, chunk, chunk), q.dtype),
            jax.ShapeDtypeStruct(sizes.by_chunk(len(VECTORS), chunk), F32),
        ],
        sizes.launch(),
        sizes.interpret,
    )(q, k, decay, beta)
    out, last, *states = _scan(q, k, v, pairs, vectors, first, sizes, keep)
    return (out, last, pairs, vectors, *states) if keep else (out, last)


def backward(do, d_last, q, k, v, decays, beta, pairs, vectors, writes, before, *, sizes: ChunkSizes):
    """The gradients of q, k, v, decays, beta and first."""
    sizes = sizes.of_arrays(q, v.shape[2])
    do = do.astype(q.dtype)
    solved, d_after, d_first = _scan_back(q, k, do, pairs, vectors, d_last, sizes)
    found = _gradients(q, k, v, do, before, d_after, writes, solved, vectors, sizes)
    since, until = (vectors[:, :, :, place].reshape(beta.shape) for place in (SINCE, UNTIL))
    dq, dk = (jnp.sum(x, axis=0, dtype=F32).astype(q.dtype) for x in (found.dq, found.dk))
    of_query, of_end, of_start = (jnp.sum(x, axis=2) for x in (found.of_query, found.of_end, found.of_start))
    # γ, the decay of a chunk, is that of its last token.
    of_state = jnp.pad(jnp.sum(found.of_state, axis=3)[..., None], [(0, 0)] * 3 + [(sizes.chunk - 1, 0)])
    d_since = of_query - beta * of_start + of_state.reshape(since.shape)
    d_decay = found.by_query - found.by_key + since * d_since
    d_decays = decays_gradient(d_decay, until * of_end, decays, sizes)
    return dq, dk, found.dv, d_decays, found.d_beta - since * of_start, d_first


def _pairs_kernel(q_ref, k_ref, decay_ref, beta_ref, pairs_ref, vectors_ref, *, sizes):
    chunk, beta = ChunkTiles(k_ref, decay_ref, sizes), beta_ref[0, :]
    pairs_ref[PRODUCTS, :, :] = chunk.products(q_ref[:, :])
    pairs_ref[INVERSE, :, :] = inverse_of(beta[:, None] * chunk.similar(), sizes).astype(chunk.dtype)
    since, until = decays_of_ends(decay_ref, sizes)
    for place, vector in zip(VECTORS, (decay_ref[0, 0, :], since[:, 0], until[:, 0], beta), strict=True):
        vectors_ref[place, :] = vector


# --- From chunk to chunk ----------------------------------------------------------------------------------------------
# A program has 64 columns of a head's values, and goes over all chunks. A warpgroup carries the state, another does what the
# next state does not wait for.

CARRY, BESIDE, FETCH = range(3)


def _slots(sizes: ChunkSizes, values: str, depth: int):
    """Shared memory for so many chunks. values: the name of v or do."""
    of_keys = {name: tiled(depth, BLOCK, sizes.key_dim) for name in "qk"}
    of_pairs = {values: tiled(depth, *PAIRS), "pairs": tiled(depth, 2, *PAIRS)}
    return of_keys | of_pairs | dict(vectors=plain(depth, len(VECTORS), BLOCK))


def _fetch_chunks(ring: Ring, ref, shared, values: str, own: Place, block, chunk_of) -> None:
    """All chunks of a head, of values the columns of a block; chunk_of: the number of a chunk, from how many were fetched."""

    def fetch(count, _):
        slot, chunk = ring.to_fill(count), chunk_of(count)
        parts = dict(
            k=own.keys(ref.k, chunk),
            pairs=own.whole(ref.pairs, chunk),
            vectors=own.whole(ref.vectors, chunk),
            q=own.keys(ref.q, chunk),
        ) | {values: own.values(getattr(ref, values), chunk, block)}
        fetch_parts([(source, getattr(shared, name).at[slot]) for name, source in parts.items()], ring.full_at(slot))

    lax.fori_loop(0, own.sizes.num_chunks, fetch, None)
    ring.drain(own.sizes.num_chunks)


def _scan(q, k, v, pairs, vectors, first, sizes: ChunkSizes, keep: bool):
    """(o, last, writes, before); the last two only if `keep`."""
    num, state_shape = sizes.num_chunks, (sizes.key_dim, BLOCK)
    once = dict(states=tiled(2, *state_shape), at_end=tiled(*PAIRS), out=tiled(*PAIRS))
    depth = most_slots(num_bytes(once), num_bytes(_slots(sizes, "v", 1)), 4)

    def body(ref, shared):
        own, block, worker = Place(sizes, program_index("head")), program_index("block"), worker_index()
        ring, states = Ring(*shared.of_ring, depth), Ring(*shared.of_states, 2)

        @pl.when(worker == FETCH)
        def _fetch_all():
            _fetch_chunks(ring, ref, shared, "v", own, block, lambda count: count)

        @pl.when(worker == CARRY)
        def _carry():
            """In place of values comes R, in place of T what is written."""

            def step(chunk, state):
                slot, place = ring.to_use(chunk), states.to_fill(chunk)
                k, values, inverse = shared.k.at[slot], shared.v.at[slot], shared.pairs.at[slot, INVERSE]
                vectors = shared.vectors.at[slot]
                decay = vectors[SINCE, BLOCK - 1]
                shared.states[place] = rounded(state, shared.states.dtype)
                plgpu.commit_smem()
                plgpu.barrier_arrive(states.full_at(place))
                found = product(k, shared.states.at[place], PAIRS)
                beta = load_by_row(vectors.at[BETA])
                erased = rowwise(-beta * load_by_row(vectors.at[SINCE]), PAIRS) * found
                values[...] = rounded(rowwise(beta, PAIRS) * load_tile(values) + erased, values.dtype)
                plgpu.commit_smem()
                writes = product(inverse, values, PAIRS)
                inverse[...] = rounded(writes, inverse.dtype)
                at_end = rowwise(load_by_row(vectors.at[UNTIL]), PAIRS) * writes
                shared.at_end[...] = rounded(at_end, shared.at_end.dtype)
                plgpu.commit_smem()
                plgpu.barrier_arrive(shared.written.at[slot])
                state = add_products(decay * state, [(k.T, shared.at_end)], state_shape, sizes)
                ring.release(slot)
                return state

            start = plgpu.load(own.state(ref.first, block), layout=TILE, optimized=False)
            write(own.state(ref.last, block), lax.fori_loop(0, num, step, start), sizes)
            states.drain(num)

        @pl.when(worker == BESIDE)
        def _read():
            def step(chunk, _):
                slot, place = ring.to_use(chunk), states.to_use(chunk)
                writes = shared.pairs.at[slot, INVERSE]
                if keep:
                    plgpu.copy_smem_to_gmem(shared.states.at[place], own.of_chunk(ref.before, chunk, block))
                of_state = product(shared.q.at[slot], shared.states.at[place], PAIRS)
                of_state = rowwise(load_by_row(shared.vectors.at[slot, SINCE]), PAIRS) * of_state
                plgpu.barrier_wait(shared.written.at[slot])
                if keep:
                    plgpu.copy_smem_to_gmem(writes, own.of_chunk(ref.writes, chunk, block))
                out = add_products(of_state, [(shared.pairs.at[slot, PRODUCTS], writes)], PAIRS, sizes)
                plgpu.wait_smem_to_gmem(0, wait_read_only=True)
                shared.out[...] = out.astype(shared.out.dtype)
                plgpu.commit_smem()
                states.release(place)
                ring.release(slot)
                plgpu.copy_smem_to_gmem(shared.out, own.values(ref.o, chunk, block))

            lax.fori_loop(0, num, step, None)
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)

    barriers = dict(
        of_ring=ring_barriers(depth, 5, 2),
        of_states=ring_barriers(2, 1, 1),
        written=plgpu.Barrier(num_barriers=depth),
    )
    inputs = dict(q=q, k=k, v=v, pairs=pairs, vectors=vectors, first=of_no_axes(first))
    outputs = dict(
        o=jax.ShapeDtypeStruct(v.shape, v.dtype),
        last=jax.ShapeDtypeStruct(first.shape, F32),
        writes=jax.ShapeDtypeStruct(sizes.by_chunk(BLOCK, sizes.value_dim), q.dtype) if keep else None,
        before=jax.ShapeDtypeStruct(sizes.by_chunk(sizes.key_dim, sizes.value_dim), q.dtype) if keep else None,
    )
    grid = dict(head=sizes.batch * sizes.heads, block=sizes.value_dim // BLOCK)
    found = launch(
        body, "delta_scan", grid, inputs, outputs, once | _slots(sizes, "v", depth) | barriers, sizes, warpgroups=3
    )
    return found.o, found.last, found.writes, found.before


def _scan_back(q, k, do, pairs, vectors, d_last, sizes: ChunkSizes):
    """(solved, d_after, d_first): the gradient of the state after each chunk, and before all."""
    num, state_shape = sizes.num_chunks, (sizes.key_dim, BLOCK)
    once = dict(d_state=tiled(*state_shape), of_key=tiled(*PAIRS), out=tiled(*PAIRS))
    depth = most_slots(num_bytes(once), num_bytes(_slots(sizes, "do", 1)), 4)

    def body(ref, shared):
        own, block, worker = Place(sizes, program_index("head")), program_index("block"), worker_index()
        ring = Ring(*shared.of_ring, depth)

        @pl.when(worker == FETCH)
        def _fetch_all():
            _fetch_chunks(ring, ref, shared, "do", own, block, lambda count: num - 1 - count)

        @pl.when(worker == BESIDE)
        def _prepare():
            """In place of P the part of dZ that its own chunk's outputs give, Pᵀ dO; and in place of dO what queries give the
            state before, times -1."""

            def step(count, _):
                slot = ring.to_use(count)
                products, do = shared.pairs.at[slot, PRODUCTS], shared.do.at[slot]
                d_read = product(products.T, do, PAIRS)
                of_query = rowwise(-load_by_row(shared.vectors.at[slot, SINCE]), PAIRS) * load_tile(do)
                plgpu.commit_smem()  # all warps have multiplied what is overwritten
                products[...] = rounded(d_read, products.dtype)
                do[...] = rounded(of_query, do.dtype)
                plgpu.commit_smem()
                plgpu.barrier_arrive(shared.prepared.at[slot])

            lax.fori_loop(0, num, step, None)

        @pl.when(worker == CARRY)
        def _carry():
            """The gradient of the state is carried times -1, as products are only ever added. In place of P comes dZ."""

            def step(count, negative):
                slot, chunk = ring.to_use(count), num - 1 - count
                k, inverse, found = shared.k.at[slot], shared.pairs.at[slot, INVERSE], shared.pairs.at[slot, PRODUCTS]
                vectors = shared.vectors.at[slot]
                decay = vectors[SINCE, BLOCK - 1]
                plgpu.wait_smem_to_gmem(0, wait_read_only=True)
                shared.d_state[...] = rounded(-negative, shared.d_state.dtype)
                plgpu.commit_smem()
                plgpu.copy_smem_to_gmem(shared.d_state, own.of_chunk(ref.d_after, chunk, block))
                kept = rowwise(load_by_row(vectors.at[UNTIL]), PAIRS) * product(k, shared.d_state, PAIRS)
                plgpu.barrier_wait(shared.prepared.at[slot])
                found[...] = rounded(load_tile(found) + kept, found.dtype)
                plgpu.commit_smem()
                solved = product(inverse.T, found, PAIRS)
                of_key = rowwise(load_by_row(vectors.at[SINCE]) * load_by_row(vectors.at[BETA]), PAIRS) * solved
                shared.out[...] = rounded(solved, shared.out.dtype)
                shared.of_key[...] = rounded(of_key, shared.of_key.dtype)
                plgpu.commit_smem()
                plgpu.copy_smem_to_gmem(shared.out, own.of_chunk(ref.solved, chunk, block))
                factors = [(shared.q.at[slot].T, shared.do.at[slot]), (k.T, shared.of_key)]
                negative = add_products(decay * negative, factors, state_shape, sizes)
                ring.release(slot)
                return negative

            start = -plgpu.load(own.state(ref.d_last, block), layout=TILE, optimized=False)
            write(own.state(ref.d_first, block), -lax.fori_loop(0, num, step, start), sizes)
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)

    barriers = dict(
        of_ring=ring_barriers(depth, 5, 1),
        prepared=plgpu.Barrier(num_barriers=depth),
    )
    inputs = dict(q=q, k=k, do=do, pairs=pairs, vectors=vectors, d_last=of_no_axes(d_last))
    outputs = dict(
        solved=jax.ShapeDtypeStruct(sizes.by_chunk(BLOCK, sizes.value_dim), q.dtype),
        d_after=jax.ShapeDtypeStruct(sizes.by_chunk(sizes.key_dim, sizes.value_dim), q.dtype),
        d_first=jax.ShapeDtypeStruct(d_last.shape, F32),
    )
    grid = dict(head=sizes.batch * sizes.heads, block=sizes.value_dim // BLOCK)
    found = launch(
        body,
        "delta_scan_back",
        grid,
        inputs,
        outputs,
        once | _slots(sizes, "do", depth) | barriers,
        sizes,
        warpgroups=3,
    )
    return found.solved, found.d_after, found.d_first


# --- Chunks by themselves ---------------------------------------------------------------------------------------------


def _gradients(q, k, v, do, before, d_after, writes, solved, vectors, sizes: ChunkSizes):
    """dq, dk [heads of a group, B, T, G, K], in float32 if a group has several heads; dv; d_beta [B, H, T], without what comes
    by way of states.

    by_query, by_key [B, H, T]: of the log decay between two tokens, summed by the later and by the earlier one. of_query,
    of_start [B, H, blocks of K, T]: of `since`, by way of o, and of R times -1 / β. of_end, of that shape: of `until`.
    of_state [B, H, N, K]: of the decay of a chunk.

    A program has every so many-th chunk of all heads. One warpgroup has all pairs of tokens, and for each 64 columns of keys
    another has what is read of states.
    """
    chunk_keys, value_blocks = sizes.key_dim // BLOCK, sizes.value_dim // BLOCK
    pairs_worker, fetch_worker = chunk_keys, chunk_keys + 1
    units = sizes.batch * sizes.heads * sizes.num_chunks
    programs = min(gpu().multiprocessors, units)
    # Of a multiplying thread; a second block of keys takes a warpgroup more.
    registers = 232 if chunk_keys == 1 else 152
    states = ("before", "d_after")
    of_values, of_writes = ("v", "do"), ("writes", "solved")

    def key_slots(depth: int):
        of_keys = {name: tiled(depth, chunk_keys, *PAIRS) for name in "qk"}
        return of_keys | dict(vectors=plain(depth, len(VECTORS), BLOCK))

    def value_slots(depth: int):
        of_tokens = {name: tiled(depth, *PAIRS) for name in (*of_values, *of_writes)}
        return of_tokens | {name: tiled(depth, chunk_keys, *PAIRS) for name in states}

    once = dict(dv=tiled(*PAIRS), d_dots=tiled(*PAIRS), d_similar=tiled(*PAIRS))
    depth = most_slots(num_bytes(once) + num_bytes(key_slots(2)), num_bytes(value_slots(1)), 4)

    def body(ref, shared):
        worker, program = worker_index(), program_index("program")
        of_keys, of_states = Ring(*shared.of_keys, 2), Ring(*shared.of_states, depth)
        of_pairs = Ring(*shared.of_pairs, 1)
        own_units = lax.div(units - program + programs - 1, programs)

        def unit(number):
            index = program + number * programs
            return Place(sizes, lax.div(index, sizes.num_chunks)), lax.rem(index, sizes.num_chunks)

        @pl.when(worker == fetch_worker)
        def _fetch_all():
            limit_registers(40, "decrease", sizes)

            def fetch(number, _):
                own, chunk = unit(number)
                slot = of_keys.to_fill(number)
                parts = [(own.whole(ref.vectors, chunk), shared.vectors.at[slot])]
                for row in range(chunk_keys):
                    parts += [
                        (own.keys(getattr(ref, x), chunk).at[:, own.columns(row)], getattr(shared, x).at[slot, row])
                        for x in "qk"
                    ]
                fetch_parts(parts, of_keys.full_at(slot))
                for block in range(value_blocks):
                    slot = of_states.to_fill(number * value_blocks + block)
                    parts = [
                        (own.values(getattr(ref, x), chunk, block), getattr(shared, x).at[slot]) for x in of_values
                    ]
                    parts += [
                        (own.of_chunk(getattr(ref, x), chunk, block), getattr(shared, x).at[slot]) for x in of_writes
                    ]
                    for row in range(chunk_keys):
                        parts += [
                            (
                                own.of_chunk(getattr(ref, x), chunk, block).at[own.columns(row)],
                                getattr(shared, x).at[slot, row],
                            )
                            for x in states
                        ]
                    fetch_parts(parts, of_states.full_at(slot))

            lax.fori_loop(0, own_units, fetch, None)
            of_keys.drain(own_units)
            of_states.drain(own_units * value_blocks)

        @pl.when(worker == pairs_worker)
        def _pairs():
            limit_registers(registers, "increase", sizes)
            row = plgpu.broadcasted_iota(jnp.int32, PAIRS, 0, layout=TILE)
            column = plgpu.broadcasted_iota(jnp.int32, PAIRS, 1, layout=TILE)

            def one_unit(number, _):
                own, chunk = unit(number)
                slot = of_keys.to_use(number)
                beta = load_by_row(shared.vectors.at[slot, BETA])
                d_products = d_system = None
                d_beta = zeros_by_row()
                for block in range(value_blocks):
                    here = of_states.to_use(number * value_blocks + block)
                    written = shared.writes.at[here].T
                    d_products = add_products(d_products, [(shared.do.at[here], written)], PAIRS, sizes)
                    d_system = add_products(d_system, [(shared.solved.at[here], written)], PAIRS, sizes)
                    solved = load_tile(shared.solved.at[here])
                    d_beta += jnp.sum(solved * load_tile(shared.v.at[here]), axis=1)
                    plgpu.wait_smem_to_gmem(0, wait_read_only=True)
                    shared.dv[...] = (rowwise(beta, PAIRS) * solved).astype(shared.dv.dtype)
                    plgpu.commit_smem()
                    of_states.release(here)
                    plgpu.copy_smem_to_gmem(shared.dv, own.values(ref.dv, chunk, block))
                decay = shared.vectors.at[slot, DECAY]
                by_row, by_column = (
                    rowwise(load_by_row(decay), PAIRS),
                    columnwise(plgpu.load(decay, layout=BY_COLUMN), PAIRS),
                )
                between = jnp.where(row >= column, exp2_of_decay(by_row - by_column), 0.0)
                of_pairs.to_fill(number)
                d_dots = d_products * between
                shared.d_dots[...] = d_dots.astype(shared.d_dots.dtype)
                rows = range(chunk_keys)
                # A token and itself have no decay between them.
                dots = add_products(None, [(shared.q.at[slot, x], shared.k.at[slot, x].T) for x in rows], PAIRS, sizes)
                d_between = jnp.where(row > column, d_dots * dots, 0.0)
                dots = add_products(None, [(shared.k.at[slot, x], shared.k.at[slot, x].T) for x in rows], PAIRS, sizes)
                d_system = jnp.where(row > column, -d_system * between, 0.0)
                d_beta += jnp.sum(d_system * dots, axis=1)
                d_similar = rowwise(beta, PAIRS) * d_system
                shared.d_similar[...] = d_similar.astype(shared.d_similar.dtype)
                plgpu.commit_smem()
                plgpu.barrier_arrive(of_pairs.full_at(0))
                d_between += d_similar * dots
                own.by_token(ref.by_query, chunk)[...] = jnp.sum(d_between, axis=1)
                own.by_token(ref.by_key, chunk)[...] = jnp.sum(d_between, axis=0)
                own.by_token(ref.d_beta, chunk)[...] = d_beta
                of_keys.release(slot)

            lax.fori_loop(0, own_units, one_unit, None)
            of_pairs.drain(own_units)
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)

        @pl.when(worker < chunk_keys)
        def _of_states():
            limit_registers(registers, "increase", sizes)

            def one_unit(number, _):
                own, chunk = unit(number)
                d_reads = d_end = d_start = None
                of_state = zeros_by_row()
                for block in range(value_blocks):
                    here = of_states.to_use(number * value_blocks + block)
                    before, d_after = shared.before.at[here, worker], shared.d_after.at[here, worker]
                    d_reads = add_products(d_reads, [(shared.do.at[here], before.T)], PAIRS, sizes)
                    d_end = add_products(d_end, [(shared.writes.at[here], d_after.T)], PAIRS, sizes)
                    d_start = add_products(d_start, [(shared.solved.at[here], before.T)], PAIRS, sizes)
                    of_state += jnp.sum(load_tile(before) * load_tile(d_after), axis=1)
                    plgpu.commit_smem()  # what has been read may be overwritten
                    of_states.release(here)
                ref.of_state.at[own.sequence, own.head, chunk, own.columns(worker)][...] = of_state
                slot = of_keys.to_use(number)
                q, k = shared.q.at[slot, worker], shared.k.at[slot, worker]

                def part(x):
                    return x.at[own.sequence, own.head, worker, own.tokens(chunk)]

                part(ref.of_query)[...] = jnp.sum(d_reads * load_tile(q), axis=1)
                part(ref.of_end)[...] = jnp.sum(d_end * load_tile(k), axis=1)
                part(ref.of_start)[...] = jnp.sum(d_start * load_tile(k), axis=1)
                since, until, beta = (load_by_row(shared.vectors.at[slot, x]) for x in (SINCE, UNTIL, BETA))
                dq = rowwise(since, PAIRS) * d_reads
                erased = rowwise(since * beta, PAIRS) * d_start
                dk = rowwise(until, PAIRS) * d_end - erased
                of_pairs.to_use(number)
                d_dots, d_similar = shared.d_dots, shared.d_similar
                dq = add_products(dq, [(d_dots, k)], PAIRS, sizes)
                dk = add_products(dk, [(d_dots.T, q), (d_similar, k), (d_similar.T, k)], PAIRS, sizes)
                of_pairs.release(0)
                plgpu.commit_smem()  # all warps have multiplied what is overwritten
                for own_keys, gradient, target in ((q, dq, ref.dq), (k, dk, ref.dk)):
                    target = own.keys(target.at[lax.rem(own.head, sizes.group_heads)], chunk).at[:, own.columns(worker)]
                    if sizes.group_heads > 1:
                        write(target, gradient, sizes)
                    else:
                        own_keys[...] = gradient.astype(own_keys.dtype)
                        plgpu.commit_smem()
                        plgpu.copy_smem_to_gmem(own_keys, target)
                plgpu.wait_smem_to_gmem(0, wait_read_only=True)
                of_keys.release(slot)

            lax.fori_loop(0, own_units, one_unit, None)

    workers = chunk_keys + 1
    barriers = dict(
        of_keys=ring_barriers(2, 2 * chunk_keys + 1, workers),
        of_states=ring_barriers(depth, 4 + 2 * chunk_keys, workers),
        of_pairs=ring_barriers(1, 1, chunk_keys),
    )
    inputs = dict(q=q, k=k, v=v, do=do, before=before, d_after=d_after, writes=writes, solved=solved, vectors=vectors)
    by_token = by_token_type(sizes)
    by_part = by_token_type(sizes, chunk_keys)
    partial = jax.ShapeDtypeStruct((sizes.group_heads, *q.shape), q.dtype if sizes.group_heads == 1 else F32)
    outputs = dict(
        dq=partial, dk=partial, dv=jax.ShapeDtypeStruct(v.shape, v.dtype), d_beta=by_token, by_query=by_token,
        by_key=by_token, of_query=by_part, of_end=by_part, of_start=by_part,
        of_state=jax.ShapeDtypeStruct(sizes.by_chunk(sizes.key_dim), F32),
    )  # fmt: skip
    shared = once | key_slots(2) | value_slots(depth) | barriers
    grid = dict(program=programs)
    return launch(
        body, "delta_gradients", grid, inputs, outputs, shared, sizes, warpgroups=workers + 1, column_sums=1024
    )
