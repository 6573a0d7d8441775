"""Whether λ finds the answers: how often it is largest at the bucket that holds them."""

from __future__ import annotations

import hashlib

import numpy as np

from loglinear_jax.analysis import figures, tables
from loglinear_jax.analysis.answer_levels import levels_of_answers
from loglinear_jax.analysis.labels import describe_run, describe_variant
from loglinear_jax.analysis.looks import best_heads, found_by_position, looks_at_answers
from loglinear_jax.analysis.sections.base import Context, Section
from loglinear_jax.runs.loading import Run, TrainedVariant

SEEN = 1024  # sequences of which the rule by position knows


class Looks(Section):
    """From λ at the queries of all sequences, of every seed; for tasks that say where their answers stand."""

    READS_CHECKPOINTS = True

    def __init__(self, context: Context):
        super().__init__(context)
        self.part = context.report.part(
            "Does λ find the answers?",
            "At each query one bucket holds the token that is to be output. Here is how often λ is largest at that bucket, and "
            "how often a rule would be right that sees the query's position alone.",
        )
        self._found: dict[str, dict[int, dict]] = {}
        self._accuracy: dict[str, dict[int, float]] = {}
        self._accuracy_is = ""

    def add_variant(self, run: Run, trained: TrainedVariant) -> None:
        if not trained.model.settings.has_lam:
            return
        context = self.context
        with context.attempt(run.workdir, f"{trained.variant}: whether λ finds the answers"):
            tokens, targets = context.sequences(trained)
            levels = levels_of_answers(trained.task, tokens, targets)
            if levels is None:
                return

            def compute(seed: int) -> dict[str, np.ndarray]:
                return looks_at_answers(context.lam_of(trained, seed), levels)

            sample = hashlib.sha256(np.ascontiguousarray([tokens, levels]).tobytes()).hexdigest()[:16]
            seeds = context.averaged_seeds(trained)
            found = context.over_seeds(trained, "looks", {"sample": sample}, seeds, compute)
            self._accuracy[trained.variant], self._accuracy_is = context.accuracy(run, trained)
            self._found[trained.variant] = found

    def finish_run(self, run: Run) -> None:
        found, accuracy = self._found, self._accuracy
        self._found, self._accuracy = {}, {}
        context, report = self.context, self.context.report
        if not found:
            return
        with context.attempt(run.workdir, "whether λ finds the answers"):
            title = context.titled(run, "answers at the largest λ")
            by_position = _found_by_position(context, run)
            drawn = {}
            for variant, seeds in found.items():
                finite, best = best_heads(seeds)
                if finite:
                    drawn[variant] = best["largest"], np.array([accuracy[variant][seed] for seed in finite])
            if drawn:
                message = f"{_message(drawn, by_position)}\n{describe_run(run)}"
                figure = figures.draw_looks(drawn, by_position, self._accuracy_is, message)
                report.add_figure(self.part, figure, context.stem(run, "looks"), title)
            table = tables.looks(found, accuracy, by_position, f"{describe_run(run)}: answers at the largest λ")
            report.add_table(self.part, table, context.stem(run, "looks-table"), title)


def _found_by_position(context: Context, run: Run) -> float:
    """Over the report's sequences; the rule has seen others."""
    num = context.choices.sequences
    tokens, targets = run.task.inspection_sequences(num + SEEN)
    levels = levels_of_answers(run.task, tokens, targets)
    return found_by_position(levels[:num], levels[num:])


def _message(drawn: dict[str, tuple[np.ndarray, np.ndarray]], by_position: float) -> str:
    """Of each variant the layer that finds the most answers, on average over seeds."""
    most = {variant: 100 * share.mean(0).max() for variant, (share, _) in drawn.items()}
    shown = [f"{describe_variant(variant).removeprefix('λ: ')} {share:.0f} %" for variant, share in most.items()]
    return f"Answers at the largest λ: {', '.join(shown)}; a rule by position alone {100 * by_position:.0f} %"
