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
from collections.abc import Callable, Iterator, Sequence
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
from tabulate import tabulate

from loglinear_jax import provenance
from loglinear_jax.benchmarks import common, timing
from loglinear_jax.command_line import BadInput, comma_separated, size
from pallas_kernels.attention import api, triton
from pallas_kernels.attention.backends import BACKENDS
from pallas_kernels.attention.hopper.tiles import HEADS_A_PROGRAM, HopperTiles, choose_hopper_tiles
from pallas_kernels.attention.tiles import Tiles
from pallas_kernels.common.tiles import Launch

HELP = "find tiles for a shape of the GPU kernels"
# Arrays of `draw_inputs` that a kernel takes, and what it takes behind sizes and tiles: nodes of one chunk, joined `radix` at a
# time; and no weights kept, as in a forward pass alone. The first two are all that one chunk needs.
ARGUMENTS: dict[str, tuple[tuple[str, ...], tuple[object, ...]]] = {
    "outputs": (("q", "k", "v", "decay", "lam", "since", "states"), (False,)),
    "chunk_gradients": (("q", "k", "v", "do", "decay", "lam", "states"), ()),
    "chunk_states": (("k", "v", "decay"), ()),
    "state_gradients": (("q", "do", "weight"), ()),
    "query_gradients": (("q", "do", "weight", "states", "dq"), ()),
    "spread_gradients": (("states", "states", "nothing", "chunk_decay"), (1,)),
    "merge_states": (("states", "chunk_decay"), (1,)),
}
OF_ONE_CHUNK = ("outputs", "chunk_gradients")

Candidate = tuple[
    str, Any, Callable[[dict[str, jax.Array]], Any]
]  # a kernel, settings, a call with draw_inputs' arrays


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


def _call(kernels: ModuleType, name: str, sizes: triton.AttentionSizes, tiles: Tiles | HopperTiles, *rest: int):
    arrays, behind = ARGUMENTS[name]
    return lambda x: getattr(kernels, name)(*map(x.get, arrays), sizes, tiles, *behind, *rest)


def candidates(sizes: triton.AttentionSizes, tried: Tried) -> Iterator[Candidate]:
    """Everything to try of the kernels by Triton."""
    heads = sorted({h for h in tried.heads_a_program if sizes.group_heads % h == 0} | {1})
    plain = [Launch(1, warps, stages) for warps, stages in itertools.product(tried.warps, tried.stages)]
    shared = [dataclasses.replace(launch, heads=h) for h in heads for launch in plain]

    def candidate(name: str, settings: Any, *rest: int, **tiles: Any) -> Candidate:
        return name, settings, _call(triton, name, sizes, Tiles(**tiles), *rest)

    of_tree = dict(state_gradients=plain, query_gradients=shared) if sizes.heights else {}
    for name, launches in (dict.fromkeys(OF_ONE_CHUNK, shared) | of_tree).items():
        yield from (candidate(name, launch, **{name: launch}) for launch in launches)
    if not sizes.heights:
        return
    for launch, span in itertools.product(plain, tried.spans):
        yield candidate("chunk_states", (launch, span), chunk_states=launch, span=span)
    for warps, elements, radix in itertools.product(tried.warps, tried.elements, tried.radices):
        launch = Launch(1, warps, 1)
        settings = launch, radix, elements
        yield candidate("spread_gradients", settings, radix, spread_gradients=launch, elements=elements)
        yield candidate("merge_states", settings, merge_states=launch, radix=radix, elements=elements)


