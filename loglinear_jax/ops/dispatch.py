"""How an operation's form is chosen, compiled and called."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax

from loglinear_jax.ops.continuation import Start, over_rows
from loglinear_jax.ops.sharding import over_explicit_axes
from pallas_kernels import interpreting

CHUNKED = ("xla", "pallas")  # forms that take a chunk_size


def choose_form(implementation: str | None, kernels_are_best: Callable[..., bool], *problem: Any) -> str:
    """`implementation`; or if it is None "pallas" where `kernels_are_best` for the problem, else "xla"."""
    if implementation is not None:
        return implementation
    return "pallas" if kernels_are_best(*problem) else "xla"


def run_form(
    forms: Mapping[str, Callable],
    implementation: str,
    *inputs: Any,
    start: Start,
    chunk_size: int | None,
    **options: Any,
) -> Any:
    """What the form of this name gives for the inputs; only `CHUNKED` forms take the chunk_size, only the recurrent one takes
    rows at positions of their own."""
    if implementation in CHUNKED:
        options["chunk_size"] = chunk_size
    form = functools.partial(forms[implementation], **options)
    return form(*inputs, start) if implementation == "recurrent" else over_rows(form, inputs, start)


def compile_operation(*static: str) -> Callable[[Callable], Callable]:
    """Decorates a function for `jax.jit`: one compilation of the whole operation, not one of each of its steps.

    static: names of its arguments that are no arrays. Whether kernels are interpreted is no argument, but a call must not take
    what was compiled for the other answer.
    """

    def decorate(function: Callable) -> Callable:
        sharded = over_explicit_axes(tokens=2, axis=2)(function)

        def run(*arrays: Any, interpreted: bool, **options: Any) -> Any:
            del interpreted
            return sharded(*arrays, **options)

        run.__name__ = function.__name__
        compiled = jax.jit(run, static_argnames=(*static, "interpreted"))

        @functools.wraps(function)
        def call(*arrays: Any, **options: Any) -> Any:
            return compiled(*arrays, interpreted=interpreting(), **options)

        return call

    return decorate
