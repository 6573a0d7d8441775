"""What the public functions ask of their arguments, said by name before anything is computed."""

from __future__ import annotations

from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp
import numpy as np

from loglinear_jax.fenwick import FenwickState, capacity, num_levels
from loglinear_jax.ops.positions import END
from loglinear_jax.settings import is_of

Implementation = Literal["parallel", "recurrent", "xla", "pallas"]


def check_attention_settings(chunk_size: int | None, implementation: str | None) -> None:
    """Raises ValueError if log_linear_attention would refuse this chunk_size or implementation."""
    if chunk_size is not None and not (
        is_of(chunk_size, int) and chunk_size >= 1 and chunk_size & (chunk_size - 1) == 0
    ):
        raise ValueError(f"chunk_size must be a power of two ≥ 1 or None, got {chunk_size!r}")
    check_implementation(implementation, Implementation)


def check_implementation(implementation: str | None, implementations: object) -> None:
    """Raises ValueError unless it is None or one of `implementations`, a Literal."""
    if implementation is not None and not (
        isinstance(implementation, str) and implementation in get_args(implementations)
    ):
        names = ", ".join(map(repr, get_args(implementations)))
        raise ValueError(f"implementation must be one of {names} or None, got {implementation!r}")


def check_shapes(**named) -> None:
    """Raises ValueError unless every array, given as name=(array, "B T G K"), is floating and fits its axis names; an axis name
    stands for one size throughout, and H is a multiple of G."""
    sizes: dict[str, tuple[int, str]] = {}
    for name, (x, axes) in named.items():
        axes = axes.split()
        spelled = f"[{', '.join(axes)}]"
        check_floating(x, name, spelled)
        shape = jnp.shape(x)
        if len(shape) != len(axes):
            raise ValueError(f"{name} has shape {shape} of rank {len(shape)}: expected {spelled}")
        for axis, size in zip(axes, shape, strict=True):
            if size < 1:
                raise ValueError(
                    f"{name} has shape {shape}: expected {spelled} with at least one of each (no {axis} here)"
                )
            known, source = sizes.setdefault(axis, (size, name))
            if size != known:
                raise ValueError(f"{name} has shape {shape}: expected {spelled} with {axis} = {known}, as in {source}")
    (heads, source), (groups, _) = sizes["H"], sizes["G"]
    if heads % groups:
        raise ValueError(
            f"{source} has shape {jnp.shape(named[source][0])} with H = {heads} heads: expected a multiple of the G = {groups} "
            "groups of q and k"
        )


def check_floating(x, name: str, spelled: str) -> None:
    """Raises ValueError unless x is an array that JAX takes, of floats of 16 bits or more."""
    if not isinstance(x, (jax.Array, np.ndarray)) or isinstance(x, np.ma.MaskedArray):
        raise ValueError(f"{name} is of type {type(x).__name__}: expected an array {spelled}")
    if not jnp.issubdtype(x.dtype, jnp.floating) or x.dtype.itemsize < 2:
        raise ValueError(f"{name} has dtype {x.dtype}: expected a floating dtype, of 16 bits or more")


def check_levels(levels: int, end: int, what: str, lam=None) -> None:
    """Raises ValueError if `levels`, λ's or num_levels, are too few for `end` tokens, or positions are too small for them.
    what: the tokens, for messages."""
    if end > END:
        raise ValueError(f"{what} is {end}: expected at most {END}, where positions end")
    if not is_of(levels, int) or levels < num_levels(end):
        needed = f"num_levels({end}) = {num_levels(end)} for {what}"
        if lam is None:
            raise ValueError(f"num_levels is {levels!r}: expected an integer ≥ {needed}")
        raise ValueError(f"lam has shape {jnp.shape(lam)} with L = {levels} levels: expected L ≥ {needed}")


