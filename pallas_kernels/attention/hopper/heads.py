"""Which heads a program has, and in what order chunks and the states that they read come."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from loglinear_jax.fenwick import next_end, node_height
from pallas_kernels.attention.triton import AttentionSizes
from pallas_kernels.common.mosaic import program_index


class Heads:
    """The heads of a program, `number` of them from `first` on: of one group, or, if each head has keys of its own, of several.

    axes: of the grid, those that tell which heads a program has; `sequence`, `first`, `part` and `group` read them.
    """

    def __init__(self, sizes: AttentionSizes, number: int):
        self.number, self.sizes = number, sizes
        self.own_keys = sizes.group_heads == 1 and number > 1
        self.share_keys = sizes.group_heads > 1 and number > 1

    @property
    def axes(self) -> dict[str, int]:
        sizes = self.sizes
        if self.own_keys:
            return dict(sequence=sizes.batch, block=sizes.heads // self.number)
        return dict(sequence=sizes.batch * sizes.groups, block=sizes.group_heads // self.number)

    @property
    def parts(self) -> int:
        """How many programs have heads of the same group, and so a part of dq and dk each."""
        return 1 if self.own_keys else self.axes["block"]

    @property
    def part(self):
        return 0 if self.own_keys else program_index("block")

    @property
    def sequence(self):
        z = program_index("sequence")
        return z if self.own_keys else lax.div(z, self.sizes.groups)

    @property
    def first(self):
        before = 0 if self.own_keys else lax.rem(program_index("sequence"), self.sizes.groups) * self.sizes.group_heads
        return before + program_index("block") * self.number

    def group(self, number=0):
        """Of the program's head of this number."""
        return self.first + number if self.own_keys else lax.rem(program_index("sequence"), self.sizes.groups)

    def fetch(self, pairs, number, slot, blocks, barrier):
        """What the group of the program's head of this number has in arrays [B, T, G, K]: blocks of tokens, into this slot.

        pairs: of such an array and shared memory [slot, block, tokens, K]. blocks: the tokens of a block by its number.
        """
        for source, target in pairs:
            for row, tokens in blocks.items():
                here = source.at[self.sequence, tokens, self.group(number)]
                plgpu.copy_gmem_to_smem(here, target.at[slot, row], barrier)

    def key_slot(self, slot):
        """Where the queries and keys of the head in this slot are: in one of their own, or in one for all heads."""
        return slot if self.own_keys else 0


def for_states_read(ref, sizes: AttentionSizes, sequence, chunk, body, carry):
    """body(height, the states' array, the place there, carry) for each state that the chunk reads: of the tree, and of what
    came before the sequence.

    ref: with `states` if there is a tree, and with `initial` and `above` if something came before.
    """

    def read(states, first: int, bits, is_place: bool, carry):
        def step(bits_and_carry):
            bits, carry = bits_and_carry
            height = node_height(bits)
            return next_end(bits), body(first + height, states, bits if is_place else height, carry)

        return lax.while_loop(lambda x: x[0] != 0, step, (bits, carry))[1]

    if sizes.one_state and sizes.heights:
        return lax.fori_loop(0, jnp.minimum(chunk, 1), lambda _, carry: body(0, ref.states, chunk, carry), carry)
    if sizes.heights:
        carry = read(ref.states, 0, chunk, True, carry)
    if sizes.upper:
        # In jax.shard_map what is read of `above` varies over devices, but what is computed in a kernel does not.
        carry = read(ref.initial, sizes.heights, ref.above[sequence] + 0, False, carry)
    return carry


def chunks_by_reads(sizes: AttentionSizes):
    """Chunks in the order in which programs start, those that read the most states first, so that all are done together."""
    chunks = np.arange(sizes.num_chunks)
    return jnp.asarray(sorted(chunks, key=lambda chunk: -int(chunk).bit_count()), jnp.int32)


def states_type(sizes: AttentionSizes) -> jax.ShapeDtypeStruct:
    """States and their gradients, [B, H, N, V, K]."""
    shape = (sizes.batch, sizes.heads, sizes.num_chunks, sizes.value_dim, sizes.key_dim)
    return jax.ShapeDtypeStruct(shape, sizes.dtype)
