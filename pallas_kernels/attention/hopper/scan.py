"""The kernels of the chunkwise Fenwick scan for Hopper GPUs in bfloat16, by the Mosaic GPU lowering of Pallas.

Names, shapes and functions are those of `attention.triton`, with these differences. A block has 64 tokens, as many as the
matrix unit of a warpgroup takes rows; a chunk has one or two blocks, in which all pairs of tokens are multiplied out. A state
is [V, K], so that one instruction builds it. Values are not cut into blocks. λ is read as it comes, [B, T, H, L]. With λ ≡ 1 a
chunk c reads one state instead, state[c] of all chunks before it, which `scan_states` hands from chunk to chunk.

In most kernels one warpgroup of a program fetches, and the others multiply. What it fetches waits in a ring of slots: a barrier
says that a slot is full, another that all have used it.
"""

import jax.numpy as jnp

from pallas_kernels.attention.hopper.chunk_gradients import chunk_gradients
from pallas_kernels.attention.hopper.chunk_states import chunk_states
from pallas_kernels.attention.hopper.outputs import outputs
from pallas_kernels.attention.hopper.query_gradients import query_gradients
from pallas_kernels.attention.hopper.state_gradients import state_gradients
from pallas_kernels.attention.hopper.tree import merge_states, scan_states, spread_gradients

__all__ = [
    "chunk_gradients",
    "chunk_states",
    "laid_out",
    "merge_states",
    "outputs",
    "query_gradients",
    "scan_states",
    "spread_gradients",
    "state_gradients",
]


def laid_out(states):
    """States [..., K, V] in the kernels' layout, or back."""
    return jnp.swapaxes(states, -1, -2)