def check_state(state: FenwickState, name: str, batch: int, heads: int, key_dim: int, value_dim: int) -> int | None:
    """The state's position, None where it is traced. Raises ValueError for a state that is not of these sizes."""
    if not isinstance(state, FenwickState):
        raise ValueError(f"{name} is of type {type(state).__name__}: expected a FenwickState")
    check_floating(state.levels, f"{name}.levels", "[B, H, L, K, V]")
    shape = jnp.shape(state.levels)
    if len(shape) != 5 or (*shape[:2], *shape[3:]) != (batch, heads, key_dim, value_dim) or shape[2] < 1:
        raise ValueError(
            f"{name}.levels has shape {shape}: expected [{batch}, {heads}, L, {key_dim}, {value_dim}] (B, H, L, K, V)"
        )
    position = _check_position(state.position, f"{name}.position", batch, "the number of tokens seen, at least 0")
    if position is not None and position > capacity(shape[2]):
        raise ValueError(
            f"{name}.levels has {shape[2]} levels, room for {capacity(shape[2])} tokens: expected at least "
            f"{num_levels(position)} levels for {name}.position = {position}"
        )
    return position


def _check_position(position: Any, name: str, batch: int, expected: str) -> int | None:
    """The position, of several rows the last; None where it is traced. Raises ValueError unless it is a scalar or [B]."""
    if hasattr(position, "dtype"):
        if not jnp.issubdtype(position.dtype, jnp.integer):
            raise ValueError(f"{name} has dtype {position.dtype}: expected an integer")
    elif not is_of(position, int):
        raise ValueError(f"{name} is {position!r}: expected an integer")
    if jnp.shape(position) not in ((), (batch,)):
        raise ValueError(f"{name} has shape {jnp.shape(position)}: expected a scalar, or [B] with B = {batch}")
    if isinstance(position, jax.core.Tracer):
        return None
    if np.min(position) < 0:
        raise ValueError(f"{name} is {np.min(position)}: expected {expected}")
    return int(np.max(position))


def check_start(
    state: FenwickState | None,
    first_position: Any,
    segment_ids: Any,
    batch: int,
    length: int,
    heads: int,
    key_dim: int,
    value_dim: int,
) -> tuple[int, str]:
    """(where T tokens end that start there, what that is, for messages); T where the start is traced.

    Raises ValueError for an initial state that is not of these sizes, a first position that is none or comes with an initial
    state, and segment ids that do not fit.
    """
    check_segment_ids(segment_ids, batch, length)
    first = _check_position(first_position, "first_position", batch, "a position, at least 0")
    what = "first_position + T tokens" if first else "T tokens"
    if state is not None:
        if not isinstance(first_position, int) or first_position:
            raise ValueError(
                f"first_position is {first_position!r}: expected 0 with an initial_state, which has a position of its own"
            )
        first, what = (
            check_state(state, "initial_state", batch, heads, key_dim, value_dim),
            "initial_state.position + T tokens",
        )
    return (length, "T tokens") if first is None else (first + length, what)


def check_segment_ids(segment_ids: Any, batch: int, length: int) -> None:
    """Raises ValueError unless it is None or integers [B, T]."""
    if segment_ids is None:
        return
    if not isinstance(segment_ids, (jax.Array, np.ndarray)) or not jnp.issubdtype(segment_ids.dtype, jnp.integer):
        got = getattr(segment_ids, "dtype", type(segment_ids).__name__)
        raise ValueError(f"segment_ids is of {got}: expected an array of integers [B, T]")
    if segment_ids.shape != (batch, length):
        raise ValueError(f"segment_ids has shape {segment_ids.shape}: expected [B, T] = {(batch, length)}")


def check_step_state(state: FenwickState, lam, batch: int, heads: int, key_dim: int, value_dim: int) -> None:
    """Raises ValueError for a state that is not of these sizes, or if it or lam has too few levels for one more token."""
    position = check_state(state, "state", batch, heads, key_dim, value_dim)
    if position is None:
        return
    levels = state.levels.shape[2]
    check_levels(lam.shape[-1], position + 1, "state.position + 1 tokens", lam)
    if levels < num_levels(position + 1):
        raise ValueError(
            f"state.levels has {levels} levels, room for {capacity(levels)} tokens: expected at least "
            f"{num_levels(position + 1)} levels for token {position}; start from init_fenwick_state with a larger "
            "max_length"
        )
