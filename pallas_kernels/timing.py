"""Time on the device."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence

import jax


def compile_over(function: Callable, argument_sets: Sequence[tuple]) -> Callable[[], object]:
    """A thunk that runs `function` once on each set of arguments in one compiled program.

    Several sets keep the inputs out of the cache, and one program keeps the host's dispatch out of the time.
    """
    compiled = jax.jit(lambda sets: [function(*arguments) for arguments in sets]).lower(argument_sets).compile()
    return lambda: compiled(argument_sets)


def median_ms(thunk: Callable[[], object], calls: int, repeats: int = 10, warm_up: int = 2) -> float:
    """Milliseconds of one of the `calls` that the thunk makes: the median over its repeats."""
    for _ in range(warm_up):
        jax.block_until_ready(thunk())
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        jax.block_until_ready(thunk())
        times.append(1e3 * (time.perf_counter() - start) / calls)
    return statistics.median(times)
