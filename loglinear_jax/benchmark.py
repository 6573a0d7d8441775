"""Time of log_linear_attention against T, on the machine at hand.

    python -m loglinear_jax.benchmark --implementations=xla,parallel --lengths=1024,2048,4096,8192,16384,32768

Prints a table of milliseconds (median; forward, and forward + backward) and how time grows over the last factor of 8 in T:
O(T log T) grows by about 10, O(T²) by 64.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from absl import app, flags
from tabulate import tabulate

from loglinear_jax.attention import log_linear_attention
from loglinear_jax.fenwick import num_levels

IMPLEMENTATIONS = flags.DEFINE_list("implementations", ["xla", "parallel"], "forms to time")
LENGTHS = flags.DEFINE_list(
    "lengths", ["256", "512", "1024", "2048", "4096", "8192", "16384", "32768"], "sequence lengths"
)
BATCH = flags.DEFINE_integer("batch", 4, "sequences")
HEADS = flags.DEFINE_integer("heads", 2, "heads")
GROUPS = flags.DEFINE_integer("groups", 2, "key groups")
KEY_DIM = flags.DEFINE_integer("key_dim", 32, "key dim")
VALUE_DIM = flags.DEFINE_integer("value_dim", 32, "value dim")
DTYPE = flags.DEFINE_enum("dtype", "float32", ["float32", "bfloat16"], "dtype of q, k, v")
REPEATS = flags.DEFINE_integer("repeats", 5, "timed calls, of which the median counts")
MAX_SCORES = flags.DEFINE_integer("max_scores", 1 << 26, "skip the parallel form above this many scores (B·H·T²)")

GROWTH = 8


def draw_inputs(seed: int, length: int) -> tuple[jax.Array, ...]:
    """Random q, k, v, log_decay, lam of the flags' shapes."""
    rng = np.random.default_rng(seed)
    batch, heads, groups = BATCH.value, HEADS.value, GROUPS.value

    def normal(*shape):
        return rng.normal(size=shape)

    q, k = (jnp.asarray(normal(batch, length, groups, KEY_DIM.value), DTYPE.value) for _ in range(2))
    v = jnp.asarray(normal(batch, length, heads, VALUE_DIM.value), DTYPE.value)
    log_decay = jnp.asarray(-0.1 * rng.random((batch, length, heads)), jnp.float32)
    lam = jnp.asarray(rng.random((batch, length, heads, num_levels(length))), jnp.float32)
    return q, k, v, log_decay, lam


def median_ms(function: Callable, inputs: tuple[jax.Array, ...]) -> float:
    """Milliseconds of one call, after one that compiles."""
    compiled = jax.jit(function)
    jax.block_until_ready(compiled(*inputs))
    times = []
    for _ in range(REPEATS.value):
        start = time.perf_counter()
        jax.block_until_ready(compiled(*inputs))
        times.append(1e3 * (time.perf_counter() - start))
    return statistics.median(times)


def time_implementation(implementation: str, length: int) -> tuple[float, float] | None:
    """(forward, forward + backward) in ms; None where the parallel form's scores would not fit."""
    if implementation == "parallel" and BATCH.value * HEADS.value * length**2 > MAX_SCORES.value:
        return None
    inputs = draw_inputs(0, length)

    def forward(*inputs):
        return log_linear_attention(*inputs, implementation=implementation)

    def loss(*inputs):
        return jnp.sum(forward(*inputs).astype(jnp.float32) ** 2)

    return median_ms(forward, inputs), median_ms(jax.value_and_grad(loss, argnums=range(5)), inputs)


def main(argv: list[str]) -> None:
    if len(argv) > 1:
        raise app.UsageError(f"unexpected argument {argv[1]!r}")
    lengths = sorted(map(int, LENGTHS.value))
    device = jax.devices()[0].device_kind
    print(
        f"{device}, JAX {jax.__version__}, B={BATCH.value} H={HEADS.value} G={GROUPS.value} "
        f"K={KEY_DIM.value} V={VALUE_DIM.value} {DTYPE.value}; ms, forward / forward + backward"
    )
    rows = []
    for implementation in IMPLEMENTATIONS.value:
        times = {length: time_implementation(implementation, length) for length in lengths}
        row = {"": implementation}
        row |= {f"T={n}": "–" if t is None else f"{t[0]:.1f} / {t[1]:.1f}" for n, t in times.items()}
        longest = max(length for length, t in times.items() if t)
        if short := times.get(longest // GROWTH):
            factors = " / ".join(f"{a / b:.1f}×" for a, b in zip(times[longest], short, strict=True))
            row[f"growth over {GROWTH}× T"] = f"{longest // GROWTH} → {longest}: {factors}"
        rows.append(row)
    print(tabulate(rows, headers="keys", tablefmt="github", missingval="–"))


if __name__ == "__main__":
    app.run(main)
