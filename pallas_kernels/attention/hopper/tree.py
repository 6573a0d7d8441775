"""The states of chunks on Hopper, element by element: nodes of the tree joined on the way up, gradients spread on the way down;
or one state handed from chunk to chunk, and its gradient back."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float

from pallas_kernels.attention.hopper.tiles import HopperTiles
from pallas_kernels.attention.triton import AttentionSizes, NodeDecay
from pallas_kernels.common.mosaic import F32, launch, program_index
from pallas_kernels.common.partition import of_no_axes

ELEMENTS = 512  # of a state that a program has, four a thread
BY_THREAD = plgpu.Layout.WG_STRIDED((ELEMENTS,), vec_size=4)


def _flat(states):
    """States [B, R, N, V, K] with their elements on one axis."""
    return states.reshape(*states.shape[:3], -1)


def _own(heads: int):
    """(sequence, head, strip, part) of a program; part(x, place): its elements of a head's state in x [B, R, N, elements]."""
    z, strip = program_index("head"), program_index("strip")
    sequence, head = lax.div(z, heads), lax.rem(z, heads)
    return sequence, head, strip, lambda x, place: x.at[sequence, head, place, pl.ds(strip * ELEMENTS, ELEMENTS)]


def merge_states(
    states: Float[Array, "B R N V K"],
    node_decay: NodeDecay,
    sizes: AttentionSizes,
    tiles: HopperTiles,
    size: int,
) -> Float[Array, "B R N V K"]:
    """Joins nodes of `size` chunks into nodes of up to size * tiles.radix, in place. node_decay [B, H, N / size], log2."""
    radix, heads, num_chunks = tiles.radix, sizes.heads, sizes.num_chunks
    elements = sizes.key_dim * sizes.value_dim
    num_nodes = node_decay.shape[2]

    def body(ref, _):
        sequence, head, _, part = _own(heads)
        first = program_index("group") * radix
        ends = [(first + index + 1) * size for index in range(radix)]
        read = [part(ref.states, jnp.minimum(end, num_chunks - 1)) for end in ends]
        nodes = [plgpu.load(node, layout=BY_THREAD).astype(F32) for node in read]
        decays = [ref.decay[sequence, head, jnp.minimum(first + index, num_nodes - 1)] for index in range(radix)]
        step = 1
        while step < radix:
            for index in range(2 * step - 1, radix, 2 * step):
                nodes[index] += jnp.exp2(decays[index]) * nodes[index - step]
                decays[index] += decays[index - step]
            step *= 2
        for index in range(1, radix, 2):

            @pl.when(ends[index] < num_chunks)
            def _(index=index):
                part(ref.states, ends[index])[...] = nodes[index].astype(ref.states.dtype)

    merged = jax.new_ref(of_no_axes(_flat(states)))
    grid = dict(head=sizes.batch * heads, group=-(-num_nodes // radix), strip=elements // ELEMENTS)
    launch(body, "merge_states", grid, dict(states=merged, decay=node_decay), {}, {}, sizes)
    return jax.freeze(merged).reshape(states.shape)


def spread_gradients(
    state_gradients: Float[Array, "B R N V K"],
    states: Float[Array, "B R N V K"],
    above: Float[Array, "B R groups V K"] | None,
    node_decay: NodeDecay,
    sizes: AttentionSizes,
    tiles: HopperTiles,
    size: int,
    radix: int,
) -> tuple[Float[Array, "B R n V K"], Float[Array, "B R n parts"]]:
    """As `attention.triton.spread_gradients`."""
    heads, num_chunks = sizes.heads, sizes.num_chunks
    elements = sizes.key_dim * sizes.value_dim
    strips = elements // ELEMENTS
    num_nodes = node_decay.shape[2]
    in_place = size == 1

    def body(ref, _):
        gradients_ref = ref.read if in_place else ref.gradients
        sequence, head, strip, part = _own(heads)
        group = program_index("group")
        first, last = group * radix, num_nodes - 1
        decays = [ref.decay[sequence, head, jnp.minimum(first + index, last)] for index in range(radix)]
        top = plgpu.layout_cast(jnp.zeros((ELEMENTS,), F32), BY_THREAD)
        if ref.above is not None:
            top = plgpu.load(part(ref.above, group), layout=BY_THREAD).astype(F32)
        # All is read before anything is written: the memory may be the same, and the reads go together.
        exists = [(first + index) * size < num_chunks for index in range(radix)]
        ends = [jnp.minimum((first + index) * size, num_chunks - 1) for index in range(radix)]
        reads, of_states = (
            [plgpu.load(part(source, end), layout=BY_THREAD) for end in ends] for source in (ref.read, ref.states)
        )

        def spread(start: int, count: int, gradient):
            """The gradient of `count` nodes together, from first + start, goes down to each."""
            if count == 1:

                @pl.when(first + start <= last)
                def _():
                    part(gradients_ref, first + start)[...] = gradient.astype(gradients_ref.dtype)

                return
            half = count // 2
            middle = start + half
            passed_on = jnp.exp2(sum(decays[middle : start + count])) * gradient
            read = jnp.where(exists[middle], reads[middle].astype(F32), 0.0)

            @pl.when(exists[middle])
            def _():
                ref.d_merge[sequence, head, first + middle, strip] = jnp.sum(of_states[middle].astype(F32) * passed_on)

            spread(start, half, passed_on + read)
            spread(middle, half, gradient)

        spread(0, radix, top)

    read = jax.new_ref(of_no_axes(_flat(state_gradients)))
    inputs = dict(read=read, states=_flat(states), decay=node_decay, above=None if above is None else _flat(above))
    shape = (sizes.batch, heads, num_nodes)
    results = dict(
        gradients=None if in_place else jax.ShapeDtypeStruct((*shape, elements), states.dtype),
        d_merge=jax.ShapeDtypeStruct((*shape, strips), F32),
    )
    grid = dict(head=sizes.batch * heads, group=-(-num_nodes // radix), strip=strips)
    found = launch(body, "spread_gradients", grid, inputs, results, {}, sizes, column_sums=1024)
    gradients = jax.freeze(read) if in_place else found.gradients
    return gradients.reshape(*shape, *states.shape[3:]), found.d_merge


def scan_states(
    own: Float[Array, "B R N V K"],
    chunk_decay: NodeDecay,
    sizes: AttentionSizes,
    tiles: HopperTiles,
    states: Float[Array, "B R N V K"] | None = None,
) -> tuple[Float[Array, "B R N V K"], Float[Array, "B R N"] | None]:
    """(The one state that each chunk reads, from the state of the chunk before alone, in place; None).

    With these `states`, backwards: from the gradient of what each chunk reads (that of its own state, in place; that of the log
    decay over it by which the state passes it). A program has some elements of a head's state, and reads ahead a block of
    `tiles.radix` chunks.
    """
    heads, elements, num_chunks = sizes.heads, sizes.key_dim * sizes.value_dim, sizes.num_chunks
    backward = states is not None
    count, strips = num_chunks if backward else num_chunks - 1, elements // ELEMENTS
    block = min(tiles.radix, count)

    def body(ref, _):
        sequence, head, strip, part = _own(heads)

        def one_block(number, total):
            steps = [number * block + index for index in range(block)]
            passed = [jnp.minimum(step, count - 1) for step in steps]  # chunks
            passed = [num_chunks - 1 - chunk for chunk in passed] if backward else passed
            places = passed if backward else [chunk + 1 for chunk in passed]
            decays = [ref.decay[sequence, head, chunk] for chunk in passed]
            found, of_states = (
                [] if source is None else [plgpu.load(part(source, place), layout=BY_THREAD) for place in places]
                for source in (ref.scanned, ref.states)
            )
            for index, place in enumerate(places):
                later, decayed = total, jnp.exp2(decays[index]) * total
                total = decayed + found[index].astype(F32)

                @pl.when(steps[index] < count)
                def _(index=index, place=place, result=later if backward else total, decayed=decayed):
                    part(ref.scanned, place)[...] = result.astype(ref.scanned.dtype)
                    if backward:  # chunk 0 reads no state
                        of_decay = jnp.sum(of_states[index].astype(F32) * decayed)
                        ref.d_decay[sequence, head, place, strip] = jnp.where(place > 0, of_decay, 0.0)

            return total

        start = plgpu.layout_cast(jnp.zeros((ELEMENTS,), F32), BY_THREAD)
        lax.fori_loop(0, -(-count // block), one_block, start)

    scanned = jax.new_ref(of_no_axes(_flat(own)))
    inputs = dict(scanned=scanned, states=_flat(states) if backward else None, decay=chunk_decay)
    of_decay = jax.ShapeDtypeStruct((*chunk_decay.shape, strips), F32)
    grid, results = dict(head=sizes.batch * heads, strip=strips), dict(d_decay=of_decay if backward else None)
    name = "suffix_gradients" if backward else "prefix_states"
    found = launch(body, name, grid, inputs, results, {}, sizes, column_sums=1024)
    return jax.freeze(scanned).reshape(own.shape), jnp.sum(found.d_decay, axis=3) if backward else None
