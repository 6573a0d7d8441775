"""Do trained models generalise to longer sequences? Their scores at the trained length and beyond."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float
from matplotlib.figure import Figure

from loglinear_jax.analysis import paper, style
from loglinear_jax.analysis.lam_values import Which, layers_that
from loglinear_jax.analysis.paper import describe_run
from loglinear_jax.analysis.section import Section
from loglinear_jax.analysis.table import Table, mean_and_std, mean_std_and_reached
from loglinear_jax.fenwick import num_levels
from loglinear_jax.lam import lam_traits
from loglinear_jax.runs.loading import Run, TrainedVariant
from loglinear_jax.statistics import mean_interval
from loglinear_jax.tasks import Score
from loglinear_jax.train import scored_sums

BATCH_TOKENS = 1 << 15  # of one evaluation at a time
MOST_LINES = 100  # of seeds in a figure


def lengths_to_test(trained: TrainedVariant, longest: int) -> list[int]:
    """List the lengths at which a variant is evaluated, in tokens.

    Returns:
        The trained length, its doubles, and `longest`, or the longest that λ has levels for if that is less.
    """
    limit = min(trained.model.settings.longest or longest, longest)
    lengths = [trained.task.trained_on.longest]
    while 2 * lengths[-1] <= limit:
        lengths.append(2 * lengths[-1])
    return lengths + [limit] * (limit > lengths[-1])


def with_highest_trained_level(trained: TrainedVariant) -> TrainedVariant | None:
    """Give the levels that no trained sequence reached the λ of the highest trained one.

    Returns:
        The variant with the same parameters; None where λ has no levels of its own, or is content-aware.
    """
    settings = trained.model.settings
    mixers = getattr(settings, "mixers", ())
    traits = [lam_traits(mixers[layer % len(mixers)].lam) for layer in layers_that(trained, "has_lam")]
    if not traits or any(one.needs_scores or not one.has_levels for one in traits):
        return None
    reached = trained.task.trained_on.longest + settings.random_first_position
    settings = dataclasses.replace(settings, lam_levels=num_levels(reached))
    return dataclasses.replace(trained, model=type(trained.model)(settings))


def scores_by_length(
    trained: TrainedVariant, seed: int, lengths: Sequence[int], num: int = 256, which: Which = "best"
) -> dict[str, Float[np.ndarray, " lengths"]]:
    """Evaluate one seed on sequences of each length.

    Args:
        trained: the variant.
        seed: whose parameters are taken.
        lengths: in tokens.
        num: sequences of each length, the same for every seed; for a text, as many tokens as in this many windows of
            the trained length.
        which: parameters at the seed's best evaluation, or at the end.

    Returns:
        "loss" in nats, and "accuracy" as a share of 1.

    Raises:
        ValueError: for a length that λ has no levels for; train with a larger model.max_length.
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


@dataclasses.dataclass(frozen=True)
class ByLength:
    """The scores of a variant's seeds at several lengths.

    changed: what is changed in the variant, such as "higher levels as 7".
    """

    variant: str
    lengths: Sequence[int]
    seeds: Sequence[int]
    values: Float[np.ndarray, "S N"]
    changed: str = ""

    @property
    def name(self) -> str:
        return self.variant + (f", {self.changed}" if self.changed else "")

    @property
    def shown_name(self) -> str:
        return style.describe_variant(self.variant) + (f", {self.changed}" if self.changed else "")


def draw_scores_by_length(found: Sequence[ByLength], trained: int, score: Score, subject: str) -> Figure:
    """Draw the score against the length of the evaluated sequences.

    Means are thick, and dashed where something is changed; seeds are thin, or if they are more than MOST_LINES the 95 %
    intervals of the means are shaded.

    Args:
        found: scores of the variants.
        trained: the length of the training sequences.
        score: of the task.
        subject: what the variants were trained on.
    """
    figure, ((axis,),) = style.new_figure(7.6, 4.2)
    looks, handles = style.looks_of(one.variant for one in found), {}
    many = sum(len(one.values) for one in found) > MOST_LINES
    for one in found:
        look, low, high = looks[one.variant], None, None
        if many:
            _, low, high = np.transpose([mean_interval(column) for column in one.values.T])
        else:
            alpha = max(0.15, 0.5 / len(one.values) ** 0.5)
            axis.plot(one.lengths, one.values.T, color=look.color, alpha=alpha, linewidth=0.8)
        how = dict(look._asdict(), linestyle="--", markerfacecolor="white") if one.changed else look._asdict()
        line = style.draw_line(axis, one.lengths, one.values.mean(0), low, high, linewidth=2.4, **how)
        handles[one.shown_name] = line
    axis.axvline(trained, color=style.MARK, linestyle="--", linewidth=1.2)
    at = dict(xy=(trained, 0.02), xycoords=("data", "axes fraction"), xytext=(3, 0), textcoords="offset points")
    axis.annotate("trained", color=style.MARK, **at)
    style.length_axis(axis, [n for one in found for n in one.lengths])
    unit = f" ({score.unit})" if score.unit else ""
    axis.set(xlabel="length of the evaluated sequences (tokens)", ylabel=score.name + unit)
    if score.unit == "%":
        axis.set_ylim(0, 102)
    style.finish(figure, f"{_two_best(found, trained, score)}\ntrained on {subject}", handles)
    return figure


