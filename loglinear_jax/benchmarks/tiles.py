"""Finds tiles for a shape on the GPU at hand: times every kernel under every launch, for every chunk.

    loglinear_jax benchmark tiles --length=8192 --heads=48 --groups=1 --key_dim=128 --value_dim=64
    loglinear_jax benchmark tiles --backend=hopper --heads_a_program=1,2,4,8,16,48

Prints the fastest launches of each kernel and the sum over the kernels for each chunk, for pallas_kernels/attention/tiles.py.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import dataclasses
import itertools
import sys
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from tabulate import tabulate

from loglinear_jax import provenance
from loglinear_jax.benchmarks import timing
from loglinear_jax.command_line import BadInput, comma_separated, size
from pallas_kernels.attention import api as attention
from pallas_kernels.attention import triton
from pallas_kernels.attention.backends import BACKENDS
from pallas_kernels.attention.hopper.tiles import HEADS_A_PROGRAM, HopperTiles, choose_hopper_tiles
from pallas_kernels.attention.tiles import Tiles
from pallas_kernels.common.support import why_cannot_run
from pallas_kernels.common.tiles import Launch

HELP = "find tiles for a shape of the GPU kernels"


@dataclasses.dataclass(frozen=True)
class Tried:
    """What to try: chunks of states a program, heads a program, elements of K x V, radices, warps and pipeline stages."""

    spans: Sequence[int] = (2, 4, 8)
    heads_a_program: Sequence[int] = (1, 4, 8)
    elements: Sequence[int] = (512, 1024, 2048)
    radices: Sequence[int] = (8, 16)
    warps: Sequence[int] = (4, 8)
    stages: Sequence[int] = (1, 2, 3)


def draw_inputs(seed: int, sizes: triton.AttentionSizes, backend: str = "triton") -> dict[str, jax.Array]:
    """Random arrays of every kind that a kernel reads."""
    s = sizes
    states_dims = (s.key_dim, s.value_dim) if backend == "triton" else (s.value_dim, s.key_dim)
    shapes = dict(
        q=(s.batch, s.length, s.groups, s.key_dim),
        k=(s.batch, s.length, s.groups, s.key_dim),
        v=(s.batch, s.length, s.all_heads, s.value_dim),
        do=(s.batch, s.length, s.all_heads, s.value_dim),
        states=(s.batch, s.all_heads, s.num_chunks, *states_dims),
        lam=(s.batch, s.length, s.heads, s.levels),
        since=(s.batch, s.heads, s.num_chunks, s.heights),
        weight=(s.batch, s.heads, s.heights, s.length),
        dq=(1, s.batch, s.length, s.groups, s.key_dim),
        chunk_decay=(s.batch, s.heads, s.num_chunks),
        decay=(s.decay_parts, s.batch, s.heads, s.num_chunks, s.chunk),
    )
    if not s.heights:
        del shapes["states"], shapes["since"], shapes["weight"]
    keys = dict(zip(shapes, jax.random.split(jax.random.key(seed), len(shapes)), strict=True))
    draws = {name: jax.random.normal(keys[name], shape) for name, shape in shapes.items()}
    rounded = {"q", "k", "v", "do", "states"} | ({"dq"} if backend == "hopper" else set())
    for name in rounded & draws.keys():
        draws[name] = draws[name].astype(s.dtype)
    for name in {"chunk_decay", "since"} & draws.keys():
        draws[name] = -abs(draws[name])
    draws["decay"] = jnp.cumsum(-0.1 * abs(draws["decay"]), axis=-1).reshape(s.decay_parts, s.batch, s.heads, s.length)
    return draws


# Names of draw_inputs' arrays that the kernels read.
ARGUMENTS = {
    "chunk_states": ("k", "v", "decay"),
    "outputs": ("q", "k", "v", "decay", "lam", "since", "states"),
    "state_gradients": ("q", "do", "weight"),
    "query_gradients": ("q", "do", "weight", "states", "dq"),
    "chunk_gradients": ("q", "k", "v", "do", "decay", "lam", "states"),
    "spread_gradients": ("states", "states", "nothing", "chunk_decay"),
    "merge_states": ("states", "chunk_decay"),
}
REST = {"outputs": (False,)}  # what they take behind sizes and tiles: no weights are kept, as in a forward pass alone


def hopper_candidates(sizes: triton.AttentionSizes, tried: Tried):
    """As `candidates`, of the kernels for Hopper; settings: heads a program, of `chunk_states` also span and warpgroups, or the
    radix."""
    from pallas_kernels.attention.hopper import scan  # which only JAX from 0.11.2 on can import

    given = HopperTiles(rows=sizes.chunk // 64, value_block=sizes.value_dim)

    def call(name, tiles, *rest):
        rest = (*rest, *REST.get(name, ()))
        return lambda x: getattr(scan, name)(*map(x.get, ARGUMENTS[name]), sizes, tiles, *rest)

    for name in HEADS_A_PROGRAM:
        if not sizes.heights and name not in ("outputs", "chunk_gradients"):
            continue
        most = dataclasses.replace(given, **{name: max(tried.heads_a_program)})
        possible = most.heads_of(name, sizes.group_heads, sizes.groups)
        for h in sorted({h for h in tried.heads_a_program if h in possible} | {1}):
            if name == "chunk_states":
                for span, warpgroups in itertools.product((1, 2), (1, 2, 3)):
                    tiles = dataclasses.replace(given, chunk_states=h, span=span, warpgroups=warpgroups)
                    if tiles.sharing_warpgroups(h) == warpgroups:
                        yield name, (h, span, warpgroups), call(name, tiles)
            elif name != "state_gradients" or h <= given.state_gradients:
                yield name, h, call(name, dataclasses.replace(given, **{name: h}))
    for radix in tried.radices if sizes.heights else ():
        yield "spread_gradients", radix, call("spread_gradients", given, 1, radix)
        yield "merge_states", radix, call("merge_states", dataclasses.replace(given, radix=radix), 1)


def candidates(sizes: triton.AttentionSizes, tried: Tried):
    """(kernel, settings, function of draw_inputs' arrays) for everything to try."""
    heads = sorted({h for h in tried.heads_a_program if sizes.group_heads % h == 0} | {1})
    plain = [Launch(1, warps, stages) for warps, stages in itertools.product(tried.warps, tried.stages)]
    shared = [dataclasses.replace(launch, heads=h) for h in heads for launch in plain]

    def calls(name, *rest):
        """(settings) -> the call of that kernel with its arrays, the rest of its arguments, and these tiles."""
        kernel, rest = getattr(triton, name), (*rest, *REST.get(name, ()))
        return lambda **tiles: lambda x: kernel(*map(x.get, ARGUMENTS[name]), sizes, Tiles(**tiles), *rest)

    by_launch = dict(outputs=shared, state_gradients=plain, query_gradients=shared, chunk_gradients=shared)
    if not sizes.heights:
        by_launch = {name: by_launch[name] for name in ("outputs", "chunk_gradients")}
    for name, launches in by_launch.items():
        for launch in launches:
            yield name, launch, calls(name)(**{name: launch})
    if not sizes.heights:
        return
    for launch, span in itertools.product(plain, tried.spans):
        yield "chunk_states", (launch, span), calls("chunk_states")(chunk_states=launch, span=span)
    for warps, elements, radix in itertools.product(tried.warps, tried.elements, tried.radices):
        launch = Launch(1, warps, 1)
        spread = calls("spread_gradients", 1, radix)
        yield "spread_gradients", (launch, radix, elements), spread(spread_gradients=launch, elements=elements)
        merge = calls("merge_states", 1)
        yield "merge_states", (launch, radix, elements), merge(merge_states=launch, radix=radix, elements=elements)


def time_candidates(
    sizes: triton.AttentionSizes,
    tried: Tried,
    only: Sequence[str] = (),
    input_sets: int = 3,
    backend: str = "triton",
) -> dict[str, list[tuple[float, Any]]]:
    """kernel -> (milliseconds, settings), the fastest first; what does not compile is named and left out.

    only: kernels to time, all if empty. input_sets: sets of inputs that take turns.
    """
    sets = [(draw_inputs(seed, sizes, backend),) for seed in range(input_sets)]
    tried_candidates = (candidates if backend == "triton" else hopper_candidates)(sizes, tried)
    chosen = [c for c in tried_candidates if not only or c[0] in only]

    def compiled(candidate):
        try:
            return timing.compile_over(candidate[2], sets)
        except jax.errors.JaxRuntimeError as error:  # too much shared memory, for one
            return error

    with concurrent.futures.ThreadPoolExecutor() as pool:
        thunks = list(pool.map(compiled, chosen))
    results: dict[str, list] = {}
    for (name, settings, _), thunk in zip(chosen, thunks, strict=True):
        if isinstance(thunk, Exception):
            print(f"chunk {sizes.chunk} {name} {settings}: {str(thunk).splitlines()[0][:150]}")
            continue
        results.setdefault(name, []).append((timing.median_ms(thunk, len(sets)), settings))
    return {name: sorted(timed, key=lambda t: t[0]) for name, timed in results.items()}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    def add(name: str, default: Any, help: str, **kwargs: Any) -> None:
        parser.add_argument(f"--{name}", default=default, help=f"{help} (default: %(default)s)", **kwargs)

    def add_sizes(name: str, help: str, default: Sequence[int] | None = None) -> None:
        default = getattr(Tried, name) if default is None else default
        add(name, ",".join(map(str, default)), help, type=comma_separated(size))

    add("backend", "triton", "whose kernels", choices=["triton", "hopper"])
    add("batch", 2, "sequences", type=size)
    add("length", 8192, "tokens", type=size)
    add("heads", 48, "heads", type=size)
    add("groups", 1, "key groups", type=size)
    add("key_dim", 128, "key dim", type=size)
    add("value_dim", 64, "value dim", type=size)
    add("dtype", "bfloat16", "dtype of q, k, v", choices=["float32", "bfloat16"])
    add("precision", "highest", "of float32 products", choices=["highest", "high"])
    add_sizes("chunks", "chunks to try", (64, 128))
    add("value_block", 64, "columns of V a program, by Triton", type=size)
    add_sizes("spans", "chunks whose states one program builds")
    add_sizes("heads_a_program", "heads a program, for kernels that share scores")
    add_sizes("elements", "elements of K x V a program, in kernels that join or part nodes")
    add_sizes("radices", "nodes joined or parted at once")
    add_sizes("warps", "warps a program")
    add_sizes("stages", "pipeline stages")
    add("input_sets", 3, "input sets that take turns", type=size)
    parser.add_argument("--only", type=comma_separated(), default=[], help="kernels to tune (default: all)")
    add("best", 4, "launches to print for each kernel", type=size)


def run(args: argparse.Namespace) -> int:
    if args.backend == "triton":
        reason = why_cannot_run()
    else:
        reason = BACKENDS["hopper"].why_not(args.key_dim, args.value_dim, jnp.dtype(args.dtype))
    if reason:
        raise BadInput(reason)
    shape = (args.batch, args.length, args.groups, args.heads, args.key_dim, args.value_dim)
    print(provenance.machine(), *map("{}={}".format, "BTGHKV", shape), args.dtype)
    tried = Tried(**{field.name: getattr(args, field.name) for field in dataclasses.fields(Tried)})
    for chunk in args.chunks:
        tiles = Tiles(value_block=args.value_block)
        if args.backend == "hopper":
            tiles = choose_hopper_tiles(args.length, args.value_dim)
        tiles = tiles.with_chunk(chunk)
        sizes = attention.sizes_for(*shape, jnp.dtype(args.dtype), args.precision, tiles)
        results = time_candidates(sizes, tried, args.only, args.input_sets, args.backend)
        rows = [
            [name, f"{ms:.3f}", str(settings)] for name, timed in results.items() for ms, settings in timed[: args.best]
        ]
        print(tabulate(rows, headers=[f"chunk {chunk}", "ms", "settings"], tablefmt="github"))
        total = sum(timed[0][0] for timed in results.values())
        print(f"chunk {chunk}: the fastest together {total:.3f} ms\n", flush=True)
    return 0


if __name__ == "__main__":
    from loglinear_jax.commands.main import main

    sys.exit(main(["tiles", *sys.argv[1:]], command="benchmark", called="python -m loglinear_jax benchmark"))
