"""What the benchmarks share: their flags, time on the device, kernels by JAX's profiler, records."""

from __future__ import annotations

import argparse
import collections
import json
import math
import re
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from tabulate import tabulate

from loglinear_jax import provenance
from loglinear_jax.command_line import BadInput, comma_separated, path

# --- The command --------------------------------------------------------------------------------------------------------


def flag_adder(parser: argparse.ArgumentParser) -> Callable[..., None]:
    """A function that adds a flag to the parser: add(name, default, help, ...). item: of a comma-separated list."""

    def add(name: str, default: Any, help: str, item: Any = None, **settings: Any) -> None:
        settings |= {} if item is None else {"type": comma_separated(item)}
        parser.add_argument(f"--{name}", default=default, help=f"{help} (default: %(default)s)", **settings)

    return add


def add_common(parser: argparse.ArgumentParser) -> None:
    help_of_kernels = "also each kernel's time, of all GPUs together (needs a GPU)"
    parser.add_argument("--kernels", action="store_true", help=help_of_kernels)
    parser.add_argument("--output", type=path, help="write OUTPUT.json")


def check_kernels(args: argparse.Namespace) -> None:
    """Raises BadInput if --kernels asks for what only a GPU has."""
    if args.kernels and jax.default_backend() != "gpu":
        raise BadInput(f"--kernels: expected a GPU, got {jax.default_backend()}")


class Record:
    """What a benchmark measures and where, in `values`, to be written to OUTPUT.json if --output asks for it."""

    def __init__(self, args: argparse.Namespace, **about: Any):
        name = args.output and args.output.name.removesuffix(".json") + ".json"
        self.output: Path | None = args.output and args.output.with_name(name)
        self.values: dict[str, Any] = provenance.origin(args.called) | about
        self.machine: str = self.values["machine"]

    def add(self, name: str, what: str, row: dict[str, Any]) -> None:
        """Adds a row to the list `name`: prints it, with its kernels if it has any, and writes it."""
        self.values.setdefault(name, []).append(row)
        print(json.dumps(_without_kernels(row)), flush=True)
        print_kernels(what, row)
        self.write()

    def table(self, name: str, **formats: Any) -> str:
        return tabulate(map(_without_kernels, self.values.get(name, [])), headers="keys", tablefmt="github", **formats)

    def write(self) -> None:
        if self.output is not None:
            self.output.write_text(json.dumps(self.values, indent=1) + "\n", encoding="utf-8")


def _without_kernels(row: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in row.items() if not name.endswith("kernels")}


# --- Time ---------------------------------------------------------------------------------------------------------------


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
    """A rate measured again until two successive measurements agree: a GPU raises its clocks only when it has work."""
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


def matmul_rate() -> float:
    """FLOP/s of a large bfloat16 (on a CPU: float32, smaller) matrix product on one device."""
    size, dtype = (8192, jnp.bfloat16) if jax.default_backend() == "gpu" else (1024, jnp.float32)
    sets = [(jnp.ones((size, size), dtype), jnp.ones((size, size), dtype)) for _ in range(2)]
    ms = median_ms(compile_over(jnp.dot, sets), len(sets), repeats=20, min_ms=100.0)
    return 2 * size**3 / (ms * 1e-3)


def time_passes(
    function: Callable[..., Any], inputs: Sequence[tuple], profile: bool = False, **options: Any
) -> dict[str, Any]:
    """forward_ms and both_ms of a call of function(*arguments), and with `profile` forward_kernels and both_kernels.

    inputs: sets of (*arguments, cotangent of the output) that take turns. options: of `median_ms`.
    """
    found = {}
    for kind, call in passes_of(function).items():
        found |= measured(kind, compile_over(call, inputs), len(inputs), profile, **options)
    return found


def passes_of(function: Callable[..., Any]) -> dict[str, Callable[..., Any]]:
    """Of (*arguments, cotangent): "forward", the function of the arguments; "both", that and their gradients."""

    def both(*inputs: Any) -> tuple[Any, Any]:
        out, vjp = jax.vjp(function, *inputs[:-1])
        return out, vjp(inputs[-1])

    return {"forward": lambda *inputs: function(*inputs[:-1]), "both": both}


def measured(kind: str, thunk: Callable[[], Any], calls: int, profile: bool = False, **options: Any) -> dict[str, Any]:
    """{kind}_ms of one of the `calls` that the thunk makes, and with `profile` its {kind}_kernels."""
    found = {f"{kind}_ms": median_ms(thunk, calls, **options)}
    return found | {f"{kind}_kernels": profiled(thunk, calls)} if profile else found


# --- Kernels ------------------------------------------------------------------------------------------------------------


class KernelTime(NamedTuple):
    """Of the kernels of one name, for one call."""

    launches: float
    ms: float


def profiled(compute: Callable[[], Any], calls: int) -> dict[str, KernelTime]:
    """Launches and time of each kernel and copy, of all GPUs together, for one of the `calls` that `compute` makes; the longest
    first."""
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            jax.block_until_ready(compute())
        [trace] = Path(folder).rglob("*.xplane.pb")
        return of_profile(jax.profiler.ProfileData.from_file(str(trace)), calls)


def of_profile(data: jax.profiler.ProfileData, calls: int) -> dict[str, KernelTime]:
    """The same of a profile. XLA numbers its kernels; those that differ in that alone are added up."""
    found = collections.defaultdict(lambda: KernelTime(0, 0.0))
    for plane in data.planes:
        for line in plane.lines:
            if plane.name.startswith("/device:GPU") and line.name.startswith("Stream"):
                for event in line.events:
                    name = re.sub(r"(_+\d*)+$", "", event.name)
                    launches, ms = found[name]
                    found[name] = KernelTime(launches + 1, ms + event.duration_ns / 1e6)
    of_call = {name: KernelTime(time.launches / calls, time.ms / calls) for name, time in found.items()}
    return dict(sorted(of_call.items(), key=lambda item: -item[1].ms))


def print_kernels(what: str, found: Mapping[str, Any]) -> None:
    """A table for each of kernels, forward_kernels and both_kernels that is in `found`."""
    for name, title in (("kernels", ""), ("forward_kernels", ", forward"), ("both_kernels", ", forward + backward")):
        if name in found:
            rows = [(kernel, *time) for kernel, time in found[name].items()]
            rows.append(("together", *map(sum, zip((0.0, 0.0), *found[name].values(), strict=True))))
            shown = tabulate(rows, [what + title, "launches", "ms"], floatfmt=("", ".1f", ".4f"), tablefmt="github")
            print(f"\n{shown}\n", flush=True)
