"""Where the answers stand: the Fenwick levels that hold them, from the tasks' definitions."""

from __future__ import annotations

import numpy as np

from loglinear_jax.analysis import figures
from loglinear_jax.analysis.answer_levels import answer_levels, levels_table
from loglinear_jax.analysis.sections.base import Context, Section


class Answers(Section):
    """A row for each task that the runs have, drawn from its settings alone."""

    def __init__(self, context: Context):
        super().__init__(context)
        self.part = context.report.part(
            "Where the answers stand",
            "From sequences of the tasks alone, whatever was trained. Where one Fenwick level holds every answer, a λ that is "
            "the same for every query can single them out; where several do, which one it is may differ from query to query.",
        )

    def finish(self) -> None:
        context, report = self.context, self.context.report
        shares = {}
        for name, run in {run.task.describe(): run for run in context.runs}.items():
            with context.attempt(run.workdir, "levels of the answers"):
                of_task = answer_levels(run.task)
                if of_task is not None:
                    shares[name] = of_task
        if not shares:
            return
        with context.attempt("all runs", "levels of the answers"):
            figure = figures.draw_answer_levels(shares, _message(shares))
            report.add_figure(self.part, figure, "answer-levels", "Levels that hold the answers")
            report.add_table(self.part, levels_table(shares), "answer-levels-table")


def _message(shares: dict[str, np.ndarray]) -> str:
    """Of one task its levels; of several how many have all their answers at one."""
    if len(shares) > 1:
        one = sum(np.count_nonzero(of_task) == 1 for of_task in shares.values())
        return f"Tasks with all their answers at one Fenwick level: {one} of {len(shares)}"
    [held] = [np.flatnonzero(of_task) for of_task in shares.values()]
    if len(held) == 1:
        return f"Every answer is at Fenwick level {held[0]}"
    return f"The answers are at {len(held)} Fenwick levels, {held[0]} to {held[-1]}"
