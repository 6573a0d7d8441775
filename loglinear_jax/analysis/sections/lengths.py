"""Length generalisation: trained variants on sequences longer than those they were trained on."""

from __future__ import annotations

import numpy as np

from loglinear_jax.analysis import figures, paper
from loglinear_jax.analysis.labels import describe_run
from loglinear_jax.analysis.lengths import lengths_to_test, scores_by_length, with_highest_trained_level
from loglinear_jax.analysis.sections.base import Context, Section
from loglinear_jax.analysis.tables import Table
from loglinear_jax.runs.cells import mean_and_std, mean_std_and_reached
from loglinear_jax.runs.loading import Run, TrainedVariant

Found = dict[str, tuple[list[int], list[int], np.ndarray]]  # variant -> lengths [N], seeds [S], shown values [S, N]


class Lengths(Section):
    """Of every seed, for the variants that can read more than they were trained on; λ with levels of their own also with those
    that were not trained taking the λ of the highest that was."""

    READS_CHECKPOINTS = True

    def __init__(self, context: Context):
        super().__init__(context)
        self.part = context.report.part("Length generalisation")
        self._found: Found = {}

    def add_variant(self, run: Run, trained: TrainedVariant) -> None:
        with self.context.attempt(run.workdir, f"{trained.variant}: longer sequences"):
            longest = self.context.choices.longest or run.config.model.max_length or run.task.max_seq_len
            self._add(trained, trained.variant, longest)
            extended = with_highest_trained_level(trained)
            if extended is not None:
                highest = extended.model.settings.lam_levels - 1
                self._add(extended, f"{trained.variant}, higher levels as {highest}", longest)

    def _add(self, trained: TrainedVariant, shown_as: str, longest: int) -> None:
        context, choices = self.context, self.context.choices
        lengths = lengths_to_test(trained, longest)
        if len(lengths) < 2:
            return

        def compute(seed: int) -> dict[str, np.ndarray]:
            return scores_by_length(trained, seed, lengths, choices.evaluated, choices.which)

        key = {"lengths": lengths, "sequences": choices.evaluated, "lam_levels": trained.model.settings.lam_levels}
        found = context.over_seeds(trained, "lengths", key, context.averaged_seeds(trained), compute)
        shown = [trained.task.score.of(x["loss"], x["accuracy"]) for x in found.values()]
        self._found[shown_as] = lengths, list(found), np.array(shown)

    def finish_run(self, run: Run) -> None:
        found, self._found = self._found, {}
        if not found:
            return
        context, report = self.context, self.context.report
        with context.attempt(run.workdir, "longer sequences"):
            drawn = {variant: (lengths, values) for variant, (lengths, _, values) in found.items()}
            figure = figures.draw_scores_by_length(
                drawn, run.task.trained_on.longest, run.task.score, describe_run(run)
            )
            title = context.titled(run, "longer sequences")
            report.add_figure(self.part, figure, context.stem(run, "lengths"), title)
            table = _table(run, found)
            report.add_table(self.part, table, context.stem(run, "lengths-table"), context.titled(run, table.title))


def _table(run: Run, found: Found) -> Table:
    score, rows, raw = run.task.score, [], []
    for variant, (lengths, seeds, values) in found.items():
        row = {"variant": variant, "seeds": str(len(seeds))}
        for length, column in zip(lengths, values.T, strict=True):
            [cell] = [mean_std_and_reached(column, 100 * t) for t in score.thresholds[:1]] or [mean_and_std(column)]
            row[f"length {length}"] = cell
        if run.task.seq_len == 128 and run.config.task.name == "mqar":
            row["the paper at 256 (pairs not given)"] = str(paper.MQAR_FROM_128_TO_256.get(variant, "–"))
        rows.append(row)
        raw += [
            {"variant": variant, "seed": seed, "length": n, score.name: float(x)}
            for seed, of_seed in zip(seeds, values, strict=True)
            for n, x in zip(lengths, of_seed, strict=True)
        ]
    name = f"{score.name} {score.unit}".strip()
    what = "".join(
        [f"{name}, mean ± std over seeds", *(f" (seeds at ≥ {100 * t:.0f} %)" for t in score.thresholds[:1])]
    )
    return Table(what, rows, raw, of=describe_run(run))
