"""λ itself: over the tokens of a sequence, its mean by head and level, and what it has learned apart from its input."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import numpy as np
from matplotlib.figure import Figure

from loglinear_jax.analysis.figures import Panel, draw_lam_by_head, draw_lam_over_tokens
from loglinear_jax.analysis.html import Part, slug
from loglinear_jax.analysis.labels import describe_run, describe_variant, sentence
from loglinear_jax.analysis.lam_values import static_lam
from loglinear_jax.analysis.sections.base import Context, Section
from loglinear_jax.analysis.sections.dependence import dependence_of
from loglinear_jax.fenwick import occupied_levels
from loglinear_jax.lam import lam_traits
from loglinear_jax.runs.loading import Run, TrainedVariant

MANY_ROWS = 12  # layers · heads from which each variant has a figure of its own
STATIC_NOTE = (
    "For linear (the paper's baseline): the weights Λ, as the paper's figures show; otherwise λ where its input is 0. A λ that "
    "looks into its buckets has no such part."
)


@dataclasses.dataclass
class Kind:
    """One kind of figure. panels: of a variant, one a seed, none if it has no such thing; rows: those of one run; of_runs: of
    all runs, by variant."""

    what: str
    stem: str
    part: Part
    panels: Callable[[TrainedVariant], list[Panel]]
    draw: Callable[[list[list[Panel]], str], Figure]
    rows: list[list[Panel]] = dataclasses.field(default_factory=list)
    of_runs: dict[str, list[tuple[Run, list[Panel]]]] = dataclasses.field(default_factory=dict)
    note: str = ""


class Lam(Section):
    """Heatmaps of a few seeds of every variant with λ."""

    READS_CHECKPOINTS = True

    def __init__(self, context: Context):
        super().__init__(context)
        over_tokens = context.report.part("λ over tokens")
        by_head = context.report.part("λ by head and level")
        self.kinds = [
            Kind(
                "λ over the tokens of one sequence", "lam-tokens", over_tokens, self._over_tokens, draw_lam_over_tokens
            ),
            Kind("mean of λ where the level is used", "lam-mean", by_head, self._means, draw_lam_by_head),
            Kind("static part of λ", "lam-static", by_head, self._static, draw_lam_by_head, note=STATIC_NOTE),
        ]

    def add_variant(self, run: Run, trained: TrainedVariant) -> None:
        if not trained.model.settings.has_lam:
            return
        for kind in self.kinds:
            with self.context.attempt(run.workdir, f"{trained.variant}: {kind.what}"):
                panels = kind.panels(trained)
                if not panels:
                    continue
                kind.rows.append(panels)
                kind.of_runs.setdefault(trained.variant, []).append((run, panels))

    def finish_run(self, run: Run) -> None:
        context, report = self.context, self.context.report
        for kind in self.kinds:
            rows, kind.rows = kind.rows, []
            if not rows:
                continue
            with context.attempt(run.workdir, kind.what):
                of_heads = [np.prod(panel.values.shape[:2]) for row in rows for panel in row]
                large = kind.draw is draw_lam_by_head and max(of_heads) > MANY_ROWS
                for index, some in enumerate([[row] for row in rows] if large else [rows]):
                    figure = kind.draw(some, f"{sentence(kind.what)}; {describe_run(run)}")
                    stem = context.stem(run, kind.stem + (f"-{index + 1}" if large else ""))
                    title = context.titled(run, kind.what) + (f", {index + 1} of {len(rows)}" if large else "")
                    report.add_figure(kind.part, figure, stem, title, kind.note)

    def finish(self) -> None:
        """Runs below each other, seeds beside each other, for each variant that several runs have."""
        for kind in self.kinds[:2]:
            for variant, of_runs in kind.of_runs.items():
                if len(of_runs) < 2:
                    continue
                with self.context.attempt("all runs", f"{variant}: {kind.what}"):
                    rows = [
                        [dataclasses.replace(p, title=f"{describe_run(run)}\n{p.title}") for p in panels]
                        for run, panels in of_runs
                    ]
                    figure = kind.draw(rows, f"{describe_variant(variant)}: {kind.what}")
                    title = f"All runs: {kind.what}, {describe_variant(variant)}"
                    stem = f"all-runs-{kind.stem}-{slug(variant)}"
                    self.context.report.add_figure(kind.part, figure, stem, title)

    def _over_tokens(self, trained: TrainedVariant) -> list[Panel]:
        """λ [levels, positions] of one example at the chosen layer and head, for each seed to draw."""
        context = self.context
        layer, head = context.layer_and_head(trained)
        panels = []
        for seed in context.drawn_seeds(trained):
            lam = context.mixer_values(trained, seed)[layer]["lam_value"][context.choices.example, :, head]
            title = f"{self._titled(trained, seed)}; layer {layer}, head {head}"
            panels.append(
                Panel(lam.T, title, occupied_levels(np.arange(lam.shape[0]), lam.shape[1]).T, trained.task.marks())
            )
        return panels

    def _means(self, trained: TrainedVariant) -> list[Panel]:
        found = dependence_of(self.context, trained, self.context.drawn_seeds(trained))
        return [Panel(of_seed["mean"], self._titled(trained, seed)) for seed, of_seed in found.items()]

    def _static(self, trained: TrainedVariant) -> list[Panel]:
        """None for a λ that looks into its buckets."""
        if lam_traits(trained.model.settings.lam).needs_scores:
            return []
        panels = []
        for seed in self.context.drawn_seeds(trained):
            values, what = static_lam(trained, seed, self.context.choices.which)
            panels.append(Panel(values, f"{what}\n{self._titled(trained, seed)}"))
        return panels

    def _titled(self, trained: TrainedVariant, seed: int) -> str:
        return f"{describe_variant(trained.variant)}; {self.context.describe_seed(trained, seed)}"
