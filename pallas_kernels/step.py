"""One token of decoding by one kernel: the levels are read once and written once, in place."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels.common import call, fold_mapped_axes
from pallas_kernels.support import MAX_DIM, MIN_DIM, UnsupportedError, interpreting, why_cannot_run
from pallas_kernels.tiles import Launch

ELEMENTS = 1024  # of K x V that a program has
LAUNCH = Launch(heads=1, warps=4, stages=1)


def fenwick_step(levels, position, q, k, v, log_decay, lam):
    """Merges the levels for the token at `position`, decays them, puts k vᵀ at level 0, and reads o = qᵀ Σ_ℓ lam[ℓ] S_ℓ.

    Args:
      levels: [B, H, L, K, V] float32. position: [B] int32, of the token: how many were before it.
      q, k: [B, G, K]. v: [B, H, V], H a multiple of G. log_decay: [B, H], ≤ 0. lam: [B, H, L].

    Returns (o [B, H, V] float32, the levels after it). Not differentiable; batched by vmap, to any depth.

    Raises UnsupportedError where `why_step_unsupported` gives a reason.
    """
    if reason := why_step_unsupported(*levels.shape[-2:], levels.dtype):
        raise UnsupportedError(reason)
    operands = (x.astype(jnp.float32) for x in (q, k, v, log_decay, lam))
    run = functools.partial(_step, interpret=interpreting())
    return fold_mapped_axes(run)(levels, position.astype(jnp.int32), *operands)


def why_step_unsupported(key_dim: int, value_dim: int, dtype) -> str | None:
    """Why `fenwick_step` would raise UnsupportedError here for levels of this dtype; None if it would run."""
    for name, size in (("K, the key dim,", key_dim), ("V, the value dim,", value_dim)):
        if not MIN_DIM <= size <= MAX_DIM or size & (size - 1):
            return f"{name} is {size}: the kernel of a step takes powers of two from {MIN_DIM} to {MAX_DIM}"
    if dtype != jnp.float32:
        return f"the state has dtype {jnp.dtype(dtype)}: the kernel of a step takes float32"
    return why_cannot_run()


def _step(levels, position, q, k, v, log_decay, lam, *, interpret: bool):
    batch, heads, num_levels, key_dim, value_dim = levels.shape
    group_heads = heads // q.shape[1]
    columns = min(max(ELEMENTS // key_dim, 4), value_dim)

    def by_head(*shape):
        return pl.BlockSpec((None, None, *shape), lambda x, h, b: (b, h, *(0 for _ in shape)))

    of_group = pl.BlockSpec((None, None, key_dim), lambda x, h, b: (b, h // group_heads, 0))
    of_values = pl.BlockSpec((None, None, columns), lambda x, h, b: (b, h, x))
    of_levels = pl.BlockSpec((None, None, num_levels, key_dim, columns), lambda x, h, b: (b, h, 0, 0, x))
    out, levels = call(
        functools.partial(_step_kernel, num_levels=num_levels),
        "fenwick_step",
        (value_dim // columns, heads, batch),
        [
            of_levels,
            pl.BlockSpec((None,), lambda x, h, b: (b,)),
            of_group,
            of_group,
            of_values,
            by_head(),
            by_head(num_levels),
        ],
        [of_values, of_levels],
        [jax.ShapeDtypeStruct(v.shape, jnp.float32), jax.ShapeDtypeStruct(levels.shape, levels.dtype)],
        LAUNCH,
        interpret,
        aliases={0: 1},
    )(levels, position, q, k, v, log_decay, lam)
    return out, levels


def _step_kernel(
    levels_ref, position_ref, q_ref, k_ref, v_ref, log_decay_ref, lam_ref, out_ref, after_ref, *, num_levels: int
):
    del levels_ref  # the same memory as after_ref
    position = position_ref[...]
    # Levels 0 .. z go into level z + 1, z the trailing zeros of the position; before the first token there is nothing.
    into = jnp.where(position == 0, num_levels, 32 - lax.clz(position ^ (position - 1)))
    decay = jnp.exp(log_decay_ref[...])
    new = k_ref[:][:, None] * v_ref[:][None, :]
    merged, weighted = after_ref[0], lam_ref[0] * new
    after_ref[0] = new
    for level in range(1, num_levels):
        before = after_ref[level]
        after = decay * jnp.where(level < into, 0.0, jnp.where(level == into, before + merged, before))
        merged += jnp.where(level < into, before, 0.0)
        weighted += lam_ref[level] * after
        after_ref[level] = after
    out_ref[:] = jnp.sum(q_ref[:][:, None] * weighted, axis=0)
