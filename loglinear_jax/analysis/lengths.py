"""Do trained models generalise to longer sequences? Their scores at the trained length and beyond."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Literal

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float
from matplotlib.figure import Figure

from loglinear_jax.analysis import paper, style
from loglinear_jax.analysis.cells import mean_and_std, mean_std_and_reached
from loglinear_jax.analysis.experiments import describe_run
from loglinear_jax.analysis.section import Section
from loglinear_jax.analysis.table import Table
from loglinear_jax.evaluate import Span
from loglinear_jax.fenwick import num_levels
from loglinear_jax.lam import lam_traits
from loglinear_jax.runs.loading import Run, TrainedVariant
from loglinear_jax.statistics import mean_interval
from loglinear_jax.tasks import Score
from loglinear_jax.train import scored_sums

BATCH_TOKENS = 1 << 15  # of one evaluation at a time
MOST_LINES = 100  # of seeds in a figure


def lengths_to_test(trained: TrainedVariant, longest: int) -> list[int]:
    """The trained length, its doubles, and `longest` itself, or the longest that λ has levels for (model.max_length)."""
    limit = min(trained.model.settings.longest or longest, longest)
    lengths = [trained.task.trained_on.longest]
    while 2 * lengths[-1] <= limit:
        lengths.append(2 * lengths[-1])
    return lengths + [limit] * (limit > lengths[-1])


def with_highest_trained_level(trained: TrainedVariant) -> TrainedVariant | None:
    """The same parameters, with every level that no trained sequence reached taking the λ of the highest that one did.

    None where λ has no levels of its own, or looks into its buckets.
    """
    settings = trained.model.settings
    if not settings.has_lam:
        return None
    traits = lam_traits(settings.mixers[0].lam)
    if traits.needs_scores or not traits.has_levels:
        return None
    settings = dataclasses.replace(settings, lam_levels=num_levels(trained.task.trained_on.longest))
    return dataclasses.replace(trained, model=type(trained.model)(settings))


def scores_by_length(
    trained: TrainedVariant,
    seed: int,
    lengths: Sequence[int],
    num: int = 256,
    which: Literal["best", "last"] = "best",
) -> dict[str, Float[np.ndarray, " lengths"]]:
    """{"loss": nats, "accuracy": share} of one seed on `num` sequences of each length, the same for every seed. Of a text, as
    many tokens at each length as `num` windows of the trained length have.

    Raises ValueError for a length for which λ has no levels: train with a larger model.max_length.
    """
    longest = trained.model.settings.longest
    if longest is not None and max(lengths) > longest:
        raise ValueError(
            f"lengths={list(lengths)}: λ of {trained.variant} has levels for {longest} tokens; train with a larger "
            "model.max_length"
        )
    params, score = trained.params(seed, which), _scores(trained.model)
    result = np.zeros((2, len(lengths)))
    for index, length in enumerate(lengths):
        tokens, targets = trained.inspection_sequences(num, length)
        size = max(BATCH_TOKENS // length, 1)
        sums = np.zeros(3)
        for first in range(0, len(tokens), size):
            batch = tuple(jnp.asarray(x[first : first + size]) for x in (tokens, targets))
            sums += np.asarray(jax.device_get(score(params, batch)), np.float64)
        result[:, index] = sums[:2] / sums[2]
    return {"loss": result[0], "accuracy": result[1]}


@functools.cache
def _scores(model: nn.Module):
    return jax.jit(lambda params, batch: scored_sums(model, params, batch))


def draw_scores_by_length(
    by_variant: Mapping[str, tuple[Sequence[int], Float[np.ndarray, "S N"]]], trained: int, score: Score, subject: str
) -> Figure:
    """The score against the length of the evaluated sequences: means thick; seeds thin, or where they are more than MOST_LINES
    the means' 95 % intervals shaded.

    by_variant: (lengths [N], shown values of the score [S, N] of the seeds), by the variant; after a comma what is changed in
    it, which is dashed. trained: the length of the training sequences. subject: what they were trained on.
    """
    figure, ((axis,),) = style.new_figure(7.6, 4.2)
    looks = style.looks_of(dict.fromkeys(_unchanged(variant) for variant in by_variant))
    many = sum(len(values) for _, values in by_variant.values()) > MOST_LINES
    for variant, (lengths, values) in by_variant.items():
        (color, marker), dashed = looks[_unchanged(variant)], variant != _unchanged(variant)
        if many:
            _, low, high = np.transpose([mean_interval(column) for column in values.T])
            axis.fill_between(lengths, low, high, color=color, alpha=0.2, linewidth=0)
        else:
            axis.plot(lengths, values.T, color=color, alpha=max(0.15, 0.5 / len(values) ** 0.5), linewidth=0.8)
        axis.plot(
            lengths, values.mean(0), color=color, linewidth=2.4, marker=marker, label=style.describe_variant(variant),
            linestyle="--" if dashed else "-", markerfacecolor="white" if dashed else color,
        )  # fmt: skip
    axis.axvline(trained, color=style.MARK, linestyle="--", linewidth=1.2)
    axis.annotate(
        "trained", (trained, 0.02), xycoords=("data", "axes fraction"), xytext=(3, 0), textcoords="offset points",
        color=style.MARK,
    )  # fmt: skip
    style.length_axis(axis, [n for lengths, _ in by_variant.values() for n in lengths])
    unit = f" ({score.unit})" if score.unit else ""
    axis.set(xlabel="length of the evaluated sequences (tokens)", ylabel=score.name + unit)
    if score.unit == "%":
        axis.set_ylim(0, 102)
    style.legend_below(figure, style.handles_of(axis))
    style.title(figure, f"{_two_best(by_variant, trained, score)}\ntrained on {subject}")
    style.open_frame(axis)
    return figure


def _unchanged(variant: str) -> str:
    """Without what is changed in it: of "fixed, higher levels as 7" "fixed"."""
    return variant.partition(", ")[0]


def _two_best(by_variant: Mapping[str, tuple[Sequence[int], np.ndarray]], trained: int, score: Score) -> str:
    """Where all can be compared: at the longest length that every variant has."""
    longest = min(max(lengths) for lengths, _ in by_variant.values())
    at_longest = {variant: values[:, list(lengths).index(longest)] for variant, (lengths, values) in by_variant.items()}
    worst = -np.inf if score.higher_is_better else np.inf
    means = {variant: float(np.nan_to_num(values.mean(), nan=worst)) for variant, values in at_longest.items()}
    best = sorted(means, key=means.get, reverse=score.higher_is_better)[:2]
    shown = ", then ".join(
        f"{style.describe_variant(variant).removeprefix('λ: ')} ({score.text(means[variant])})" for variant in best
    )
    return f"Best {score.name} at {longest:,} tokens, {longest // trained} times the trained length: {shown}"


def draw_perplexity_by_position(spans: Sequence[Span], subject: str) -> Figure:
    """Perplexity of each span of positions at its middle on the logarithmic axis, with its interval. subject: in the title."""
    figure, ((axis,),) = style.new_figure(7.6, 4.2)
    middles = [(span.first * span.last) ** 0.5 for span in spans]
    low, high = ([getattr(span, name) for span in spans] for name in ("low", "high"))
    axis.fill_between(middles, low, high, alpha=0.2, linewidth=0)
    axis.plot(middles, [span.perplexity for span in spans], marker="o", linewidth=2)
    axis.set(xlabel="position (tokens)", ylabel="perplexity", xscale="log", yscale="log")
    for direction in (axis.xaxis, axis.yaxis):
        style.log_ticks(direction)
    style.open_frame(axis)
    shown = " Shaded: 95 % interval over windows." if np.isfinite(low).any() else ""
    style.title(figure, f"Perplexity by position: {subject}.{shown}")
    return figure


Found = dict[str, tuple[list[int], list[int], np.ndarray]]  # variant -> lengths [N], seeds [S], shown values [S, N]


class Lengths(Section):
    """Of every seed, for the variants that can read more than they were trained on; λ with levels of their own also with those
    that were not trained taking the λ of the highest that was."""

    NAME = "lengths"
    TITLE = "Length generalisation"
    READS_CHECKPOINTS = True

    def find(self, run: Run, trained: TrainedVariant) -> Found | None:
        """Of the variant, and of one with its higher levels replaced."""
        longest = self.context.choices.longest or run.config.model.max_length or run.task.max_seq_len
        lengths = lengths_to_test(trained, longest)
        if len(lengths) < 2:
            return None
        found = {trained.variant: self._scores(trained, lengths)}
        extended = with_highest_trained_level(trained)
        if extended is not None:
            highest = extended.model.settings.lam_levels - 1
            lengths = lengths_to_test(extended, longest)
            found[f"{trained.variant}, higher levels as {highest}"] = self._scores(extended, lengths)
        return found

    def _scores(self, trained: TrainedVariant, lengths: list[int]) -> tuple[list[int], list[int], np.ndarray]:
        context, choices = self.context, self.context.choices

        def compute(seed: int) -> dict[str, np.ndarray]:
            return scores_by_length(trained, seed, lengths, choices.evaluated, choices.which)

        key = {"lengths": lengths, "sequences": choices.evaluated, "lam_levels": trained.model.settings.lam_levels}
        found = context.over_seeds(trained, "lengths", key, context.averaged_seeds(trained), compute)
        shown = [trained.task.score.of(x["loss"], x["accuracy"]) for x in found.values()]
        return lengths, list(found), np.array(shown)

    def show_run(self, run: Run, found: dict[str, Found]) -> None:
        every = {variant: scores for of_variant in found.values() for variant, scores in of_variant.items()}
        drawn = {variant: (lengths, values) for variant, (lengths, _, values) in every.items()}
        figure = draw_scores_by_length(drawn, run.task.trained_on.longest, run.task.score, describe_run(run))
        self.add(figure, "lengths", run, "longer sequences")
        self.add(lengths_table(run, every), "lengths-table", run)


def lengths_table(run: Run, found: Found) -> Table:
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
