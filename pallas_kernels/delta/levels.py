"""The delta rule's states of all levels, carried from chunk to chunk; on Hopper GPUs, instead of the tree of `delta.tree`."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from pallas_kernels.attention.backends import BACKENDS, trace_both_passes, why_mosaic_changed
from pallas_kernels.common.launch import HeadAxes, fold_mapped_axes, pad, varying
from pallas_kernels.common.support import UnsupportedError, interpreting
from pallas_kernels.delta.tree import MapSizes, map_sizes

CHUNK = 64


def scan_levels(
    inside: Float[Array, "B T H V"],
    reads: Float[Array, "B H N C K"],
    lam: Float[Array, "B T H heights"],
    decay: Float[Array, "B H N"],
    lost: Float[Array, "B H N K K"],
    states: Float[Array, "B H N K V"],
) -> Float[Array, "B T H V"]:
    """o of every token: inside + Σ over the states before its chunk of λ · reads · state. A chunk makes γ S - D S of a state S.

    Args:
      inside: [B, T, H, V] float32.
      reads: [B, H, N, C, K] bfloat16, C = 64, N = T / C > 1; K and V from 33 to 128.
      lam: [B, T, H, heights] float32, heights = bit_length(N - 1).
      decay, lost, states: of each chunk by itself, γ [B, H, N] float32, D [B, H, N, K, K] and states [B, H, N, K, V] bfloat16.

    Returns o [B, T, H, V] in the dtype of reads. Differentiable in reverse mode, and batched by vmap, to any depth.

    Raises UnsupportedError on other GPUs than Hopper, and for other sizes.
    """
    key_dim, value_dim = states.shape[3:]
    reason = _why_not(key_dim, value_dim, reads.dtype, reads.shape[3])
    if reason is not None:
        raise UnsupportedError(reason)
    sizes = map_sizes(lost, states, CHUNK, None)
    keys, values = sizes.key_dim, sizes.value_dim
    out = _differentiable(sizes)(
        pad(inside, (3, values)),
        pad(reads, (4, keys)),
        jnp.moveaxis(lam, 1, 3),
        decay,
        pad(lost, (3, keys), (4, keys)),
        pad(states, (3, keys), (4, values)),
    )
    return out[..., :value_dim]


def scans_levels(reads: Float[Array, "B H N C K"], states: Float[Array, "B H N K V"]) -> bool:
    """Whether `scan_levels` can run, and not only in the interpreter."""
    return not interpreting() and _why_not(*states.shape[3:], reads.dtype, reads.shape[3]) is None


def _why_not(key_dim: int, value_dim: int, dtype: DTypeLike, chunk_size: int) -> str | None:
    if chunk_size != CHUNK:
        return f"chunk_size is {chunk_size}: the kernels that carry all levels take {CHUNK}"
    return BACKENDS["hopper"].why_not(key_dim, value_dim, dtype, chunk_size) or why_mosaic_changed(_try_hopper)


def _try_hopper() -> None:
    maps, inside = jnp.zeros((1, 1, 2, 64, 64), jnp.bfloat16), jnp.zeros((1, 128, 1, 64))
    trace_both_passes(scan_levels, inside, maps, inside[..., :1], jnp.zeros((1, 1, 2)), maps, maps)


@functools.cache
def _differentiable(sizes: MapSizes):
    """The function (inside, reads, lam [B, H, heights, T], decay, lost, states) -> o."""
    from pallas_kernels.delta.hopper import levels as kernels  # which only JAX from 0.11.2 on can import

    def folded(function, arguments, results, **options):
        own = varying(functools.partial(function, sizes=sizes, **options))
        return fold_mapped_axes(
            own, not sizes.interpret, HeadAxes(sizes.heads, arguments, results)
        )  # as in the attention

    forward, forward_and_keep = (folded(kernels.forward, (2,), (2,), keep=keep) for keep in (False, True))
    backward = folded(kernels.backward, (2,), ())

    def keeping(*operands):
        out, *before = forward_and_keep(*operands)
        return out, (*operands[1:5], *before)

    apply = jax.custom_vjp(lambda *operands: forward(*operands)[0])
    apply.defvjp(keeping, lambda kept, do: (do.astype(jnp.float32), *backward(do, *kept)))
    return apply
