"""Variants at several learning rates or weight decays: the best rate, chosen on other seeds than it is reported on."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import Float
from ml_collections import ConfigDict

from loglinear_jax.analysis.table import finite
from loglinear_jax.components import split_outside
from loglinear_jax.config import SWEPT
from loglinear_jax.runs.loading import Run
from loglinear_jax.runs.outcome import VariantOutcome, on_one_set
from loglinear_jax.statistics import (
    cross_fit,
    cross_fit_difference,
    cross_fit_interval,
    mean_interval,
    wilson_interval,
)
from loglinear_jax.tasks import ACCURACY, CONVERGED_ACCURACY, Score

DASHES = ("-", "--", ":", "-.")  # of weight decays in figures
RATES = frozenset(f"train.{name}" for name in SWEPT)


@dataclasses.dataclass(frozen=True)
class AtRate:
    """A variant's outcome at one learning rate and weight decay. variant: its name with them."""

    variant: str
    learning_rate: float
    weight_decay: float
    outcome: VariantOutcome


def named_rates(variant: str) -> dict[str, str]:
    """Those of RATES that a variant's name sets, with their values."""
    settings = (split_outside(part, "=") for part in split_outside(variant, "+"))
    return {name: "=".join(value) for name, *value in settings if name in RATES}


def without_rates(config: ConfigDict, variants: Iterable[str]) -> dict[str, dict[str, tuple[float, float]]]:
    """By variant without its rates, those that have one: by their names, learning rate and weight decay."""
    found: dict[str, dict[str, tuple[float, float]]] = {}
    for variant in variants:
        given = named_rates(variant)
        others = "+".join(part for part in split_outside(variant, "+") if part.partition("=")[0] not in given)
        rate, decay = (float(given.get(f"train.{name}", config.train[name])) for name in SWEPT)
        found.setdefault(others or config.model.lam, {})[variant] = rate, decay
    return found


def by_variant(run: Run, outcomes: Mapping[str, VariantOutcome] | None = None) -> dict[str, list[AtRate]]:
    """By variant without its rates, its outcomes at each of them, from the lowest rate on.

    outcomes: those of the run with accuracies on the set that is to be shown; on one set if None.
    """
    outcomes = on_one_set(run.outcomes) if outcomes is None else outcomes
    found = {}
    for name, at_rates in without_rates(run.config, outcomes).items():
        group = [AtRate(variant, rate, decay, outcomes[variant]) for variant, (rate, decay) in at_rates.items()]
        found[name] = sorted(group, key=lambda at: (at.weight_decay, at.learning_rate))
    return found


def by_rate(run: Run) -> dict[str, list[AtRate]]:
    """Group a run's outcomes by variant and learning rate, for variants with several rates."""
    return {variant: group for variant, group in by_variant(run).items() if len(group) > 1}


def several_decays(groups: Iterable[Sequence[AtRate]]) -> bool:
    return len({at.weight_decay for group in groups for at in group}) > 1


class AtBest(NamedTuple):
    """shown: what each seed has. mean, low, high: of these, with an interval of 95 %; nan where there are too few seeds."""

    shown: Float[np.ndarray, " seeds"]
    mean: float
    low: float
    high: float


def at_best(score: Score, group: Sequence[AtRate]) -> AtBest:
    """What a variant has at the rates that other halves of the seeds chose; at its only rate if there is one."""
    if len(group) > 1:
        return AtBest(chosen_rate(score, group).shown, *chosen_interval(score, group))
    shown = group[0].outcome.shown
    return AtBest(shown, *mean_interval(finite(shown)))


