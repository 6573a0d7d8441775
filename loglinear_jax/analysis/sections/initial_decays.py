"""Which seeds converge: whether it is decided by how far back they remember before training."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from loglinear_jax.analysis import figures, tables
from loglinear_jax.analysis.decays import initial_memory
from loglinear_jax.analysis.experiments import changed_settings
from loglinear_jax.analysis.sections.base import Context, Section
from loglinear_jax.config import variant_config
from loglinear_jax.mixers import MIXERS
from loglinear_jax.progress import progress_bar
from loglinear_jax.runs.loading import Run
from loglinear_jax.runs.outcome import on_one_set


class InitialDecays(Section):
    """From the summaries of tasks whose score has thresholds; the seeds' first parameters are drawn again."""

    def __init__(self, context: Context):
        super().__init__(context)
        self.part = context.report.part("Which seeds converge")

    def finish(self) -> None:
        context = self.context
        asked = [
            (run, variant)
            for run in context.runs
            if run.outcomes and run.task.score.thresholds
            for variant in run.variants
            if MIXERS[variant_config(run.config, variant).model.mixer].decays
        ]
        found = []
        with progress_bar("initial decays", len(asked), unit="variant", shown=bool(asked)) as bar:
            for run, variant in asked:
                with context.attempt(run.workdir, f"{variant}: initial decays"):
                    found.append((run, variant, initial_memory(run, variant)))
                bar.update()
        if found:
            with context.attempt("all runs", "initial decays"):
                self._show(found)

    def _show(self, found: list[tuple[Run, str, np.ndarray]]) -> None:
        report, layer = self.context.report, self.context.choices.layer
        drawn: dict[Path, tuple[str, int, dict]] = {}
        changed = changed_settings([run for run, *_ in found])
        outcomes = on_one_set({index: run.outcomes[variant] for index, (run, variant, _) in enumerate(found)})
        for (run, variant, tokens), changes, outcome in zip(found, changed, outcomes.values(), strict=True):
            title = run.task.describe() + (f"; {changes}" if changes else "")
            panel = drawn.setdefault(run.workdir, (title, run.task.trained_on.longest, {}))
            panel[2][variant] = tokens[:, layer].max(1), outcome.accuracy
        table = tables.initial_memory(found)
        whose = "the last layer" if layer == -1 else f"layer {layer}"
        what = f"longest memory in {whose} at the start (tokens)"
        figure = figures.draw_initial_memory(list(drawn.values()), what, outcome.shown_as, _message(table))
        report.add_figure(self.part, figure, "initial-memory", "Every seed's outcome, by how far back it remembers")
        report.add_table(self.part, table, "initial-memory-table")


def _message(table: tables.Table) -> str:
    """With how many variants those seeds converge that remember furthest, over all layers; or, if of each variant all seeds
    or none converge, which."""
    chances = [(row["all: probability"], row["all: p"]) for row in table.raw]
    tested = [(chance, p) for chance, p in chances if np.isfinite(chance)]
    if not tested:
        all_converge = [row["num_converged"] == row["num_seeds"] for row in table.raw]
        none, every = all_converge.count(False), all_converge.count(True)
        if not none:
            return "Every seed converges, however far back it remembers at the start"
        if not every:
            return "No seed converges, however far back it remembers at the start"
        return (
            f"Variants of which every seed converges: {every}; of which none does, whatever the initial memory: {none}"
        )
    longer = sum(chance > 0.5 and p < 0.05 for chance, p in tested)
    return f"Seeds that remember further back at the start converge more often (p < 0.05): {longer} of {len(tested)} variants"
