"""What a head draws on: rows of the attention matrix."""

from __future__ import annotations

import numpy as np

from loglinear_jax.analysis.answer_levels import answer_places
from loglinear_jax.analysis.attention_rows import row_of_values
from loglinear_jax.analysis.figures import draw_attention_rows
from loglinear_jax.analysis.html import slug
from loglinear_jax.analysis.labels import describe_run, describe_variant
from loglinear_jax.analysis.sections.base import Context, Section
from loglinear_jax.runs.loading import Run, TrainedVariant


class AttentionRows(Section):
    """Of every variant with states the best of the seeds that are drawn."""

    READS_CHECKPOINTS = True

    def __init__(self, context: Context):
        super().__init__(context)
        self.part = context.report.part(
            "What a head draws on",
            "One row of the attention matrix: the weight λ · decay · (q · k) that a position gives to the value of each "
            "earlier token, by the Fenwick bucket that the token lies in; with the delta rule, λ · β · (q · "
            "what later tokens have left of k). Diamonds: where the right answer stands; in a "
            "task that does not say, every earlier place of its token. Triangle: the position.",
        )

    def add_variant(self, run: Run, trained: TrainedVariant) -> None:
        if trained.model.settings.has_states:
            with self.context.attempt(run.workdir, f"{trained.variant}: what a head draws on"):
                self._draw(run, trained)

    def _draw(self, run: Run, trained: TrainedVariant) -> None:
        context, choices, task = self.context, self.context.choices, trained.task
        tokens, targets = (x[choices.example] for x in context.sequences(trained))
        layer, head = context.layer_and_head(trained)
        seed = self._best_seed(trained)
        values = context.mixer_values(trained, seed)[layer]
        scored = np.flatnonzero(targets >= 0)
        positions = choices.positions or [int(scored[i]) for i in (0, len(scored) // 2, len(scored) - 1)]
        roles = task.roles(tokens[None])[0]
        rows = []
        for position in dict.fromkeys(positions):
            row = row_of_values(values, trained.model.settings, head, position, choices.example)
            if not np.isfinite(row.weight).all():
                raise ValueError(f"seed {seed}: weights are not finite")
            at = row.position
            pointed = answer_places(task, tokens, targets, at)
            title = f"position {at}, {task.ROLES[roles[at]]} (token {task.shown(tokens[at])})"
            if targets[at] >= 0:
                title += f", to predict: {task.shown(targets[at])}"
            if len(pointed):
                share = np.abs(row.weight[pointed]).sum() / max(np.abs(row.weight).sum(), 1e-30)
                title += f"; {100 * share:.0f} % of Σ |weight| where the answer stands"
            rows.append((row, title, pointed))
        message = (
            f"{describe_variant(trained.variant)}; {context.describe_seed(trained, seed)}; {describe_run(run)}; layer {layer}, "
            f"head {head}"
        )
        figure = draw_attention_rows(rows, task.marks(), len(tokens), message)
        stem = context.stem(run, f"rows-{slug(trained.variant)}")
        title = context.titled(run, describe_variant(trained.variant))
        context.report.add_figure(self.part, figure, stem, title)

    def _best_seed(self, trained: TrainedVariant) -> int:
        score = trained.task.score
        accuracy, loss = trained.scores(self.context.choices.which)
        shown = dict(zip(trained.seeds, score.of(loss, accuracy), strict=True))
        worst = -np.inf if score.higher_is_better else np.inf
        best = max if score.higher_is_better else min
        return best(self.context.drawn_seeds(trained), key=lambda seed: np.nan_to_num(shown[seed], nan=worst))
