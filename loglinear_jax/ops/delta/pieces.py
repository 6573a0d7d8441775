"""The delta rule over one piece of a sequence that is cut over devices (see `ops.sequence_parallel`).

Later tokens change a state not only by decays but by maps, so the maps of whole pieces are gathered together with their states.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from loglinear_jax.ops.delta.chunkwise import Nodes
from loglinear_jax.ops.delta.transitions import Maps
from loglinear_jax.ops.heads import merge_heads, split_heads
from loglinear_jax.ops.sequence_parallel import buckets_of_pieces, gathered
from loglinear_jax.ops.sharding import varying_as


def states_before(
    piece: Nodes, axis_name: str, by_bucket: bool, precision: jax.lax.PrecisionLike = None
) -> Float[Array, "B G R U K V"]:
    """What this piece finds of earlier ones: a state for each bucket of them, or one in all. By one collective.

    piece: the one node of all its tokens.
    """
    of_piece = piece.maps.decay, piece.maps.lost, piece.states
    decay, lost, own = gathered([x[:, :, :, 0] for x in of_piece], axis_name)
    buckets = buckets_of_pieces(axis_name) if by_bucket else jnp.ones((len(own), 1), bool)
    is_before = jnp.arange(len(own), dtype=jnp.int32) < jax.lax.axis_index(axis_name)
    # 0 · NaN of a later piece is NaN.
    decay, lost, own = (jnp.where(is_before.reshape(-1, *[1] * (x.ndim - 1)), x, 0) for x in (decay, lost, own))

    def add_piece(states, one):
        decay, lost, own, bucket, is_before = one
        after = Maps(decay[..., None], lost[..., None, :, :]).apply(states, precision)
        after += jnp.where(bucket[:, None, None], own[..., None, :, :], 0)
        return jnp.where(is_before, after, states), None

    none = jnp.zeros((*own.shape[1:4], buckets.shape[1], *own.shape[4:]), own.dtype)
    return jax.lax.scan(add_piece, varying_as(own, none), (decay, lost, own, buckets, is_before))[0]


def read(
    piece: Nodes, states: Float[Array, "B G R U K V"], lam: Float[Array, "B T H U"], axis_name: str, precision=None
) -> Float[Array, "B T H V"]:
    """What the states of `states_before` add to the outputs of the tokens, for their λ of these levels alone."""
    groups, levels = states.shape[1], np.arange(lam.shape[3], dtype=np.int32)
    occupied = jnp.right_shift(jax.lax.axis_index(axis_name), levels) & 1 == 1
    lam = split_heads(jnp.where(occupied, lam, 0), groups)  # 0 · inf is NaN
    reads = piece.reads.reshape(*lam.shape[:4], -1)
    return merge_heads(jnp.einsum("bgrtu,bgrtk,bgrukv->bgrtv", lam, reads, states, precision=precision))
