"""One token of decoding by one kernel: every level's state is read once and written once, in place."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from loglinear_jax.fenwick import merged_level
from pallas_kernels.attention.backends import MAX_DIM, MIN_DIM
from pallas_kernels.common.chunks import at_most_zero
from pallas_kernels.common.launch import HeadAxes, call, fold_mapped_axes
from pallas_kernels.common.support import interpreting
from pallas_kernels.common.tiles import Launch
from pallas_kernels.registry import Kernel, register

ELEMENTS = 512  # of a state that a program has, four a thread, of all levels at once
MAX_STEP_LEVELS = 32  # as many as int32 positions have
SLOW = -0.5  # log decays from here on are near 1
LAUNCH = Launch(heads=1, warps=4, stages=1)


def fenwick_step(
    levels: Float[Array, "B H L K V"],
    position: Int[Array, " B"],
    q: Float[Array, "B G K"],
    k: Float[Array, "B G K"],
    v: Float[Array, "B H V"],
    log_decay: Float[Array, "B H"],
    lam: Float[Array, "B H L"],
) -> tuple[Float[Array, "B H V"], Float[Array, "B H L K V"]]:
    """Merges the levels for the token at `position`, decays them, puts k vᵀ at level 0, and reads o = qᵀ Σ_ℓ lam[ℓ] S_ℓ.

    Args:
      levels: [B, H, L, K, V] float32, L up to 32, K and V powers of two from 16 to 256. Their memory takes the result where the
        caller donates it, or scans; else it is copied.
      position: [B] int32, of the token: how many were before it.
      q, k: [B, G, K]. v: [B, H, V], H a multiple of G. log_decay: [B, H], ≤ 0. lam: [B, H, L].

    Returns (o [B, H, V] float32, the levels after it). Not differentiable; batched by vmap, to any depth.

    Raises UnsupportedError where KERNELS["fenwick_step"] says why it cannot run.
    """
    STEP.require(*levels.shape[-3:], levels.dtype)
    operands = (x.astype(jnp.float32) for x in (q, k, v, at_most_zero(log_decay), lam))
    run = functools.partial(_step, interpret=interpreting())
    axes = HeadAxes(v.shape[1] if q.shape[1] == 1 else q.shape[1], (1, None))
    return fold_mapped_axes(run, heads=axes)(levels, position.astype(jnp.int32), *operands)


def _limits(num_levels: int, key_dim: int, value_dim: int, dtype: DTypeLike) -> str | None:
    for name, size in (("K, the key dim,", key_dim), ("V, the value dim,", value_dim)):
        if not MIN_DIM <= size <= MAX_DIM or size & (size - 1):
            return f"{name} is {size}: the kernel of a step takes powers of two from {MIN_DIM} to {MAX_DIM}"
    if num_levels > MAX_STEP_LEVELS:
        return f"the state has {num_levels} levels: the kernel of a step takes up to {MAX_STEP_LEVELS}"
    if dtype != jnp.float32:
        return f"the state has dtype {jnp.dtype(dtype)}: the kernel of a step takes float32"
    return None


# Plain JAX takes only about a tenth longer.
STEP = register("fenwick_step", Kernel("fenwick_step", _limits, tells=False))


def _step(levels, position, q, k, v, log_decay, lam, *, interpret: bool):
    batch, heads, num_levels, key_dim, value_dim = levels.shape
    rows = min(max(ELEMENTS // value_dim, 1), key_dim)
    parts = key_dim // rows
    q, k = (jnp.repeat(x, heads // x.shape[1], axis=1) for x in (q, k))
    # One array for all that a head needs, so that XLA prepares it by one kernel. The barrier keeps the computation of λ out of
    # that kernel, which would repeat it for each element.
    lam = lax.optimization_barrier(lam)
    token = jnp.concatenate([q, k, v, lam, log_decay[..., None]], axis=-1)

    of_levels = pl.BlockSpec((None, None, num_levels, rows, value_dim), lambda x, h, b: (b, h, 0, x, 0))
    out, levels = call(
        functools.partial(_step_kernel, num_levels=num_levels, key_dim=key_dim),
        "fenwick_step",
        (parts, heads, batch),
        [
            of_levels,
            pl.BlockSpec((None,), lambda x, h, b: (b,)),
            pl.BlockSpec((None, None, token.shape[-1]), lambda x, h, b: (b, h, 0)),
        ],
        [pl.BlockSpec((None, None, None, value_dim), lambda x, h, b: (b, h, x, 0)), of_levels],
        [
            jax.ShapeDtypeStruct((batch, heads, parts, value_dim), jnp.float32),
            jax.ShapeDtypeStruct(levels.shape, levels.dtype),
        ],
        LAUNCH,
        interpret,
        aliases={0: 1},
    )(levels, position, token)
    return jnp.sum(out, axis=2), levels


def _step_kernel(levels_ref, position_ref, token_ref, out_ref, after_ref, *, num_levels: int, key_dim: int):
    # All is read before anything is written, as it is the same memory: so the reads wait together.
    before = [levels_ref[level] for level in range(num_levels)]
    position = position_ref[...]
    rows, value_dim = before[0].shape
    first, values = pl.program_id(0) * rows, 2 * key_dim
    q, k = (token_ref[pl.ds(start + first, rows)] for start in (0, key_dim))
    v, lam = token_ref[pl.ds(values, value_dim)], values + value_dim
    log_decay = token_ref[lam + num_levels]
    # Near 1, exp would be rounded alike at each of many steps; far from it, little would be left of a difference.
    kept, lost = (
        jnp.where(log_decay > SLOW, 1.0, jnp.exp(log_decay)),
        jnp.where(log_decay > SLOW, jnp.expm1(log_decay), 0.0),
    )
    into = merged_level(position, num_levels)
    after = k[:, None] * v[None, :]
    merged, weighted = before[0], token_ref[lam] * after
    after_ref[0] = after
    for level in range(1, num_levels):
        after = jnp.where(level < into, 0.0, jnp.where(level == into, before[level] + merged, before[level]))
        after = kept * after + lost * after
        merged += jnp.where(level < into, before[level], 0.0)
        weighted += jnp.where((position >> (level - 1)) & 1 == 1, token_ref[lam + level], 0.0) * after
        after_ref[level] = after
    out_ref[:] = jnp.sum(q[:, None] * weighted, axis=0)
