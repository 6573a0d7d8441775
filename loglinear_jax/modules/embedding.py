"""The embedding, with a gradient that has the same bits each time."""

from __future__ import annotations

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.layout import Layout, with_layout_constraint
from jaxtyping import Array, Float, Int

from pallas_kernels import runs_on_gpu

BLOCK = 64  # rows that `sum_by_id_blocks` adds up at once
MOST_ROWS = 1 << 18  # that it takes: it compares each block with each


def lookup(
    table: Float[Array | np.ndarray, "vocab D"], ids: Int[Array | np.ndarray, "*N"], dtype=None
) -> Float[Array, "*N D"]:
    """table[ids] in dtype, the table's if None; NaN for an id that is not from 0 to vocab - 1.

    Its gradient has the same bits each time (see `sum_by_id_sorted`), and is summed in the table's dtype. In bfloat16 on a GPU
    it is summed in float32 by `sum_by_id_blocks`, where a gradient that is not finite reaches other ids. On a GPU it has no
    forward-mode derivative.
    """
    if isinstance(ids, np.ndarray) and ids.itemsize > 4:  # of which JAX may drop the upper half
        ids = np.where((ids >= 0) & (ids < len(table)), ids, len(table))
    ids = jnp.where(ids < 0, len(table), ids)  # which would count from the end
    return (_lookup_on_gpu if runs_on_gpu() else _rows)(table, ids, dtype or table.dtype)


def _rows(table, ids, dtype):
    return jnp.asarray(table).at[ids].get(mode="fill", fill_value=jnp.nan).astype(dtype)


_lookup_on_gpu = jax.custom_vjp(_rows, nondiff_argnums=(2,))


def _lookup_forward(table, ids, dtype):
    return _rows(table, ids, dtype), (ids, table[:, :0])


def _lookup_backward(dtype, saved, grad):
    ids, no_columns = saved
    rows, ids, num_ids = grad.reshape(ids.size, -1), ids.ravel(), len(no_columns)
    if rows.dtype == jnp.bfloat16 and ids.size <= MOST_ROWS:
        return sum_by_id_blocks(rows, ids, num_ids).astype(no_columns.dtype), None
    return sum_by_id_sorted(rows.astype(no_columns.dtype), ids, num_ids), None


_lookup_on_gpu.defvjp(_lookup_forward, _lookup_backward)


def sum_by_id_sorted(rows: Float[Array, "N D"], ids: Int[Array, " N"], num_ids: int) -> Float[Array, "num_ids D"]:
    """For each id the sum of its rows, in an order that the ids alone decide: sorted by id, added up along that by
    `jax.lax.associative_scan`, each sum written once."""
    order = jnp.argsort(ids)
    ids, rows = ids[order], rows[order]
    differs = ids[1:] != ids[:-1]
    starts, ends = jnp.append(True, differs), jnp.append(differs, True)

    def add(before, after):
        (sum_before, start_before), (sum_after, start_after) = before, after
        return jnp.where(start_after[:, None], sum_after, sum_before + sum_after), start_before | start_after

    sums, _ = jax.lax.associative_scan(add, (rows, starts))
    return _write_once(sums, ids, ends, num_ids)  # only the last row of an id is its sum


def _write_once(sums, ids, is_whole, num_ids: int):
    """For each id the row of sums which is the whole one, if it has any; 0 if not."""
    # The other rows get places of their own past the end, where they are dropped.
    place = jnp.where(is_whole, ids, num_ids + jnp.arange(ids.size))
    return jnp.zeros((num_ids, sums.shape[-1]), sums.dtype).at[place].set(sums, mode="drop", unique_indices=True)


def sum_by_id_blocks(rows: Float[Array, "N D"], ids: Int[Array, " N"], num_ids: int) -> Float[Array, "num_ids D"]:
    """The sums of `sum_by_id_sorted` in float32, for rows in bfloat16, by products with matrices of zeros and ones.

    The sorted rows are cut into blocks. One product adds up each id's rows of a block, and another one what later blocks have
    of an id to the block where it starts. So rows that are not finite reach other ids.
    """
    order = jnp.argsort(ids)
    # Each row in one piece of memory. Without this XLA stores a language model's features column by column in all layers, and
    # each row here has to be collected from far apart.
    rows = with_layout_constraint(rows, Layout((0, 1)))
    blocks = -(-ids.size // BLOCK)
    padding = blocks * BLOCK - ids.size
    ids = jnp.pad(ids[order], (0, padding), constant_values=num_ids).reshape(blocks, BLOCK)
    rows = jnp.pad(rows[order], [(0, padding), (0, 0)]).reshape(blocks, BLOCK, -1)
    multiply = functools.partial(jnp.einsum, precision="highest", preferred_element_type=jnp.float32)

    same = ids[:, :, None] == ids[:, None, :]
    sums = multiply("bij,bjd->bid", same.astype(rows.dtype), rows)
    first, last = ids[:, 0], ids[:, -1]
    goes_on = jnp.append(False, first[1:] == last[:-1])  # the id that the block before ends with
    starts = ~(goes_on & (first == last))  # whether the block's last id starts there
    later = starts[:, None] & goes_on & (last[:, None] == first)
    from_later = multiply("bc,cd->bd", later.astype(jnp.float32), sums[:, 0])
    sums += jnp.where((ids == last[:, None])[..., None], from_later[:, None], 0)

    is_first = jnp.concatenate([~goes_on[:, None], ids[:, 1:] != ids[:, :-1]], axis=1).ravel()
    return _write_once(sums.reshape(ids.size, -1), ids.ravel(), is_first, num_ids)


class Embed(nn.Embed):
    """flax.linen.Embed by `lookup`. Rows are rounded to dtype, not the table: gradients add up in the table's float32."""

    def __call__(self, ids: Int[Array | np.ndarray, "*N"]) -> Float[Array, "*N D"]:
        return lookup(self.embedding, ids, self.dtype)
