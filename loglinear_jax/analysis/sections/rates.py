"""Learning rates: every variant at every rate, the best rate, and how narrow the window of good ones is."""

from __future__ import annotations

from loglinear_jax.analysis import figures, tables
from loglinear_jax.analysis.sections.base import Context, Section


class Rates(Section):
    """From the summaries of runs with several learning rates or weight decays; nothing of others."""

    def __init__(self, context: Context):
        super().__init__(context)
        self.part = context.report.part("Learning rates")

    def finish(self) -> None:
        context, report = self.context, self.context.report
        for run in context.runs:
            with context.attempt(run.workdir, "learning rates"):
                figure = figures.draw_rates(run)
                if figure is None:
                    continue
                report.add_figure(self.part, figure, context.stem(run, "rates"), context.titled(run, "learning rates"))
                for name, table in zip(("rates-table", "best-rates"), tables.rates(run), strict=True):
                    report.add_table(self.part, table, context.stem(run, name), context.titled(run, table.title))
