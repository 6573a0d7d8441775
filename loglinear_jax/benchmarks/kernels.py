"""Which kernels a GPU runs for a call, and for how long, by JAX's profiler."""

from __future__ import annotations

import collections
import re
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
from tabulate import tabulate

from loglinear_jax.benchmarks import timing


class KernelTime(NamedTuple):
    """Of the kernels of one name, for one call."""

    launches: float
    ms: float


def time_passes(
    function: Callable[..., Any], inputs: Sequence[tuple], profile: bool = False, **options: Any
) -> dict[str, Any]:
    """forward_ms and both_ms of a call of function(*arguments), and with `profile` forward_kernels and both_kernels.

    inputs: sets of (*arguments, cotangent of the output) that take turns. options: of `timing.median_ms`.
    """
    found = {}
    for kind, call in (("forward", lambda *x: function(*x[:-1])), ("both", lambda *x: both_passes(function, *x))):
        found |= measured(kind, timing.compile_over(call, inputs), len(inputs), profile, **options)
    return found


def both_passes(function: Callable[..., Any], *inputs: Any) -> tuple[Any, Any]:
    """(function of the inputs but the last, the gradients of those for the last, a cotangent)."""
    out, vjp = jax.vjp(function, *inputs[:-1])
    return out, vjp(inputs[-1])


def measured(kind: str, thunk: Callable[[], Any], calls: int, profile: bool = False, **options: Any) -> dict[str, Any]:
    """{kind}_ms of one of the `calls` that the thunk makes, by `timing.median_ms` with these options; with `profile` its
    {kind}_kernels, too."""
    found = {f"{kind}_ms": timing.median_ms(thunk, calls, **options)}
    return found | {f"{kind}_kernels": profiled(thunk, calls)} if profile else found


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


def print_tables(what: str, found: Mapping[str, Any]) -> None:
    """The tables of `found`, where it has kernels, or forward_kernels and both_kernels."""
    for name, title in (("kernels", ""), ("forward_kernels", ", forward"), ("both_kernels", ", forward + backward")):
        if name in found:
            print(f"\n{table(what + title, found[name])}\n", flush=True)


def without_kernels(row: Mapping[str, Any]) -> dict[str, Any]:
    """The row of a table without its kernels."""
    return {name: value for name, value in row.items() if name != "kernels"}


def table(title: str, times: Mapping[str, KernelTime]) -> str:
    if not times:
        return f"{title}: the profiler saw no kernels"
    rows = [(name, *time) for name, time in times.items()]
    rows.append(("together", *(sum(column) for column in zip(*times.values(), strict=True))))
    return tabulate(rows, [title, "launches", "ms"], floatfmt=("", ".1f", ".4f"), tablefmt="github")
