"""What the benchmarks share: flags, time on the device, and records of cases, one row each."""

from __future__ import annotations

import argparse
import collections
import contextlib
import json
import math
import re
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from tabulate import tabulate

from loglinear_jax import provenance
from loglinear_jax.command_line import BadInput, comma_separated, path
from loglinear_jax.runs.writing import replace_file
from loglinear_jax.settings import first_line


def flag_adder(parser: argparse.ArgumentParser) -> Callable[..., None]:
    """A function that adds a flag to the parser: add(name, default, help, ...). item: of a comma-separated list."""
    parser.add_argument("--output", type=path, help="write OUTPUT.json")
    help_of_kernels = "at the end, print how often each kernel ran on the GPUs, and its mean time"
    parser.add_argument("--kernels", action="store_true", help=help_of_kernels)

    def add(name: str, default: Any, help: str, item: Any = None, **settings: Any) -> None:
        settings |= {} if item is None else {"type": comma_separated(item)}
        parser.add_argument(f"--{name}", default=default, help=f"{help} (default: %(default)s)", **settings)

    return add


def json_file(output: Path) -> Path:
    """The file that --output names, with or without its ending."""
    return output.parent / (output.name.removesuffix(".json") + ".json")


class Record:
    """What a benchmark measures and where, written to OUTPUT.json after every row if --output asks for it."""

    def __init__(self, args: argparse.Namespace, **about: Any):
        self.output: Path | None = args.output and json_file(args.output)
        self.values: dict[str, Any] = provenance.origin(args.called) | about
        self.machine: str = self.values["machine"]
        self.complete = True  # whether no row is left out

    def add(self, name: str, **row: Any) -> None:
        """Adds a row to the list `name`, prints and writes it."""
        self.values.setdefault(name, []).append(row)
        print(json.dumps(row), flush=True)
        if self.output is not None:
            replace_file(self.output, lambda file: file.write(json.dumps(self.values, indent=1) + "\n"))

    def measure(self, name: str, compute: Callable[[], Mapping[str, Any]], **row: Any) -> None:
        """Adds a row that compute() completes, as `add`. One that the device cannot compute, as its memory does not suffice, is
        left out and the reason printed: the others are still measured."""
        try:
            found = compute()
        except jax.errors.JaxRuntimeError as reason:
            self.complete = False
            case = ", ".join(f"{name}={value}" for name, value in row.items() if not isinstance(value, list))
            print(f"{case}: not measured, {first_line(reason)[:200]}", flush=True)
        else:
            self.add(name, **row, **found)

    def table(self, name: str, **formats: Any) -> str:
        """All rows of a list, as Markdown."""
        return tabulate(self.values.get(name, []), headers="keys", tablefmt="github", **formats)

    def by(self, name: str, row: str, column: str, cell: Callable[[Mapping[str, Any]], str]) -> str:
        """The rows of a list as a table of Markdown, a line for each value of `row`, a column for each of `column`, of which
        numbers are named: "T=1024"."""
        lines: dict[str, dict[str, str]] = {}
        for one in self.values.get(name, []):
            head = one[column] if isinstance(one[column], str) else f"{column}={one[column]}"
            lines.setdefault(one[row], {"": one[row]})[head] = cell(one)
        options = dict(headers="keys", tablefmt="github", missingval="–", disable_numparse=True)
        return tabulate(list(lines.values()), **options)


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


def passes_of(function: Callable[..., Any]) -> dict[str, Callable[..., Any]]:
    """Of (*arguments, cotangent): "forward", the function of the arguments; "both", that and their gradients."""

    def both(*inputs: Any) -> tuple[Any, Any]:
        out, vjp = jax.vjp(function, *inputs[:-1])
        return out, vjp(inputs[-1])

    return {"forward": lambda *inputs: function(*inputs[:-1]), "both": both}


def time_passes(function: Callable[..., Any], inputs: Sequence[tuple], **options: Any) -> dict[str, float]:
    """forward_ms and both_ms of a call of function(*arguments).

    inputs: sets of (*arguments, cotangent of the output) that take turns. options: of `median_ms`.
    """
    return {
        f"{kind}_ms": median_ms(compile_over(call, inputs), len(inputs), **options)
        for kind, call in passes_of(function).items()
    }


def both_ms(row: Mapping[str, Any]) -> str:
    """ "0.235 / 1.03": milliseconds forward, and forward + backward."""
    return f"{row['forward_ms']:.3g} / {row['both_ms']:.3g}"


@contextlib.contextmanager
def printing_kernels() -> Iterator[None]:
    """Prints, at the end, a table of the kernels and copies that GPUs ran meanwhile. Raises BadInput without a GPU."""
    if jax.default_backend() != "gpu":
        raise BadInput(f"--kernels: expected a GPU, got {jax.default_backend()}")
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            yield
        [trace] = Path(folder).rglob("*.xplane.pb")
        rows = kernel_times(jax.profiler.ProfileData.from_file(str(trace)))
    print("\n" + tabulate(rows, ["kernel", "launches", "mean ms"], floatfmt=("", "", ".4f"), tablefmt="github"))


def kernel_times(profile: jax.profiler.ProfileData) -> list[tuple[str, int, float]]:
    """(Name, launches, mean milliseconds) of each kernel and copy of a profile, what took longest in all first.

    XLA numbers its kernels; those that differ in that alone are one.
    """
    times = collections.defaultdict(list)
    for plane in profile.planes:
        for line in plane.lines:
            if plane.name.startswith("/device:GPU") and line.name.startswith("Stream"):
                for event in line.events:
                    times[re.sub(r"(_+\d*)+$", "", event.name)].append(event.duration_ns / 1e6)
    rows = [(name, len(found), statistics.fmean(found)) for name, found in times.items()]
    return sorted(rows, key=lambda row: -row[1] * row[2])
