"""Whose kernels run an attention: those for Hopper GPUs, or those for any GPU since Ampere; and what each can run."""

from __future__ import annotations

import contextvars
import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.lax import PrecisionLike
from jax.typing import DTypeLike

from pallas_kernels.attention.tiles import choose_tiles
from pallas_kernels.common import support
from pallas_kernels.common.support import (
    UnsupportedError,
    interpreting,
    newer_than_tested,
    why_no_hopper,
    why_not_precise,
)
from pallas_kernels.common.tiles import MIN_TILE, tile_for
from pallas_kernels.registry import Kernel, log, register, tell_once

MIN_DIM, MAX_DIM = MIN_TILE, 256
MIN_CHUNK, MAX_CHUNKS = MIN_TILE, {2: 128, 4: 64}  # by bytes an element
MANY_TOKENS = 1 << 16  # which let tiles be as large as they get
SLOWER = 1.5  # times, of which the log tells
HOPPER_DIMS, HOPPER_CHUNKS = (33, 128), (64, 128)  # below, a block of 64 would be half empty


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
    return why_no_hopper() or why_mosaic_changed(_try_hopper)


def why_mosaic_changed(try_kernels: Callable[[], None]) -> str | None:
    """What try_kernels, which traces kernels for Hopper, raises with a JAX that nobody has tried them with; None if nothing, or
    with another JAX."""
    return _raised_by(try_kernels) if newer_than_tested() and not _trying.get() else None


@functools.cache
def _raised_by(try_kernels: Callable[[], None]) -> str | None:
    _trying.set(True)
    try:
        try_kernels()
    except Exception as error:  # whatever a changed interface raises
        return f"JAX {jax.__version__} has another Mosaic GPU than the kernels for Hopper were written for ({error!r:.200})"
    finally:
        _trying.set(False)
    return None


def _try_hopper() -> None:
    from pallas_kernels.attention.api import fenwick_attention
    from pallas_kernels.attention.hopper.tiles import choose_hopper_tiles

    keys, of_head = jnp.zeros((1, 700, 1, 64), jnp.bfloat16), jnp.zeros((1, 700, 1))
    attend = functools.partial(fenwick_attention, tiles=choose_hopper_tiles(700, 64))
    trace_both_passes(attend, keys, keys, keys, of_head, jnp.zeros((1, 700, 1, 11)))


def trace_both_passes(function: Callable, *operands) -> None:
    """Traces function and its gradient."""

    def both(*operands):
        out, pull = jax.vjp(function, *operands)
        return pull(out)

    jax.eval_shape(both, *operands)


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


def _tell_if_slow(
    backend: str,
    key_dim: int,
    value_dim: int,
    dtype: DTypeLike,
    chunk_size: int | None = None,
    precision: PrecisionLike = None,
) -> None:
    """Tells where other kernels, or other sizes for the same ones, would be more than 1.5 times as fast."""
    if backend == "triton":
        is_small = min(key_dim, value_dim) < HOPPER_DIMS[0]  # kernels for Hopper would gain nothing
        if support.compute_capability() == (9, 0) and not is_small:
            reason = BACKENDS["hopper"].why_not(key_dim, value_dim, dtype, chunk_size, precision)
            tell_once(f"attention takes the kernels for any GPU, twice as slow as those for Hopper or more: {reason}")
        block = choose_tiles(MANY_TOKENS, tile_for(key_dim), value_dim, dtype, precision).value_block
        filled = tile_for(key_dim), -(-value_dim // block) * block
    else:
        filled = tile_for(key_dim), tile_for(value_dim)
    if filled[0] * filled[1] > SLOWER * key_dim * value_dim:
        tell_once(
            f"attention with K, V = {key_dim}, {value_dim} takes as long as with K, V = {filled[0]}, {filled[1]}, up to which "
            "the kernels fill them: powers of two need no filling"
        )


def choose_backend(asked: str | None, *problem: object) -> str:
    """The fastest of BACKENDS that can run the problem, or the one that is asked for; in the interpreter Triton's comes first.
    The log says where that is slow.

    Raises UnsupportedError if none can run it.
    """
    names = [asked] if asked else sorted(BACKENDS, reverse=interpreting())
    for name in names:
        if (reason := BACKENDS[name].why_not(*problem)) is None:
            log.debug("%s: kernels for %s", problem, name)
            if asked is None and not interpreting():
                _tell_if_slow(name, *problem)
            return name
        if name == (asked or "triton"):
            refusal = reason
    raise UnsupportedError(refusal)
