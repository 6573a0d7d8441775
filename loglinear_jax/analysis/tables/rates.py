"""Tables of a run that trained its variants at several learning rates or weight decays: which rate is best, and how narrow the
window of good ones is."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import Float

from loglinear_jax.analysis.labels import describe_run
from loglinear_jax.analysis.tables.table import Table, signed, with_interval
from loglinear_jax.config import SWEPT, variant_config
from loglinear_jax.runs.loading import Run
from loglinear_jax.runs.outcome import VariantOutcome, on_one_set
from loglinear_jax.statistics import cross_fit, cross_fit_difference, cross_fit_interval, mean_interval
from loglinear_jax.tasks import CONVERGED_ACCURACY, Score

GOOD = 0.9  # of the best mean: what counts as within the window


CROSS_FITTED = (
    "The best rate is chosen on one half of the seeds and reported on the other, and the reverse, so every seed counts once, "
    "at a rate that was chosen without it. Both rates are shown where the halves choose different ones. Intervals of means are "
    "bootstrapped over seeds, with the choice made again in each resample, from 10 seeds on."
)


@dataclasses.dataclass(frozen=True)
class AtRate:
    """A variant's outcome at one learning rate and weight decay. variant: its name, rates included."""

    variant: str
    learning_rate: float
    weight_decay: float
    outcome: VariantOutcome


def by_rate(run: Run) -> dict[str, list[AtRate]]:
    """By variant without its rates, its outcomes at each of them, from the lowest rate on; of variants with several alone."""
    return {variant: rates for variant, rates in _by_variant(run, on_one_set(run.outcomes)).items() if len(rates) > 1}


def at_best_rates(run: Run, outcomes: Mapping[str, VariantOutcome]) -> dict[str, Float[np.ndarray, " seeds"]]:
    """By variant without its rates, what each seed has; with several rates, at the one that the other half of the seeds chose.

    outcomes: by variant, those of the run with accuracies on the set that is to be shown.
    """
    return {
        variant: chosen_rate(run.task.score, rates).shown if len(rates) > 1 else rates[0].outcome.shown
        for variant, rates in _by_variant(run, outcomes).items()
    }


def _by_variant(run: Run, outcomes: Mapping[str, VariantOutcome]) -> dict[str, list[AtRate]]:
    found: dict[str, list[AtRate]] = {}
    for variant, outcome in outcomes.items():
        train = variant_config(run.config, variant).train
        parts = [part for part in variant.split("+") if part.partition("=")[0] not in {f"train.{x}" for x in SWEPT}]
        found.setdefault("+".join(parts), []).append(AtRate(variant, train.learning_rate, train.weight_decay, outcome))
    return {
        variant: sorted(rates, key=lambda at: (at.weight_decay, at.learning_rate)) for variant, rates in found.items()
    }


def rates(run: Run) -> list[Table]:
    """(every variant at every rate, the best rate of every variant and its window); none if there is one rate alone."""
    variants = by_rate(run)
    if not variants:
        return []
    shown_as = next(iter(variants.values()))[0].outcome.shown_as
    decays = len({at.weight_decay for group in variants.values() for at in group}) > 1
    return [_at_every_rate(run, variants, shown_as, decays), _best_rates(run, variants, shown_as, decays)]


def _at_every_rate(run: Run, variants: dict[str, list[AtRate]], shown_as: str, decays: bool) -> Table:
    rows, raw = [], []
    for variant, group in variants.items():
        for at in group:
            mean, low, high = mean_interval(at.outcome.shown)
            row = {"variant": variant, "rate": name_of(at, decays), "seeds": str(len(at.outcome.seeds))}
            row["mean [95 % interval]"] = with_interval(mean, low, high)
            number = {"variant": variant, "learning_rate": at.learning_rate, "weight_decay": at.weight_decay}
            number |= {"num_seeds": len(at.outcome.seeds), "mean": mean, "low": low, "high": high}
            if run.task.score.thresholds:
                share_low, share_high = at.outcome.share_converged_interval
                share = f"{at.outcome.share_converged:.2f} [{share_low:.2f}, {share_high:.2f}]"
                row[f"share ≥ {CONVERGED_ACCURACY:.0%} [95 % interval]"] = share
                number["share_converged"] = at.outcome.share_converged
            if any(other.outcome.num_diverged for others in variants.values() for other in others):
                row["diverged"] = str(at.outcome.num_diverged)
            rows.append(row)
            raw.append(number)
    note = "Intervals: of means by bootstrap over seeds, of shares Wilson's."
    return Table(f"{describe_run(run)}: {shown_as} at every rate", rows, raw, note)


def _raw_rates(chosen: Chosen) -> dict[str, float]:
    """The rates as plain numbers; twice the same if the halves agree."""
    first, other = chosen.rates[0], chosen.rates[-1]
    return {
        "learning_rate": first.learning_rate,
        "weight_decay": first.weight_decay,
        "other_learning_rate": other.learning_rate,
        "other_weight_decay": other.weight_decay,
    }


