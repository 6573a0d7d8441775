"""Finds tiles for a shape on the GPU at hand: times every kernel under every launch, for every chunk.

    python -m loglinear_jax.benchmarks.tiles --length=8192 --heads=48 --groups=1 --key_dim=128 --value_dim=64

Prints the fastest launches of each kernel and the sum over the kernels for each chunk: what pallas_kernels/tiles.py holds.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import itertools

import jax
import jax.numpy as jnp
from absl import app, flags
from tabulate import tabulate

from loglinear_jax.benchmarks import timing
from pallas_kernels import attention, kernels
from pallas_kernels.support import why_cannot_run
from pallas_kernels.tiles import Launch, Tiles

BATCH = flags.DEFINE_integer("batch", 2, "sequences")
LENGTH = flags.DEFINE_integer("length", 8192, "tokens")
HEADS = flags.DEFINE_integer("heads", 48, "heads")
GROUPS = flags.DEFINE_integer("groups", 1, "key groups")
KEY_DIM = flags.DEFINE_integer("key_dim", 128, "key dim")
VALUE_DIM = flags.DEFINE_integer("value_dim", 64, "value dim")
DTYPE = flags.DEFINE_enum("dtype", "bfloat16", ["float32", "bfloat16"], "dtype of q, k, v")
PRECISION = flags.DEFINE_enum("precision", "highest", ["highest", "high"], "of float32 products")
CHUNKS = flags.DEFINE_list("chunks", ["64", "128"], "chunks to try")
VALUE_BLOCK = flags.DEFINE_integer("value_block", 64, "columns of V a program")
SPANS = flags.DEFINE_list("spans", ["2", "4", "8"], "chunks whose states one program builds")
HEADS_A_PROGRAM = flags.DEFINE_list(
    "heads_a_program", ["1", "4", "8"], "heads a program, for kernels that share scores"
)
ELEMENTS = flags.DEFINE_list(
    "elements", ["512", "1024", "2048"], "elements of K x V a program, in kernels that join or part nodes"
)
RADICES = flags.DEFINE_list("radices", ["8", "16"], "nodes joined or parted at once")
WARPS = flags.DEFINE_list("warps", ["4", "8"], "warps a program")
STAGES = flags.DEFINE_list("stages", ["1", "2", "3"], "pipeline stages")
INPUT_SETS = flags.DEFINE_integer("input_sets", 3, "input sets that take turns")
ONLY = flags.DEFINE_list("only", [], "kernels to tune; all if empty")
BEST = flags.DEFINE_integer("best", 4, "launches to print for each kernel")


def draw_inputs(seed: int, sizes: kernels.Sizes) -> dict[str, jax.Array]:
    """Random arrays of every kind that a kernel reads."""
    s = sizes
    shapes = dict(
        q=(s.batch, s.length, s.groups, s.key_dim),
        k=(s.batch, s.length, s.groups, s.key_dim),
        v=(s.batch, s.length, s.all_heads, s.value_dim),
        do=(s.batch, s.length, s.all_heads, s.value_dim),
        states=(s.batch, s.all_heads, s.num_chunks, s.key_dim, s.value_dim),
        lam=(s.batch, s.heads, s.levels_inside, s.length),
        weight=(s.batch, s.heads, s.heights, s.length),
        chunk_decay=(s.batch, s.heads, s.num_chunks),
        decay=(s.decay_parts, s.batch, s.heads, s.num_chunks, s.chunk),
    )
    if not s.heights:
        del shapes["states"], shapes["weight"]
    keys = dict(zip(shapes, jax.random.split(jax.random.key(seed), len(shapes)), strict=True))
    draws = {name: jax.random.normal(keys[name], shape) for name, shape in shapes.items()}
    for name in {"q", "k", "v", "do", "states"} & draws.keys():
        draws[name] = draws[name].astype(s.dtype)
    draws["chunk_decay"] = -abs(draws["chunk_decay"])
    draws["decay"] = jnp.cumsum(-0.1 * abs(draws["decay"]), axis=-1).reshape(s.decay_parts, s.batch, s.heads, s.length)
    return draws


def candidates(sizes: kernels.Sizes):
    """(kernel, settings, function of draw_inputs' arrays) for everything to try."""
    heads = sorted({int(h) for h in HEADS_A_PROGRAM.value if sizes.group_heads % int(h) == 0} | {1})
    plain = [Launch(1, int(w), int(n)) for w, n in itertools.product(WARPS.value, STAGES.value)]
    shared = [dataclasses.replace(launch, heads=h) for h in heads for launch in plain]

    def calls(kernel, *names):
        return lambda launch: lambda x: kernel(*(x.get(name) for name in names), sizes, launch)

    by_launch = {
        "outputs": (shared, calls(kernels.outputs, "q", "k", "v", "decay", "lam", "weight", "states")),
        "read_gradients": (plain, calls(kernels.read_gradients, "q", "do", "weight")),
        "reader_gradients": (shared, calls(kernels.reader_gradients, "q", "do", "weight", "states")),
        "chunk_gradients": (shared, calls(kernels.chunk_gradients, "q", "k", "v", "do", "decay", "lam", "states")),
    }
    if not sizes.heights:
        by_launch = {name: by_launch[name] for name in ("outputs", "chunk_gradients")}
    for name, (launches, call) in by_launch.items():
        for launch in launches:
            yield name, launch, call(launch)
    if not sizes.heights:
        return
    for launch, span in itertools.product(plain, map(int, SPANS.value)):
        call = lambda x, launch=launch, span=span: kernels.chunk_states(x["k"], x["v"], x["decay"], sizes, launch, span)  # noqa: E731
        yield "chunk_states", (launch, span), call
    for warps, elements, radix in itertools.product(*(map(int, f.value) for f in (WARPS, ELEMENTS, RADICES))):
        launch, cut = Launch(1, warps, 1), (1, radix, elements)
        yield (
            "spread_gradients",
            (launch, radix, elements),
            lambda x, launch=launch, cut=cut: kernels.spread_gradients(
                x["states"], x["states"], None, x["chunk_decay"], sizes, launch, *cut
            ),
        )
        yield (
            "merge_states",
            (launch, radix, elements),
            lambda x, launch=launch, cut=cut: kernels.merge_states(x["states"], x["chunk_decay"], sizes, launch, *cut),
        )


def tune_chunk(chunk: int) -> None:
    dtype = jnp.dtype(DTYPE.value)
    tiles = Tiles(value_block=VALUE_BLOCK.value).with_chunk(chunk)
    sizes = attention.sizes_for(
        BATCH.value,
        LENGTH.value,
        GROUPS.value,
        HEADS.value,
        KEY_DIM.value,
        VALUE_DIM.value,
        dtype,
        PRECISION.value,
        tiles,
    )
    inputs = [draw_inputs(seed, sizes) for seed in range(INPUT_SETS.value)]
    sets = [(x,) for x in inputs]
    tried = [c for c in candidates(sizes) if not ONLY.value or c[0] in ONLY.value]

    def compiled(candidate):
        try:
            return timing.compile_over(candidate[2], sets)
        except jax.errors.JaxRuntimeError as error:  # too much shared memory, for one
            return error

    results: dict[str, list] = {}
    with concurrent.futures.ThreadPoolExecutor() as pool:
        thunks = list(pool.map(compiled, tried))
    for (name, settings, _), thunk in zip(tried, thunks, strict=True):
        if isinstance(thunk, Exception):
            print(f"chunk {chunk} {name} {settings}: {str(thunk).splitlines()[0][:150]}")
            continue
        results.setdefault(name, []).append((timing.median_ms(thunk, len(sets)), settings))
    rows = []
    for name, timed in results.items():
        timed.sort(key=lambda t: t[0])
        rows += [[name, f"{ms:.3f}", str(settings)] for ms, settings in timed[: BEST.value]]
    total = sum(timed[0][0] for timed in results.values())
    print(tabulate(rows, headers=[f"chunk {chunk}", "ms", "settings"], tablefmt="github"))
    print(f"chunk {chunk}: the fastest together {total:.3f} ms\n", flush=True)


def main(argv: list[str]) -> None:
    if len(argv) > 1:
        raise app.UsageError(f"unexpected argument {argv[1]!r}")
    if reason := why_cannot_run():
        raise app.UsageError(reason)
    print(
        f"{jax.devices()[0].device_kind}, JAX {jax.__version__}, B={BATCH.value} T={LENGTH.value} H={HEADS.value} "
        f"G={GROUPS.value} K={KEY_DIM.value} V={VALUE_DIM.value} {DTYPE.value}"
    )
    for chunk in CHUNKS.value:
        tune_chunk(int(chunk))


if __name__ == "__main__":
    app.run(main)
