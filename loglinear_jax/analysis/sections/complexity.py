"""Complexity: training time and decoding memory against T, measured on this machine."""

from __future__ import annotations

import dataclasses
import platform

from loglinear_jax.analysis import complexity
from loglinear_jax.analysis.figures import draw_complexity
from loglinear_jax.analysis.sections.base import Context, Section
from loglinear_jax.progress import progress_bar
from loglinear_jax.provenance import machine


class Complexity(Section):
    """Not of the runs: minutes of measurements, which are kept."""

    BY_DEFAULT = False

    def __init__(self, context: Context):
        super().__init__(context)
        self.part = context.report.part("Complexity", "Measured on the machine that made this report.")

    def finish(self) -> None:
        with self.context.attempt("this machine", "complexity"):
            self._measure()

    def _measure(self) -> None:
        here = machine()
        lengths = complexity.default_lengths()
        measured = {}
        key = {"what": "complexity", "machine": here, "host": platform.node(), "lengths": lengths}
        key["settings"] = dataclasses.asdict(complexity.measured_settings())
        with progress_bar("complexity", len(lengths) * len(complexity.VARIANTS), unit="length") as bar:
            for variant in complexity.VARIANTS:
                measured[variant] = self.context.cache.get(
                    key | {"variant": variant}, lambda variant=variant: complexity.measure(lengths, variant, bar.update)
                )
        report = self.context.report
        report.add_table(self.part, complexity.table(measured, here), "complexity-table")
        figure = draw_complexity(measured, f"Training time and decoding memory against T; {here}")
        report.add_figure(self.part, figure, "complexity", "Training time and decoding memory against T")
