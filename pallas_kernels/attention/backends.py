"""Whose kernels run an attention: those for Hopper GPUs, or those for any GPU since Ampere; and what each can run."""

from __future__ import annotations

import contextvars
import functools
import logging

import jax
import jax.numpy as jnp
from jax.lax import PrecisionLike
from jax.typing import DTypeLike

from pallas_kernels.common import support
from pallas_kernels.common.support import (
    UnsupportedError,
    interpreting,
    newer_than_tested,
    why_no_hopper,
    why_not_precise,
)
from pallas_kernels.common.tiles import MIN_TILE
from pallas_kernels.registry import Kernel, register

MIN_DIM, MAX_DIM = MIN_TILE, 256
MIN_CHUNK, MAX_CHUNKS = MIN_TILE, {2: 128, 4: 64}  # by bytes an element
HOPPER_DIMS, HOPPER_CHUNKS = (33, 128), (64, 128)  # below, a block of 64 would be half empty

log = logging.getLogger("pallas_kernels")


def _hopper_limits(
    key_dim: int, value_dim: int, dtype: DTypeLike, chunk_size: int | None = None, precision: PrecisionLike = None
) -> str | None:
    del precision  # of bfloat16 there is one
    low, high = HOPPER_DIMS
    for name, size in (("K, the key dim,", key_dim), ("V, the value dim,", value_dim)):
        if not low <= size <= high:
            return f"{name} is {size}: the kernels for Hopper take {low} to {high}"
    if dtype != jnp.bfloat16:
        return f"q, k and v have dtype {jnp.dtype(dtype)}: the kernels for Hopper take bfloat16"
    if chunk_size not in (None, *HOPPER_CHUNKS):
        return f"chunk_size is {chunk_size}: the kernels for Hopper take {' or '.join(map(str, HOPPER_CHUNKS))}"
    return None


def triton_limits(
    key_dim: int,
    value_dim: int | None,
    dtype: DTypeLike,
    chunk_size: int | None = None,
    precision: PrecisionLike = None,
) -> str | None:
    """Why the kernels for any GPU since Ampere run on none. value_dim: None for bucket scores, which have no values."""
    for name, size in (("K, the key dim,", key_dim), ("V, the value dim,", value_dim)):
        if size is not None and not MIN_DIM <= size <= MAX_DIM:
            return f"{name} is {size}: the Pallas kernels take {MIN_DIM} to {MAX_DIM}"
    if dtype not in (jnp.float32, jnp.bfloat16):
        return f"q, k and v have dtype {jnp.dtype(dtype)}: the Pallas kernels take float32 and bfloat16"
    max_chunk = MAX_CHUNKS[jnp.dtype(dtype).itemsize]
    if chunk_size is not None and not (MIN_CHUNK <= chunk_size <= max_chunk and chunk_size & (chunk_size - 1) == 0):
        return (
            f"chunk_size is {chunk_size}: the Pallas kernels take powers of two from {MIN_CHUNK} to {max_chunk} for "
            f"{jnp.dtype(dtype)}"
        )
    return why_not_precise(dtype, precision)


_trying: contextvars.ContextVar[bool] = contextvars.ContextVar("trying", default=False)


def _why_no_hopper() -> str | None:
    trying = _trying.get() or not newer_than_tested()
    return why_no_hopper() or (None if trying else _why_mosaic_changed())


@functools.cache
def _why_mosaic_changed() -> str | None:
    """What tracing the kernels for Hopper raises with a JAX that nobody has tried them with; None if nothing."""
    from pallas_kernels.attention.api import fenwick_attention
    from pallas_kernels.attention.hopper.tiles import choose_hopper_tiles

    def attend(*operands):
        out, pull = jax.vjp(functools.partial(fenwick_attention, tiles=choose_hopper_tiles(700, 64)), *operands)
        return pull(out)

    keys, of_head = jnp.zeros((1, 700, 1, 64), jnp.bfloat16), jnp.zeros((1, 700, 1))
    _trying.set(True)
    try:
        jax.eval_shape(attend, keys, keys, keys, of_head, jnp.zeros((1, 700, 1, 11)))
    except Exception as error:  # whatever a changed interface raises
        return f"JAX {jax.__version__} has another Mosaic GPU than the kernels for Hopper were written for ({error!r:.200})"
    finally:
        _trying.set(False)
    return None


@functools.cache
def _tell_slower(reason: str | None) -> None:
    log.warning("the attention runs by the kernels for any GPU, at half the speed of those for Hopper GPUs: %s", reason)


BACKENDS = {
    "hopper": Kernel("log_linear_attention on Hopper", _hopper_limits, _why_no_hopper),
    "triton": Kernel("log_linear_attention by Triton", triton_limits),
}


def _neither(*problem: object) -> str | None:
    if BACKENDS["hopper"].why_not(*problem) is None:
        return None
    return BACKENDS["triton"].why_not(*problem)


ATTENTION = register("log_linear_attention", Kernel("log_linear_attention", _neither, device=lambda: None))
# One state is a case of it.
register("gated_linear_attention", Kernel("gated_linear_attention", _neither, device=lambda: None))


def choose_backend(asked: str | None, *problem: object) -> str:
    """The fastest of BACKENDS that can run the problem, or the one that is asked for; in the interpreter Triton's comes first.
    A Hopper GPU that gets Triton's is told so by the log, once for each reason.

    Raises UnsupportedError if none can run it.
    """
    names = [asked] if asked else sorted(BACKENDS, reverse=interpreting())
    for name in names:
        if (reason := BACKENDS[name].why_not(*problem)) is None:
            log.debug("%s: kernels for %s", problem, name)
            if asked is None and name == "triton" and not interpreting() and support.compute_capability() == (9, 0):
                _tell_slower(BACKENDS["hopper"].why_not(*problem))
            return name
        if name == (asked or "triton"):
            refusal = reason
    raise UnsupportedError(refusal)
