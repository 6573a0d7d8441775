"""Time on the device, and what the device itself can do."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp


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


def timed(compute: Callable[[Any], Any], state: Any, times: int = 1) -> tuple[Any, list[float]]:
    """(compute(compute(.. state)), the seconds of each time)."""
    seconds = []
    for _ in range(times):
        jax.block_until_ready(state)
        start = time.perf_counter()
        state = jax.block_until_ready(compute(state))
        seconds.append(time.perf_counter() - start)
    return state, seconds


def steady(measure: Callable[[], float], tolerance: float = 0.03, most: int = 10) -> float:
    """A rate measured again until two successive measurements agree: a GPU raises its clocks only when it has work.

    tolerance: how far two that agree may differ, as a share of the larger. most: measurements after which the last counts.
    """
    last = measure()
    for _ in range(most - 1):
        before, last = last, measure()
        if abs(last - before) <= tolerance * max(last, before):
            break
    return last


def copy_bandwidth() -> float:
    """Bytes per second, read and written, of a large copy on the device."""
    size = 1 << (30 if jax.default_backend() == "gpu" else 26)
    arrays = [(jnp.full((size // 4,), 0.5),) for _ in range(2)]
    ms = median_ms(compile_over(lambda x: -x, arrays), len(arrays), repeats=20, min_ms=100.0)
    return 2 * size / (ms * 1e-3)


def matmul_rate(size: int = 8192) -> float:
    """FLOP/s of a large bfloat16 (on a CPU: float32, smaller) matrix product on one device."""
    gpu = jax.default_backend() == "gpu"
    size = size if gpu else 1024
    dtype = jnp.bfloat16 if gpu else jnp.float32
    sets = [(jnp.ones((size, size), dtype), jnp.ones((size, size), dtype)) for _ in range(2)]
    ms = median_ms(compile_over(jnp.dot, sets), len(sets), repeats=20, min_ms=100.0)
    return 2 * size**3 / (ms * 1e-3)
