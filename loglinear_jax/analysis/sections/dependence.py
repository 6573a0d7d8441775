"""How input-dependent is λ? Its variation over tokens, in a table and by level."""

from __future__ import annotations

import hashlib

import numpy as np

from loglinear_jax.analysis import figures, tables
from loglinear_jax.analysis.labels import describe_run, describe_variant
from loglinear_jax.analysis.lam_values import input_dependence, relative_variation
from loglinear_jax.analysis.sections.base import Context, Section
from loglinear_jax.runs.loading import Run, TrainedVariant
from loglinear_jax.tasks import CONVERGED_ACCURACY


class Dependence(Section):
    """From λ of all sequences, of every seed."""

    READS_CHECKPOINTS = True

    def __init__(self, context: Context):
        super().__init__(context)
        self.part = context.report.part("How input-dependent is λ?")
        self._found: dict[str, dict[int, dict]] = {}
        self._converged: dict[str, dict[int, bool]] = {}
        self._accuracy = ""

    def add_variant(self, run: Run, trained: TrainedVariant) -> None:
        if not trained.model.settings.has_lam:
            return
        with self.context.attempt(run.workdir, f"{trained.variant}: variation of λ"):
            seeds = self.context.averaged_seeds(trained)
            found = dependence_of(self.context, trained, seeds)
            accuracy, self._accuracy = self.context.accuracy(run, trained)
            self._found[trained.variant] = found
            self._converged[trained.variant] = {seed: bool(accuracy[seed] >= CONVERGED_ACCURACY) for seed in found}

    def finish_run(self, run: Run) -> None:
        found, converged = self._found, self._converged
        self._found, self._converged = {}, {}
        context, report = self.context, self.context.report
        with context.attempt(run.workdir, "variation of λ"):
            if not found:
                return
            subject = f"{describe_run(run)}: variation of λ"
            table = tables.dependence(found, converged, self._accuracy, subject)
            report.add_table(
                self.part, table, context.stem(run, "lam-dependence"), context.titled(run, "variation of λ")
            )
            figure = figures.draw_dependence(found, _message(found), describe_run(run))
            title = context.titled(run, "variation of λ by level")
            report.add_figure(self.part, figure, context.stem(run, "lam-variation"), title)


def dependence_of(context: Context, trained: TrainedVariant, seeds: list[int]) -> dict[int, dict[str, np.ndarray]]:
    """`input_dependence` of these seeds over the report's sequences."""
    tokens, _ = context.sequences(trained)
    roles, num_roles = trained.task.roles(tokens), len(trained.task.ROLES)

    def compute(seed: int) -> dict[str, np.ndarray]:
        return input_dependence(context.lam_of(trained, seed), roles, num_roles)

    sample = hashlib.sha256(np.ascontiguousarray([tokens, roles]).tobytes()).hexdigest()[:16]
    return context.over_seeds(trained, "dependence", {"sample": sample}, seeds, compute)


def _message(found: dict[str, dict[int, dict]]) -> str:
    variation = {
        variant: np.mean([relative_variation(of_seed)[0] for of_seed in seeds.values()])
        for variant, seeds in found.items()
    }
    shown = [f"{describe_variant(variant)} {100 * value:.0f} %" for variant, value in variation.items()]
    return f"Variation of λ over tokens, relative to its mean: {', '.join(shown)}"
