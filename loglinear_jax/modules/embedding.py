"""The embedding, with a gradient that has the same bits each time."""

from __future__ import annotations

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from pallas_kernels import runs_on_gpu


@jax.custom_vjp
def lookup(table: Float[Array | np.ndarray, "vocab D"], ids: Int[Array | np.ndarray, "*N"]) -> Float[Array, "*N D"]:
    """table[ids], whose gradient has the same bits each time (see `sum_by_id_sorted`), in the table's type."""
    return jnp.asarray(table)[ids]


def _lookup_forward(table, ids):
    return table[ids], (ids, table[:, :0])


def _lookup_backward(saved, grad):
    ids, no_columns = saved
    sums = sum_by_id_sorted if runs_on_gpu() else sum_by_id
    return sums(grad.reshape(ids.size, -1), ids.ravel(), len(no_columns)), None


lookup.defvjp(_lookup_forward, _lookup_backward)


def sum_by_id(rows: Float[Array, "N D"], ids: Int[Array, " N"], num_ids: int) -> Float[Array, "num_ids D"]:
    """For each id the sum of its rows. A CPU adds them in order, a GPU in whatever order its threads come."""
    return jnp.zeros((num_ids, rows.shape[-1]), rows.dtype).at[ids].add(rows)


def sum_by_id_sorted(rows: Float[Array, "N D"], ids: Int[Array, " N"], num_ids: int) -> Float[Array, "num_ids D"]:
    """`sum_by_id` in an order that the ids alone decide: sorted by id, added up along that by `jax.lax.associative_scan`, each
    sum written once."""
    order = jnp.argsort(ids)
    ids, rows = ids[order], rows[order]
    differs = ids[1:] != ids[:-1]
    starts, ends = jnp.append(True, differs), jnp.append(differs, True)

    def add(before, after):
        (sum_before, start_before), (sum_after, start_after) = before, after
        return jnp.where(start_after[:, None], sum_after, sum_before + sum_after), start_before | start_after

    sums, _ = jax.lax.associative_scan(add, (rows, starts))
    # Only the last row of an id is its sum; the others get places of their own past the end, where they are dropped.
    place = jnp.where(ends, ids, num_ids + jnp.arange(ids.size))
    return jnp.zeros((num_ids, rows.shape[-1]), rows.dtype).at[place].set(sums, mode="drop", unique_indices=True)


class Embed(nn.Embed):
    """flax.linen.Embed by `lookup`. Rows are rounded to dtype, not the table: gradients add up in the table's float32."""

    def __call__(self, ids: Int[Array | np.ndarray, "*N"]) -> Float[Array, "*N D"]:
        return lookup(self.embedding, ids).astype(self.dtype or self.embedding.dtype)
