"""What tokens read of the delta rule's states of all levels before their chunks: by kernels for Hopper GPUs that carry these
states from chunk to chunk, or by the tree of `delta.tree`."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax.lax import PrecisionLike
from jaxtyping import Array, Float

from pallas_kernels.attention.backends import trace_both_passes
from pallas_kernels.common.launch import HeadAxes, fold_mapped_axes, varying
from pallas_kernels.common.support import UnsupportedError, interpreting
from pallas_kernels.delta.chunks import why_no_hopper
from pallas_kernels.delta.tree import MapSizes, join_tree, map_sizes, padded, read_tree

# Of the highest levels, which are carried over all chunks one after the other: with half as many the tree would take as long.
FEWEST_PROGRAMS = 64


def read_levels(
    inside: Float[Array, "B T H V"],
    reads: Float[Array, "B H N C K"],
    lam: Float[Array, "B T H heights"],
    log_decay: Float[Array, "B H N"],
    lost: Float[Array, "B H N K K"],
    states: Float[Array, "B H N K V"],
    *,
    precision: PrecisionLike = None,
    hopper: bool | None = None,
) -> Float[Array, "B T H V"]:
    """o of every token: inside + Σ over the states before its chunk of λ · reads · state. A chunk makes γ S - D S of a state S.

    Args:
      inside, reads, lam, precision: as in `read_tree`; N = T / C > 1, heights = bit_length(N - 1).
      log_decay, lost, states: of each chunk by itself, as in `join_tree`; finite at N - 1, too, though no chunk reads these.
      hopper: whether the kernels for Hopper GPUs run, which take chunks of 64 tokens in bfloat16, K and V from 33 to 128. None:
        where they can and are faster, but not in the interpreter.

    Returns o [B, T, H, V] in the dtype of reads. Differentiable in reverse mode, and batched by vmap, to any depth.

    Raises UnsupportedError where KERNELS["delta"] says why it cannot run.
    """
    batch, heads, _, chunk, key_dim = reads.shape
    value_dim = states.shape[4]
    reason = why_no_hopper(key_dim, value_dim, reads.dtype, chunk, _try_hopper)
    if hopper is None:
        programs = batch * heads * -(-value_dim // 64)
        hopper = reason is None and not interpreting() and programs >= FEWEST_PROGRAMS
    if not hopper:
        nodes = join_tree(log_decay, lost, states, precision=precision)
        return read_tree(inside, reads, lam, *nodes, precision=precision)
    if reason is not None:
        raise UnsupportedError(reason)
    sizes = map_sizes(lost, states, chunk, precision)
    out = _differentiable(sizes)(*padded(inside, reads, lam, jnp.exp(log_decay), lost, states, sizes))
    return out[..., :value_dim]


def _try_hopper() -> None:
    maps, inside = jnp.zeros((1, 1, 2, 64, 64), jnp.bfloat16), jnp.zeros((1, 128, 1, 64))
    read = functools.partial(read_levels, hopper=True)
    trace_both_passes(read, inside, maps, inside[..., :1], jnp.zeros((1, 1, 2)), maps, maps)


@functools.cache
def _differentiable(sizes: MapSizes):
    """The function (inside, reads, lam [B, H, heights, T], decay, lost, states) -> o."""
    from pallas_kernels.delta.hopper import levels as kernels  # which only JAX from 0.11.2 on can import

    partitioned = not sizes.interpret  # as in the attention

    def folded(function, arguments, results, **options):
        own = varying(functools.partial(function, sizes=sizes, **options))
        return fold_mapped_axes(own, partitioned, HeadAxes(sizes.heads, arguments, results))

    forward, forward_and_keep = (folded(kernels.forward, (2,), (2,), keep=keep) for keep in (False, True))
    backward = folded(kernels.backward, (2,), ())

    def keeping(*operands):
        out, *before = forward_and_keep(*operands)
        return out, (*operands[1:5], *before)

    apply = jax.custom_vjp(lambda *operands: forward(*operands)[0])
    apply.defvjp(keeping, lambda kept, do: (do.astype(jnp.float32), *backward(do, *kept)))
    return apply