def hopper_candidates(sizes: triton.AttentionSizes, tried: Tried) -> Iterator[Candidate]:
    """Everything to try of the kernels for Hopper. Settings: heads a program, for `chunk_states` also span and warpgroups; or
    the radix."""
    from pallas_kernels.attention.hopper import scan  # which only JAX from 0.11.2 on can import

    given = HopperTiles(rows=sizes.chunk // 64, value_block=sizes.value_dim)
    for name in HEADS_A_PROGRAM if sizes.heights else OF_ONE_CHUNK:
        most = dataclasses.replace(given, **{name: max(tried.heads_a_program)})
        possible = most.heads_of(name, sizes.group_heads, sizes.groups)
        for h in sorted({h for h in tried.heads_a_program if h in possible} | {1}):
            tiles = dataclasses.replace(given, **{name: h})
            if name == "chunk_states":
                for span, warpgroups in itertools.product((1, 2), (1, 2, 3)):
                    parts = dataclasses.replace(tiles, span=span, warpgroups=warpgroups)
                    if parts.sharing_warpgroups(h) == warpgroups:
                        yield name, (h, span, warpgroups), _call(scan, name, sizes, parts)
            elif name != "state_gradients" or h <= given.state_gradients:
                yield name, h, _call(scan, name, sizes, tiles)
    for radix in tried.radices if sizes.heights else ():
        yield "spread_gradients", radix, _call(scan, "spread_gradients", sizes, given, radix)
        yield "merge_states", radix, _call(scan, "merge_states", sizes, dataclasses.replace(given, radix=radix))


def time_candidates(
    sizes: triton.AttentionSizes, tried: Tried, only: Sequence[str] = (), input_sets: int = 3, backend: str = "triton"
) -> dict[str, list[tuple[float, Any]]]:
    """kernel -> (milliseconds, settings), the fastest first; what does not compile is named and left out.

    only: kernels to time, all if empty. input_sets: sets of inputs that take turns.
    """
    sets = [(draw_inputs(seed, sizes, backend),) for seed in range(input_sets)]
    everything = (candidates if backend == "triton" else hopper_candidates)(sizes, tried)
    chosen = [candidate for candidate in everything if not only or candidate[0] in only]

    def compiled(candidate: Candidate) -> Callable[[], object] | Exception:
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
        else:
            results.setdefault(name, []).append((timing.median_ms(thunk, len(sets)), settings))
    return {name: sorted(timed, key=lambda t: t[0]) for name, timed in results.items()}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = common.flag_adder(parser)

    def add_sizes(name: str, help: str, default: Sequence[int] | None = None) -> None:
        default = getattr(Tried, name) if default is None else default
        add(name, ",".join(map(str, default)), help, type=comma_separated(size))

    add("backend", "triton", "whose kernels", choices=["triton", "hopper"])
    for name, default, help in (
        ("batch", 2, "sequences"),
        ("length", 8192, "tokens"),
        ("heads", 48, "heads"),
        ("groups", 1, "key groups"),
        ("key_dim", 128, "key dim"),
        ("value_dim", 64, "value dim"),
        ("value_block", 64, "columns of V a program, by Triton"),
        ("input_sets", 3, "input sets that take turns"),
        ("best", 4, "launches to print for each kernel"),
    ):
        add(name, default, help, type=size)
    add("dtype", "bfloat16", "dtype of q, k, v", choices=["float32", "bfloat16"])
    add("precision", "highest", "of float32 products", choices=["highest", "high"])
    add_sizes("chunks", "chunks to try", (64, 128))
    add_sizes("spans", "chunks whose states one program builds")
    add_sizes("heads_a_program", "heads a program, for kernels that share scores")
    add_sizes("elements", "elements of K x V a program, in kernels that join or part nodes")
    add_sizes("radices", "nodes joined or parted at once")
    add_sizes("warps", "warps a program")
    add_sizes("stages", "pipeline stages")
    parser.add_argument("--only", type=comma_separated(), default=[], help="kernels to tune (default: all)")


def run(args: argparse.Namespace) -> int:
    kernel, dtype = BACKENDS[args.backend], jnp.dtype(args.dtype)
    if reason := kernel.why_not(args.key_dim, args.value_dim, dtype, None, args.precision):
        raise BadInput(reason)
    shape = (args.batch, args.length, args.groups, args.heads, args.key_dim, args.value_dim)
    print(provenance.machine(), *map("{}={}".format, "BTGHKV", shape), args.dtype)
    tried = Tried(**{field.name: getattr(args, field.name) for field in dataclasses.fields(Tried)})
    hopper = args.backend == "hopper"
    tiles = choose_hopper_tiles(args.length, args.value_dim) if hopper else Tiles(value_block=args.value_block)
    for chunk in args.chunks:
        sizes = api.sizes_for(*shape, dtype, args.precision, tiles.with_chunk(chunk))
        results = time_candidates(sizes, tried, args.only, args.input_sets, args.backend)
        rows = [
            [name, f"{ms:.3f}", str(settings)] for name, timed in results.items() for ms, settings in timed[: args.best]
        ]
        print(tabulate(rows, headers=[f"chunk {chunk}", "ms", "settings"], tablefmt="github"))
        total = sum(timed[0][0] for timed in results.values())
        print(f"chunk {chunk}: the fastest together {total:.3f} ms\n", flush=True)
    return 0
