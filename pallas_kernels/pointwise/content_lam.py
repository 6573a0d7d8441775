"""λ of what buckets hold: a softmax over the occupied levels, of bucket scores as their kernel writes them, and its gradient.
A kernel each: XLA would take several that read all scores, and one more to turn λ to where the attention reads it.

Names and shapes inside:

  scores    [B, H, L, T] float32
  scale     [B, H] float32, as a mapped axis becomes part of the batch
  occupied  [B, T] int32, bit ℓ for level ℓ
  lam       [B, T, H, L] float32
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float

from pallas_kernels.common.launch import HeadAxes, call, of_sequence, vary_as, with_gradient
from pallas_kernels.common.support import interpreting, triton
from pallas_kernels.common.tiles import Launch
from pallas_kernels.registry import Kernel, register

MAX_LEVELS = 31  # bits of an int32 above 0
LAUNCH = Launch(heads=4, warps=4, stages=1)
TOKENS = 32  # a program


def content_lam(
    scores: Float[Array, "B T H L"], scale: Float[Array, " H"], occupied: Bool[Array | np.ndarray, "T 1 L"]
) -> Float[Array, "B T H L"]:
    """λ = softmax over the occupied levels of scale_h · scores, 0 for the others.

    Args:
      scores: [B, T, H, L] float32, fastest as `chunk_scores` returns them: then nothing is moved in memory.
      scale: [H], used in float32. occupied: [T, 1, L] bool, with a level that is occupied for every token.

    Returns λ [B, T, H, L]. Differentiable in reverse mode in scores and scale, and batched by vmap, to any depth.

    Raises UnsupportedError where KERNELS["content_lam"] says why it cannot run.
    """
    batch, length, heads, levels = scores.shape
    CONTENT_LAM.require(levels, scores.dtype)
    level = jnp.arange(levels, dtype=jnp.int32)
    bits = jnp.sum(occupied[:, 0].astype(jnp.int32) << level, axis=-1, dtype=jnp.int32)
    scale, bits = (vary_as(x, scores) for x in (scale.astype(jnp.float32), bits))
    operands = jnp.moveaxis(scores, 1, 3), jnp.broadcast_to(scale, (batch, heads))
    return _differentiable(heads, interpreting())(*operands, jnp.broadcast_to(bits, (batch, length)))


def _limits(levels: int, dtype: DTypeLike) -> str | None:
    if jnp.dtype(dtype) != jnp.float32:
        return f"bucket scores have dtype {jnp.dtype(dtype)}: the kernel of λ content takes float32"
    if levels > MAX_LEVELS:
        return f"L, the number of levels, is {levels}: the kernel of λ content takes 1 to {MAX_LEVELS}"
    return None


CONTENT_LAM = register("content_lam", Kernel("λ content", _limits))


@functools.cache
def _differentiable(heads: int, interpret: bool):
    """The function (scores, scale, occupied) -> lam."""
    axes = HeadAxes(heads, (1, 1, None), (2,))
    return with_gradient(*(functools.partial(way, interpret=interpret) for way in (_forward, _backward)), axes)


def _call(kernel, name: str, operands, results, interpret: bool):
    batch, heads, levels, length = operands[0].shape
    return call(
        functools.partial(kernel, heads=heads, levels=levels, length=length),
        name,
        (pl.cdiv(length, TOKENS), pl.cdiv(heads, LAUNCH.heads), batch),
        [of_sequence(x) for x in operands],
        jax.tree.map(of_sequence, results),
        results,
        LAUNCH,
        interpret,
    )(*operands)


def _forward(scores, scale, occupied, *, interpret: bool):
    batch, heads, levels, length = scores.shape
    lam = jax.ShapeDtypeStruct((batch, length, heads, levels), jnp.float32)
    return _call(_forward_kernel, "content_lam", (scores, scale, occupied), lam, interpret)


def _backward(scores, scale, occupied, dlam, *, interpret: bool):
    batch, heads, _, length = scores.shape
    results = [
        jax.ShapeDtypeStruct(scores.shape, jnp.float32),
        jax.ShapeDtypeStruct((batch, pl.cdiv(length, TOKENS), heads), jnp.float32),
    ]
    operands = scores, scale, occupied, dlam
    d_scores, d_scale = _call(_backward_kernel, "content_lam_gradients", operands, results, interpret)
    return d_scores, jnp.sum(d_scale, axis=1), None


class _Tile:
    """What a program has, [heads, levels, tokens]: scores, their scale, which levels are occupied, and λ."""

    def __init__(self, scores_ref, scale_ref, occupied_ref, heads: int, levels: int, length: int):
        shape = (LAUNCH.heads, 1 << (levels - 1).bit_length(), TOKENS)
        head, level, token = (lax.broadcasted_iota(jnp.int32, shape, axis) for axis in range(3))
        head, token = pl.program_id(1) * LAUNCH.heads + head, pl.program_id(0) * TOKENS + token
        self.exists = (head < heads) & (level < levels) & (token < length)
        self.by_level, self.by_token = (head, level, token), (token, head, level)
        occupied = triton.load(occupied_ref.at[token], mask=self.exists, other=0)
        self.occupied = self.exists & ((occupied >> level) & 1 == 1)
        self.scores = triton.load(scores_ref.at[self.by_level], mask=self.occupied, other=0.0)
        self.scale = triton.load(scale_ref.at[head], mask=self.exists, other=0.0)
        logits = jnp.where(self.occupied, self.scale * self.scores, -jnp.inf)
        largest = jnp.max(logits, axis=1, keepdims=True)
        # Not of rows that do not exist, which would be -inf less -inf.
        weights = jnp.where(self.occupied, jnp.exp(logits - largest), 0.0)
        total = jnp.sum(weights, axis=1, keepdims=True)
        self.lam = weights / jnp.where(total == 0.0, 1.0, total)


def _forward_kernel(scores_ref, scale_ref, occupied_ref, lam_ref, **sizes):
    tile = _Tile(scores_ref, scale_ref, occupied_ref, **sizes)
    triton.store(lam_ref.at[tile.by_token], tile.lam, mask=tile.exists)


def _backward_kernel(scores_ref, scale_ref, occupied_ref, dlam_ref, d_scores_ref, d_scale_ref, **sizes):
    tile = _Tile(scores_ref, scale_ref, occupied_ref, **sizes)
    dlam = triton.load(dlam_ref.at[tile.by_token], mask=tile.occupied, other=0.0)
    d_logits = tile.lam * (dlam - jnp.sum(tile.lam * dlam, axis=1, keepdims=True))
    triton.store(d_scores_ref.at[tile.by_level], tile.scale * d_logits, mask=tile.exists)
    d_scale = jnp.sum(jnp.sum(d_logits * tile.scores, axis=2), axis=1)
    head = pl.program_id(1) * LAUNCH.heads + lax.iota(jnp.int32, LAUNCH.heads)
    block = jnp.full(head.shape, pl.program_id(0))
    triton.store(d_scale_ref.at[block, head], d_scale, mask=head < sizes["heads"])
