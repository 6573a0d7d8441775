"""Learning curves, and when seeds converge."""

from __future__ import annotations

from loglinear_jax.analysis import figures
from loglinear_jax.analysis.labels import describe_run
from loglinear_jax.analysis.sections.base import Context, Section
from loglinear_jax.config import some_of
from loglinear_jax.tasks import SOLVED_ACCURACY


class Curves(Section):
    """Figures from metrics and summaries."""

    def __init__(self, context: Context):
        super().__init__(context)
        self.part = context.report.part("Learning curves")

    def finish(self) -> None:
        context, report, unsolved = self.context, self.context.report, []
        for run in context.runs:
            with context.attempt(run.workdir, "learning curves"):
                if any(len(run.metrics(variant)["step"]) for variant in run.variants):
                    figure, title = figures.draw_learning_curves(run), context.titled(run, "learning curves")
                    report.add_figure(self.part, figure, context.stem(run, "curves"), title)
                else:
                    report.problems.append(f"{run.workdir}: no learning curves: metrics.jsonl is empty or not here")
            with context.attempt(run.workdir, "when seeds converge"):
                figure, title = figures.draw_convergence(run), context.titled(run, "when seeds converge")
                report.add_figure(self.part, figure, context.stem(run, "convergence"), title)
                if figure is None and run.outcomes and run.task.score.thresholds:
                    unsolved.append(describe_run(run))
        if unsolved:
            of_some = f" of {some_of(unsolved)}" if len(unsolved) < len(context.runs) else ""
            self.part.notes.append(
                f"When seeds converge: not drawn, as no seed{of_some} reaches {100 * SOLVED_ACCURACY:.0f} %."
            )
