"""Time on the device."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Sequence

import jax


def compile_over(function: Callable, argument_sets: Sequence[tuple]) -> Callable[[], object]:
    """A thunk that runs `function` once on each set of arguments, in one compiled program.

    Several sets keep the inputs out of the cache, and one program keeps the host's work out of the time.
    """
    compiled = jax.jit(lambda sets: [function(*arguments) for arguments in sets]).lower(argument_sets).compile()
    return lambda: compiled(argument_sets)


def median_ms(thunk: Callable[[], object], calls: int, repeats: int = 10, min_ms: float = 10.0) -> float:
    """Milliseconds of one of the `calls` that the thunk makes, the median over repeats.

    Each repeat queues as many thunks as take about `min_ms`, so that what the host does meanwhile is hidden.
    """

    def run(count: int) -> float:
        start = time.perf_counter()
        for _ in range(count):
            result = thunk()
        jax.block_until_ready(result)
        return 1e3 * (time.perf_counter() - start)

    run(1)
    count = max(math.ceil(min_ms / run(2) * 2), 1)
    run(count)
    return statistics.median(run(count) / (count * calls) for _ in range(repeats))
