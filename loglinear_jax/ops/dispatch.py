"""How the operations with states check what they are given, choose a form, compile it and run it, also over devices."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple, TypedDict

import jax
from jaxtyping import Array

from loglinear_jax import fenwick
from loglinear_jax.fenwick import FenwickState, capacity
from loglinear_jax.ops.checks import (
    Implementation,
    check_attention_settings,
    check_levels,
    check_shapes,
    check_start,
    check_step_state,
)
from loglinear_jax.ops.continuation import Start, nan_beyond, over_rows, with_more_levels
from loglinear_jax.ops.decays import to_common_dtypes
from loglinear_jax.ops.levels import pad_to
from loglinear_jax.ops.positions import in_32_bits
from loglinear_jax.ops.sequence_parallel import check_pieces, starts_in_piece
from loglinear_jax.ops.sharding import over_explicit_axes
from pallas_kernels import interpreting

CHUNKED = ("xla", "pallas")  # forms that take a chunk_size
AXES = {"q": "B T G K", "k": "B T G K", "v": "B T H V", "log_decay": "B T H", "beta": "B T H", "lam": "B T H L"}


class Options(TypedDict, total=False):
    """Keyword arguments of every operation with states, for overloads."""

    segment_ids: Array | None
    axis_name: str | None
    chunk_size: int | None
    implementation: Implementation | None
    precision: jax.lax.PrecisionLike


class LevelOptions(Options, total=False):
    """Those of an operation with a state for each level."""

    first_position: int | Array
    initial_state: FenwickState | None


class OneStateOptions(Options, total=False):
    """Those of an operation with one state."""

    initial_state: Array | None


class Operation(NamedTuple):
    """The forms of an operation. Each takes what its public function has checked, and returns outputs and the last state.

    piece: the outputs of one piece of a sequence, from its own tokens and from earlier pieces (see `ops.sequence_parallel`); it
    takes `run`, a function of inputs and a Start (for scores, and a number of levels) to outputs and None. kernels_are_best:
    whether `pallas` is the form to choose. has_values: False for bucket scores. kernels_bound_decays: whether the kernels bound
    log decays themselves, where they do all.
    """

    parallel: Callable
    recurrent: Callable
    xla: Callable
    pallas: Callable
    piece: Callable
    kernels_are_best: Callable[..., bool]
    has_values: bool = True
    kernels_bound_decays: bool = False


def operate(
    operation: Operation, arrays: dict[str, Array], segment_ids, first_position, initial_state, return_state,
    axis_name, chunk_size, implementation, precision, num_levels=None,
) -> Any:  # fmt: skip
    """Checks the arguments of an operation, chooses its form, and runs it. num_levels: of bucket scores."""
    one_state = "lam" not in arrays and operation.has_values
    named = {name: (x, AXES[name]) for name, x in arrays.items()}
    if one_state and initial_state is not None:
        named["initial_state"] = (initial_state, "B H K V")
    check_shapes(**named)
    check_attention_settings(chunk_size, implementation)
    state = None if one_state else initial_state
    batch, length, heads = arrays["log_decay"].shape
    pieces = check_pieces(axis_name, length, first_position, initial_state, return_state)
    sizes = heads, arrays["q"].shape[-1], arrays["v"].shape[-1] if "v" in arrays else 1
    end, what = check_start(state, first_position, segment_ids, batch, length, *sizes)
    end, what = pieces * end, f"{what} on each of {pieces} devices" if pieces > 1 else what
    if "lam" in arrays:
        num_levels = arrays["lam"].shape[-1]
        check_levels(num_levels, end, what, arrays["lam"])
    elif not operation.has_values:
        if num_levels is None:
            num_levels = max(fenwick.num_levels(end), 1 if state is None else state.levels.shape[2])
        check_levels(num_levels, end, what)
    if implementation is None:
        widths = [x for name, x in arrays.items() if name in "qkv"]
        implementation = "pallas" if operation.kernels_are_best(*widths, chunk_size, precision) else "xla"
    segment_ids = in_32_bits(segment_ids)
    at_zero = isinstance(first_position, int) and first_position == 0
    out, state = _compiled()(
        *arrays.values(), (initial_state, None if at_zero else first_position, segment_ids), operation=operation,
        levels=num_levels, axis_name=axis_name if pieces > 1 else None, return_state=bool(return_state),
        chunk_size=chunk_size, implementation=implementation, precision=precision, interpreted=interpreting(),
    )  # fmt: skip
    return (out, state) if return_state else out


@functools.cache
def _compiled() -> Callable:
    """`_run`, compiled as a whole, not each of its steps. A call must not take what was compiled where kernels were
    interpreted, or were not."""
    sharded = over_explicit_axes(tokens=2, axis=2)(_run)

    def attend(*arrays: Any, interpreted: bool, **options: Any) -> Any:
        del interpreted
        return sharded(*arrays, **options)

    names = "operation", "levels", "axis_name", "return_state", "chunk_size", "implementation", "precision"
    return jax.jit(attend, static_argnames=(*names, "interpreted"))


def _run(
    *arrays: Any, operation: Operation, levels: int | None, axis_name: str | None, return_state: bool,
    chunk_size: int | None, implementation: str, precision: jax.lax.PrecisionLike,
) -> Any:  # fmt: skip
    """(outputs, the last state or None). arrays: the operation's, and the arguments of `Start.of`. levels: of λ or scores."""
    *tokens, where = arrays
    at = 3 if operation.has_values else 2
    by_kernels_alone = operation.kernels_bound_decays and implementation == "pallas" and not return_state
    bound = not (by_kernels_alone and where[0] is None and axis_name is None)
    log_decay, *first = to_common_dtypes(tokens[at], *tokens[:at], bound=bound)
    inputs = [*first, log_decay, *(x.astype(log_decay.dtype) for x in tokens[at + 1 :])]

    def run(*inputs: Any, start: Start, **options: Any) -> Any:
        """Only the recurrent form takes rows at positions of their own."""
        if implementation in CHUNKED:
            options["chunk_size"] = chunk_size
        form = getattr(operation, implementation)
        form = functools.partial(form, return_state=return_state, precision=precision, **options)
        return form(*inputs, start) if implementation == "recurrent" else over_rows(form, inputs, start)

    out_dtype = tokens[2].dtype if operation.has_values else log_decay.dtype
    if axis_name is not None:
        options = dict(levels=levels, implementation=implementation, chunk_size=chunk_size, precision=precision)
        starts = starts_in_piece(where[-1], axis_name)
        return operation.piece(run, inputs, starts, axis_name, **options).astype(out_dtype), None
    start = Start.of(*where)
    if levels is None:
        if start.state is not None:
            start = start._replace(state=start.state.astype(log_decay.dtype))
        out, state = run(*inputs, start=start)
        return out.astype(out_dtype), state
    start, held = with_more_levels(start, levels, log_decay.dtype)
    if operation.has_values:
        out, state = run(*inputs[:-1], pad_to(inputs[-1], held, axis=3), start=start)
    else:
        out, state = run(*inputs, start=start, levels=held)
        out = out[..., :levels]
    return nan_beyond(capacity(levels), start, out.astype(out_dtype)), state


def checked_token(state: FenwickState, **arrays: Array) -> tuple[Array, ...]:
    check_shapes(**{name: (x, AXES[name].replace(" T", "")) for name, x in arrays.items()})
    (batch, heads, value_dim), lam = arrays["v"].shape, arrays["lam"]
    check_step_state(state, lam, batch, heads, arrays["q"].shape[-1], value_dim)
    return tuple(arrays.values())