def _best_rates(run: Run, variants: dict[str, list[AtRate]], shown_as: str, decays: bool) -> Table:
    rows, raw, score = [], [], run.task.score
    for variant, group in variants.items():
        chosen = chosen_rate(score, group)
        mean, low, high = chosen_interval(score, group)
        good = within_window(score, _shown(group))
        row = {"variant": variant, "seeds": str(len(chosen.shown)), "best rate": name_of(chosen.rates, decays)}
        row["mean at it [95 % interval]"] = with_interval(mean, low, high)
        row[f"rates within {GOOD:.0%} of the best"] = f"{good.sum()} of {len(group)}: " + ", ".join(
            name_of(at, decays) for at, is_good in zip(group, good, strict=True) if is_good
        )
        windows = [at.learning_rate for at, is_good in zip(group, good, strict=True) if is_good]
        row["width of the window"] = f"{max(windows) / min(windows):.3g} times"
        rows.append(row)
        raw.append(
            {"variant": variant, "num_seeds": len(chosen.shown)}
            | _raw_rates(chosen)
            | {"mean": mean, "low": low, "high": high, "num_good": int(good.sum()), "num_rates": len(group)}
            | {"window": max(windows) / min(windows)}
        )
    note = (
        f"{CROSS_FITTED} The window: rates whose mean over all "
        f"seeds is within {GOOD:.0%} of the best mean; its width is the highest of their learning rates over the lowest."
    )
    return Table(f"{describe_run(run)}: the best rate of every variant, {shown_as}", rows, raw, note)


def differences_at_best_rates(run: Run) -> Table | None:
    """Every two variants of a run, rates aside, paired by seed at the rates that the other half of the seeds chose; None if
    there is one variant, or one rate alone."""
    variants = _by_variant(run, on_one_set(run.outcomes))
    if len(variants) < 2 or not by_rate(run):
        return None
    score, shown_as = run.task.score, next(iter(variants.values()))[0].outcome.shown_as
    what = f"{score.name} A − B" + (", points" if score.unit == "%" else "")
    rows, raw = [], []
    for a, b in itertools.combinations(variants, 2):
        mean, low, high, p = difference_at_best_rates(score, variants[a], variants[b])
        names = {"A": a, "B": b, "seeds": str(len(variants[a][0].outcome.seeds))}
        rows.append(names | {f"{what} [95 % interval]": signed(mean, low, high), "p": f"{p:.2g}" if np.isfinite(p) else "–"})
        raw.append(names | {"mean_difference": mean, "low": low, "high": high, "p": p})
    note = (
        f"Paired by seed. {CROSS_FITTED} The p-values are of flipped signs, with the choices as given (two-sided, at least "
        "0.0001 from 14 seeds on), and not corrected for the number of comparisons."
    )
    return Table(f"{describe_run(run)}: differences at the best rates, {shown_as}", rows, raw, note)


def difference_at_best_rates(
    score: Score, a: Sequence[AtRate], b: Sequence[AtRate]
) -> tuple[float, float, float, float]:
    """(mean over seeds of a - b, low, high, p) of two variants of one run, each of which may have one rate alone:
    `cross_fit_difference`."""
    return cross_fit_difference(_shown(a), _shown(b), score.higher_is_better)


def pairs_of_like_rates(run: Run, outcomes: Mapping[str, VariantOutcome]) -> list[tuple[str, str]]:
    """Every two variants, without those that differ in rate and of which one was trained at several."""
    rate_of = {}
    for group in _by_variant(run, outcomes).values():
        for at in group:
            rate_of[at.variant] = (at.learning_rate, at.weight_decay), len(group) > 1

    def alike(a: str, b: str) -> bool:
        (rate_a, several_a), (rate_b, several_b) = rate_of[a], rate_of[b]
        return rate_a == rate_b or not (several_a or several_b)

    return [pair for pair in itertools.combinations(outcomes, 2) if alike(*pair)]


class Chosen(NamedTuple):
    """rates: those that the two halves of the seeds choose, one if they agree. shown: what each seed has at the rate that the
    other half chose, in the order of the seeds; empty for one seed."""

    rates: tuple[AtRate, ...]
    shown: Float[np.ndarray, " seeds"]


def chosen_rate(score: Score, group: Sequence[AtRate]) -> Chosen:
    """The best of a variant's rates, chosen on one half of the seeds and reported on the other, and the reverse.

    Every seed counts once, at a rate that was chosen without it (`cross_fit`): nothing is selected on what is reported. It is
    the outcome of choosing with half of the seeds, not of one rate: the halves may choose different ones, and then `rates` has
    both. For the mean with an interval that holds the choice's uncertainty take `chosen_interval`, as `mean_interval(shown)`
    takes the choice as given.
    """
    (by_first, by_others), shown = cross_fit(_shown(group), score.higher_is_better)
    return Chosen(tuple(group[row] for row in dict.fromkeys((by_first, by_others))), shown)


def chosen_interval(score: Score, group: Sequence[AtRate]) -> tuple[float, float, float]:
    """(mean of `chosen_rate` over all seeds, low, high) with a bootstrap interval of 95 %, in which the rate is chosen again in
    each resample; nan where there are too few seeds."""
    return cross_fit_interval(_shown(group), score.higher_is_better)


def _shown(group: Sequence[AtRate]) -> Float[np.ndarray, "rates seeds"]:
    return np.array([at.outcome.shown for at in group])


def best_row(score: Score, shown: Float[np.ndarray, "rates seeds"]) -> int:
    """The rate with the best mean; one at which a seed has no value is worse than all others."""
    means = shown.mean(axis=1)
    worst = -np.inf if score.higher_is_better else np.inf
    means = np.where(np.isfinite(means), means, worst)
    return int(means.argmax() if score.higher_is_better else means.argmin())


def within_window(score: Score, shown: Float[np.ndarray, "rates seeds"]) -> np.ndarray:
    """Whether each rate's mean is within GOOD of the best."""
    means = shown.mean(axis=1)
    best = means[best_row(score, shown)]
    return means >= GOOD * best if score.higher_is_better else means <= best / GOOD


def name_of(at: AtRate | Sequence[AtRate], decays: bool) -> str:
    """ "0.001", or "0.001 (decay 0.1)"; of several "0.001 and 0.004"."""
    if not isinstance(at, AtRate):
        return " and ".join(name_of(each, decays) for each in at)
    return f"{at.learning_rate:g}" + (f" (decay {at.weight_decay:g})" if decays else "")
