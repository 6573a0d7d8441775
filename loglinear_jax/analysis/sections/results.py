"""Results: the paper's tables, settings beside each other, and every run's outcomes."""

from __future__ import annotations

from loglinear_jax.analysis import figures, tables
from loglinear_jax.analysis.sections.base import Context, Section
from loglinear_jax.tasks import CONVERGED_ACCURACY

MANY_RUNS = 5  # from which their own tables are folded


class Results(Section):
    """Tables from summaries."""

    def __init__(self, context: Context):
        super().__init__(context)
        self.part = context.report.part("Results")

    def finish(self) -> None:
        context, report = self.context, self.context.report
        with context.attempt("all runs", "the paper's tables"):
            for index, table in enumerate(tables.as_the_paper(context.runs)):
                report.add_table(self.part, table, f"as-the-paper-{index + 1}")
        with context.attempt("all runs", "the tables of changes"):
            by_setting = tables.by_setting(context.runs)
            if by_setting:
                shares = {task: table.raw for task, table in by_setting.items()}
                title = "Seeds that converge, by what is changed"
                if any(row["num_converged"] for rows in shares.values() for row in rows):
                    report.add_figure(self.part, figures.draw_shares(shares), "by-setting", title)
                else:
                    self.part.notes.append(f"{title}: not drawn, as no seed reaches {100 * CONVERGED_ACCURACY:.0f} %.")
            for index, table in enumerate(by_setting.values()):
                report.add_table(self.part, table, f"by-setting-{index + 1}")
        with context.attempt("all runs", "the figure of all tasks"):
            panels, shown_as = tables.accuracies_by_task(context.runs)
            if len(panels) > 1:
                title = "Every variant in every task"
                report.add_figure(self.part, figures.draw_by_task(panels, shown_as), "by-task", title)
        with context.attempt("all runs", "accuracy against the size of the states"):
            by_size, shown_as = tables.accuracies_by_size(context.runs)
            if by_size:
                title = "Accuracy against the size of what a layer keeps"
                report.add_figure(self.part, figures.draw_by_size(by_size, shown_as), "by-size", title)
            for index, (task, variants) in enumerate(by_size.items()):
                report.add_table(self.part, tables.by_size(task, variants, shown_as), f"by-size-{index + 1}")
        for run in context.runs:
            if not run.outcomes:
                report.problems.append(f"{run.workdir}: no results yet: there is no summary.json")
                continue
            for stem, make, folded in (
                ("outcomes", tables.outcomes, len(context.runs) >= MANY_RUNS),
                ("parts", tables.parts, False),
                ("differences", tables.differences, True),
                ("seeds", tables.by_seed, True),
            ):
                with context.attempt(run.workdir, stem):
                    table = make(run)
                    if table is not None:
                        shown = context.titled(run, table.title)
                        report.add_table(self.part, table, context.stem(run, stem), shown, folded)