def _two_best(found: Sequence[ByLength], trained: int, score: Score) -> str:
    """Where all can be compared: at the longest length that every variant has."""
    longest = min(max(one.lengths) for one in found)
    worst = -np.inf if score.higher_is_better else np.inf
    means = [np.nan_to_num(one.values[:, list(one.lengths).index(longest)].mean(), nan=worst) for one in found]
    order = (
        np.argsort(means, kind="stable") if not score.higher_is_better else np.argsort(-np.array(means), kind="stable")
    )
    best = [f"{found[i].shown_name.removeprefix('λ: ')} ({score.text(float(means[i]))})" for i in order[:2]]
    return f"Best {score.name} at {longest:,} tokens, {longest // trained} times the trained length: {', then '.join(best)}"


def lengths_table(run: Run, found: Sequence[ByLength]) -> Table:
    """Tabulate the mean ± standard deviation over seeds at every length, a row for each variant.

    Returns:
        The table; its CSV has every seed.
    """
    score, rows, long = run.task.score, [], []
    for one in found:
        row = {"variant": one.name, "seeds": str(len(one.seeds))}
        for length, column in zip(one.lengths, one.values.T, strict=True):
            [cell] = [mean_std_and_reached(column, 100 * t) for t in score.thresholds[:1]] or [mean_and_std(column)]
            row[f"length {length}"] = cell
        if run.task.seq_len == 128 and run.config.task.name == "mqar":
            row["the paper at 256 (pairs not given)"] = str(paper.MQAR_FROM_128_TO_256.get(one.name, "–"))
        rows.append(row)
        for seed, of_seed in zip(one.seeds, one.values, strict=True):
            names = {"variant": one.name, "seed": seed}
            long += [names | {"length": n, score.name: float(x)} for n, x in zip(one.lengths, of_seed, strict=True)]
    reached = "".join(f" (seeds at ≥ {100 * t:.0f} %)" for t in score.thresholds[:1])
    title = f"{f'{score.name} {score.unit}'.strip()}, mean ± std over seeds{reached}"
    return Table(title, rows, of=describe_run(run), long=long)


class Lengths(Section):
    """The section `lengths`: every seed of the variants that can read more than they were trained on.

    A λ with levels of its own is also shown with its untrained levels replaced (`with_highest_trained_level`).
    """

    NAME = "lengths"
    TITLE = "Length generalisation"
    READS_CHECKPOINTS = True

    def find(self, run: Run, trained: TrainedVariant) -> list[ByLength] | None:
        """Returns the scores of the variant, and of the one with its higher levels replaced."""
        longest = self.context.choices.longest or trained.model.settings.max_length
        if len(lengths_to_test(trained, longest)) < 2:
            return None
        found = [self._scores(trained, longest)]
        if (extended := with_highest_trained_level(trained)) is not None:
            highest = extended.model.settings.lam_levels - 1
            found.append(self._scores(extended, longest, f"higher levels as {highest}"))
        return found

    def _scores(self, trained: TrainedVariant, longest: int, changed: str = "") -> ByLength:
        context, choices, lengths = self.context, self.context.choices, lengths_to_test(trained, longest)

        def compute(seed: int) -> dict[str, np.ndarray]:
            return scores_by_length(trained, seed, lengths, choices.evaluated, choices.which)

        found = context.over_seeds(trained, "lengths", context.averaged_seeds(trained), compute)
        shown = np.array([trained.task.score.of(x["loss"], x["accuracy"]) for x in found.values()])
        return ByLength(trained.variant, lengths, list(found), shown, changed)

    def show_run(self, run: Run, found: dict[str, list[ByLength]]) -> None:
        every = [one for of_variant in found.values() for one in of_variant]
        figure = draw_scores_by_length(every, run.task.trained_on.longest, run.task.score, describe_run(run))
        self.add(figure, "lengths", run, "longer sequences")
        self.add(lengths_table(run, every), "lengths-table", run)