def at_best_of_runs(runs: Sequence[Run]) -> tuple[list[tuple[Run, dict[str, AtBest]]], str]:
    """(Each run whose score is accuracy, with its variants at their best rates; what they are, such as "test accuracy": all on
    the same set)."""
    runs = [run for run in runs if run.outcomes and run.task.score is ACCURACY]
    outcomes = on_one_set({(i, v): outcome for i, run in enumerate(runs) for v, outcome in run.outcomes.items()})
    found = []
    for index, run in enumerate(runs):
        groups = by_variant(run, {variant: outcomes[index, variant] for variant in run.outcomes})
        found.append((run, {variant: at_best(run.task.score, group) for variant, group in groups.items()}))
    return found, next((outcome.shown_as for outcome in outcomes.values()), "")


def difference_at_best_rates(
    score: Score, a: Sequence[AtRate], b: Sequence[AtRate]
) -> tuple[float, float, float, float]:
    """(mean over seeds of a - b, low, high, p) of two variants of one run, each of which may have one rate alone:
    `cross_fit_difference`."""
    return cross_fit_difference(_shown(a), _shown(b), score.higher_is_better)


def pairs_of_like_rates(run: Run, outcomes: Mapping[str, VariantOutcome]) -> list[tuple[str, str]]:
    """Every two variants, without those that differ in rate and of which one was trained at several."""
    groups = without_rates(run.config, outcomes).values()
    rate_of = {variant: (rate, len(group) > 1) for group in groups for variant, rate in group.items()}

    def alike(a: str, b: str) -> bool:
        (rate_a, several_a), (rate_b, several_b) = rate_of[a], rate_of[b]
        return rate_a == rate_b or not (several_a or several_b)

    return [pair for pair in itertools.combinations(outcomes, 2) if alike(*pair)]


class Chosen(NamedTuple):
    """rates: those that halves of the seeds choose, the most frequent first, one if they agree. shown: what each seed has on
    average at the rates that halves without it chose, in the order of the seeds; empty for one seed."""

    rates: tuple[AtRate, ...]
    shown: Float[np.ndarray, " seeds"]


def chosen_rate(score: Score, group: Sequence[AtRate]) -> Chosen:
    """The best of a variant's rates, chosen on one half of the seeds and reported on the other, and the reverse.

    Every seed counts once, at rates that were chosen without it, on average over many halvings (`cross_fit`): nothing is
    selected on what is reported. It is the outcome of choosing with half of the seeds, not of one rate: halves may choose
    different ones, and then `rates` has them all. For the mean with an interval that holds the choice's uncertainty take
    `chosen_interval`, as `mean_interval(shown)` takes the choice as given.
    """
    chosen, shown = cross_fit(_shown(group), score.higher_is_better)
    return Chosen(tuple(group[row] for row in chosen), shown)


def chosen_interval(score: Score, group: Sequence[AtRate]) -> tuple[float, float, float]:
    """(mean of `chosen_rate` over all seeds, low, high) with a bootstrap interval of 95 %, in which the rate is chosen again in
    each resample; nan where there are too few seeds."""
    return cross_fit_interval(_shown(group), score.higher_is_better)


def converged_at_chosen(chosen: Chosen) -> tuple[float, float, float]:
    """(share of the seeds that reached 90 % on average at the rates that other halves chose, low, high) with Wilson's interval,
    which takes the choice as given; nan for one seed."""
    if not len(chosen.shown):
        return np.nan, np.nan, np.nan
    reached = int((chosen.shown >= 100 * float(np.float32(CONVERGED_ACCURACY))).sum())
    return reached / len(chosen.shown), *wilson_interval(reached, len(chosen.shown))


def _shown(group: Sequence[AtRate]) -> Float[np.ndarray, "rates seeds"]:
    return np.array([at.outcome.shown for at in group])


def name_of(at: AtRate | Sequence[AtRate], decays: bool) -> str:
    """ "0.001", or "0.001 (decay 0.1)"; of several "0.001 and 0.004"."""
    if not isinstance(at, AtRate):
        return " and ".join(name_of(each, decays) for each in at)
    return f"{at.learning_rate:g}" + (f" (decay {at.weight_decay:g})" if decays else "")
