"""How do training time and decoding memory grow with T? Measured here, beside theory (the paper's complexity table)."""

from __future__ import annotations

import dataclasses
import platform
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from matplotlib.figure import Figure

from loglinear_jax.analysis import style
from loglinear_jax.analysis.section import Section
from loglinear_jax.analysis.table import Cell, Table
from loglinear_jax.benchmarks.language_model import cache_shapes, size_in_bytes, time_training
from loglinear_jax.lam import count_lam_params
from loglinear_jax.models import LanguageModel, LanguageSettings
from loglinear_jax.progress import progress_bar
from loglinear_jax.provenance import machine
from loglinear_jax.statistics import growth_exponent

VARIANTS = {f"mixer={mixer}": {"mixer": mixer} for mixer in ("softmax", "gated_linear")}
VARIANTS |= {lam: {"lam": lam} for lam in ("linear", "mlp_softplus")}
# By what is measured and the variant, "" for those with levels: its growth in theory in words, and as a function of T.
THEORY = {
    "ms": {
        "mixer=softmax": ("T²", lambda t: t**2), "mixer=gated_linear": ("T", lambda t: t),
        "": ("T log T", lambda t: t * np.log2(t)),
    },
    "bytes": {
        "mixer=softmax": ("T", lambda t: t), "mixer=gated_linear": ("1", lambda t: t**0), "": ("log T", np.log2),
    },
}  # fmt: skip


def measured_settings() -> LanguageSettings:
    """The language model that is measured: as in training on a GPU, small on a CPU. One model has all mixers and decodes."""
    if jax.default_backend() == "gpu":
        return LanguageSettings(50_257, 1)
    small = dict(hidden=64, layers=1, heads=2, head_dim=32, key_dim=32, dtype="float32", lam_hidden=64)
    return LanguageSettings(64, 1, **small)


def default_lengths() -> list[int]:
    """Lengths that take about half a minute in all on the machine at hand."""
    return [2**i for i in (range(10, 16) if jax.default_backend() == "gpu" else range(9, 13))]


def measure(lengths: Sequence[int], variant: str, tick: Callable[[], Any] = lambda: None) -> dict[str, np.ndarray]:
    """Training steps and decoding caches of one sequence at each length: "length", "ms", "bytes"; "params", "lam_params"."""
    found: dict[str, Any] = {"length": lengths, "ms": [], "bytes": []}
    for length in lengths:
        settings = dataclasses.replace(measured_settings(), max_length=length, **VARIANTS[variant])
        found["ms"].append(time_training(settings, 1, length, steps=2, repeats=5)["ms"])
        found["bytes"].append(size_in_bytes(cache_shapes(settings, length)))
        tick()
    model = LanguageModel(settings)
    lam, other = count_lam_params(jax.eval_shape(model.init, jax.random.key(0), np.zeros((1, 1), np.int32)))
    return {name: np.asarray(value) for name, value in found.items()} | {"params": other, "lam_params": lam}


def complexity_table(measured: dict[str, dict[str, np.ndarray]], machine: str) -> Table:
    """Growth exponents over the longer half of the lengths (three at least), measured and of theory; what λ by the MLP adds."""
    rows, long, base = [], [], measured.get("linear")
    for variant, found in measured.items():
        longer = slice(-max(len(found["length"]) // 2, 3), None)
        lengths = np.asarray(found["length"], float)[longer]
        row = {"variant": Cell(variant, variant=variant)}
        for name, what in (("ms", "training time"), ("bytes", "decoding memory")):
            words, function = THEORY[name].get(variant, THEORY[name][""])
            fitted = growth_exponent(lengths, np.asarray(found[name], float)[longer])
            theory = growth_exponent(lengths, function(lengths))
            row[f"{what}: theory"] = Cell(f"{words} ({theory:.2f})", **{f"{name}_exponent_theory": theory})
            row[f"{what}: measured"] = Cell(f"{fitted:.2f}", **{f"{name}_exponent": fitted})
        lam, other = int(found["lam_params"]), int(found["params"])
        shown = f"{lam:,} ({100 * lam / other:.3f} %)" if lam else "–"
        row["λ's parameters"] = Cell(shown, lam_params=lam, other_params=other)
        if base is not None and lam:
            extra = 100 * (np.divide(found["ms"], base["ms"]) - 1)
            shown = f"{np.median(extra):+.1f} % ({extra.min():+.1f} to {extra.max():+.1f})"
            shown = "the baseline" if variant == "linear" else shown
            row["time, median (range) over T"] = Cell(shown, extra_time_percent=float(np.median(extra)))
        rows.append(row)
        points = zip(*(np.asarray(found[name]).tolist() for name in ("length", "ms", "bytes")), strict=True)
        (numbers,) = Table("", [row]).raw
        long += [numbers | {"length": n, "ms": ms, "bytes": size} for n, ms, size in points]
    note = (
        f"{machine}. Exponents p of T^p, fitted from T={int(lengths[0]):,} to {int(lengths[-1]):,}; theory's is that of its "
        "formula over the same lengths. Time: a training step of the whole language model on one sequence, whose parts "
        "other than attention grow as T."
    )
    return Table("Growth with T", rows, note, long=long)


def draw_complexity(measured: Mapping[str, Mapping[str, np.ndarray]], message: str) -> Figure:
    """Training time and decoding memory against T, log-log. measured: variant -> "length", "ms", "bytes"."""
    figure, (axes,) = style.new_figure(9.3, 4.0, 1, 2)
    panels = (("ms", "training step (ms)", 1), ("bytes", "decoding memory of a sequence (KiB)", 1024))
    for axis, (name, label, unit) in zip(axes, panels, strict=True):
        handles = {}
        for variant, look in style.looks_of(measured).items():
            found = measured[variant]
            line = style.draw_line(axis, found["length"], np.asarray(found[name]) / unit, **look._asdict())
            handles[style.describe_variant(variant)] = line
        style.length_axis(axis, [int(n) for found in measured.values() for n in found["length"]])
        axis.set_yscale("log")
        style.log_ticks(axis.yaxis)
        axis.set(xlabel="T (tokens)", ylabel=label)
        axis.grid(alpha=0.3)
    style.finish(figure, message, handles)
    return figure


class Complexity(Section):
    """Not of the runs: minutes of measurements, which are kept."""

    NAME = "complexity"
    TITLE = "Complexity"
    INTRO = "Measured on the machine that made this report."
    BY_DEFAULT = False

    def show_all(self) -> None:
        here, lengths, measured = machine(), default_lengths(), {}
        key = {"what": "complexity", "machine": here, "host": platform.node(), "lengths": lengths}
        key["settings"] = dataclasses.asdict(measured_settings())
        with progress_bar("complexity", len(lengths) * len(VARIANTS), unit="length") as bar:
            for variant in VARIANTS:
                measured[variant] = self.context.cache.get(
                    key | {"variant": variant}, lambda variant=variant: measure(lengths, variant, bar.update)
                )
        what = "Training time and decoding memory against T"
        self.add(complexity_table(measured, here), "complexity-table")
        self.add(draw_complexity(measured, f"{what}; {here}"), "complexity", title=what)
