"""Learning rates: every variant at every rate, the best rate, how narrow the window of good ones is, and what differs there."""

from __future__ import annotations

from loglinear_jax.analysis import figures, tables
from loglinear_jax.analysis.sections.base import Context, Section
from loglinear_jax.runs.loading import Run

MANY_ROWS = 12  # above which a table is folded


class Rates(Section):
    """From the summaries of runs with several learning rates or weight decays; of others what a few of their seeds would tell,
    where there are many."""

    def __init__(self, context: Context):
        super().__init__(context)
        self.part = context.report.part("Learning rates, and few seeds")

    def finish(self) -> None:
        for run in self.context.runs:
            with self.context.attempt(run.workdir, "learning rates"):
                self._add_figure_and_tables(run)

    def _add_figure_and_tables(self, run: Run) -> None:
        context, report = self.context, self.context.report
        title = context.titled(run, "learning rates")
        report.add_figure(self.part, figures.draw_rates(run), context.stem(run, "rates"), title)
        made = dict(zip(("rates-table", "best-rates"), tables.rates(run), strict=False))  # none of a run with one rate
        made["best-differences"] = tables.differences_at_best_rates(run)
        made["few-seeds"] = tables.few_seeds_table(run)
        for name, table in made.items():
            if table is not None:
                shown, folded = context.titled(run, table.title), len(table.rows) > MANY_ROWS
                report.add_table(self.part, table, context.stem(run, name), shown, folded)
