"""The tree of states on Hopper, element by element: nodes joined on the way up, gradients spread on the way down."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float

from pallas_kernels.attention.hopper.parts import F32, launch, program_index
from pallas_kernels.attention.hopper.tiles import HopperTiles
from pallas_kernels.attention.triton import AttentionSizes, NodeDecay
from pallas_kernels.common.partition import of_no_axes

ELEMENTS = 512  # of a state that a program has, four a thread
BY_THREAD = plgpu.Layout.WG_STRIDED((ELEMENTS,), vec_size=4)


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
        z, group, strip = program_index("head"), program_index("group"), program_index("strip")
        sequence, head = lax.div(z, heads), lax.rem(z, heads)
        first = group * radix
        ends = [(first + index + 1) * size for index in range(radix)]

        def node(end):
            return ref.states.at[sequence, head, end, pl.ds(strip * ELEMENTS, ELEMENTS)]

        nodes = [plgpu.load(node(jnp.minimum(end, num_chunks - 1)), layout=BY_THREAD).astype(F32) for end in ends]
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
                node(ends[index])[...] = nodes[index].astype(ref.states.dtype)

    merged = jax.new_ref(of_no_axes(states.reshape(*states.shape[:3], elements)))
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

    def flat(x):
        return x.reshape(*x.shape[:3], elements)

    in_place = size == 1

    def body(ref, _):
        gradients_ref = ref.read if in_place else ref.gradients
        z, group, strip = program_index("head"), program_index("group"), program_index("strip")
        sequence, head = lax.div(z, heads), lax.rem(z, heads)
        first, last = group * radix, num_nodes - 1

        def part(source, index):
            return source.at[sequence, head, index, pl.ds(strip * ELEMENTS, ELEMENTS)]

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

    read = jax.new_ref(of_no_axes(flat(state_gradients)))
    inputs = dict(read=read, states=flat(states), decay=node_decay, above=None if above is None else flat(above))
    shape = (sizes.batch, heads, num_nodes)
    results = dict(
        gradients=None if in_place else jax.ShapeDtypeStruct((*shape, elements), states.dtype),
        d_merge=jax.ShapeDtypeStruct((*shape, strips), F32),
    )
    grid = dict(head=sizes.batch * heads, group=-(-num_nodes // radix), strip=strips)
    found = launch(body, "spread_gradients", grid, inputs, results, {}, sizes, column_sums=1024)
    gradients = jax.freeze(read) if in_place else found.gradients
    return gradients.reshape(*shape, *states.shape[3:]), found.d_merge
