"""Tables of a run that trained its variants at several learning rates or weight decays: which rate is best, and how narrow the
window of good ones is."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

import numpy as np
from jaxtyping import Float

from loglinear_jax.analysis.labels import describe_run
from loglinear_jax.analysis.tables.table import Table
from loglinear_jax.config import SWEPT, variant_config
from loglinear_jax.runs.cells import share_converged, with_interval
from loglinear_jax.runs.loading import Run
from loglinear_jax.runs.outcome import VariantOutcome, on_one_set
from loglinear_jax.statistics import mean_interval
from loglinear_jax.tasks import CONVERGED_ACCURACY, Score

GOOD = 0.9  # of the best mean: what counts as within the window


@dataclasses.dataclass(frozen=True)
class AtRate:
    """A variant's outcome at one learning rate and weight decay."""

    learning_rate: float
    weight_decay: float
    outcome: VariantOutcome


def by_rate(run: Run) -> dict[str, list[AtRate]]:
    """By variant without its rates, its outcomes at each of them, from the lowest rate on; of variants with several alone."""
    return {variant: rates for variant, rates in _by_variant(run, on_one_set(run.outcomes)).items() if len(rates) > 1}


def at_best_rates(run: Run, outcomes: Mapping[str, VariantOutcome]) -> dict[str, Float[np.ndarray, " seeds"]]:
    """By variant without its rates, what each seed has: every seed, or at the best of several rates those that did not choose.

    outcomes: by variant, those of the run with accuracies on the set that is to be shown.
    """
    return {
        variant: chosen_rate(run.task.score, rates)[1] if len(rates) > 1 else rates[0].outcome.shown
        for variant, rates in _by_variant(run, outcomes).items()
    }


def _by_variant(run: Run, outcomes: Mapping[str, VariantOutcome]) -> dict[str, list[AtRate]]:
    found: dict[str, list[AtRate]] = {}
    for variant, outcome in outcomes.items():
        train = variant_config(run.config, variant).train
        parts = [part for part in variant.split("+") if part.partition("=")[0] not in {f"train.{x}" for x in SWEPT}]
        found.setdefault("+".join(parts), []).append(AtRate(train.learning_rate, train.weight_decay, outcome))
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
                row[f"share ≥ {CONVERGED_ACCURACY:.0%} [95 % interval]"] = share_converged(at.outcome)
                number["share_converged"] = at.outcome.share_converged
            if any(other.outcome.num_diverged for others in variants.values() for other in others):
                row["diverged"] = str(at.outcome.num_diverged)
            rows.append(row)
            raw.append(number)
    note = "Intervals: of means by bootstrap over seeds, of shares Wilson's."
    return Table(f"{shown_as} at every rate", rows, raw, note, describe_run(run))


def _best_rates(run: Run, variants: dict[str, list[AtRate]], shown_as: str, decays: bool) -> Table:
    rows, raw, score = [], [], run.task.score
    for variant, group in variants.items():
        best, others = chosen_rate(score, group)
        good = within_window(score, np.array([at.outcome.shown for at in group]))
        row = {"variant": variant, "best rate by every second seed": name_of(best, decays)}
        mean = low = high = np.nan
        if len(others):
            mean, low, high = mean_interval(others)
        row["mean of the other seeds at it [95 % interval]"] = with_interval(mean, low, high)
        row[f"rates within {GOOD:.0%} of the best"] = f"{good.sum()} of {len(group)}: " + ", ".join(
            name_of(at, decays) for at, is_good in zip(group, good, strict=True) if is_good
        )
        windows = [at.learning_rate for at, is_good in zip(group, good, strict=True) if is_good]
        row["width of the window"] = f"{max(windows) / min(windows):.3g} times"
        rows.append(row)
        raw.append(
            {"variant": variant, "learning_rate": best.learning_rate, "weight_decay": best.weight_decay}
            | {"mean": mean, "low": low, "high": high, "num_good": int(good.sum()), "num_rates": len(group)}
            | {"window": max(windows) / min(windows)}
        )
    note = (
        "The best rate is chosen on one half of the seeds and reported on the other. The window: rates whose mean over all "
        f"seeds is within {GOOD:.0%} of the best mean; its width is the highest of their learning rates over the lowest."
    )
    return Table(f"the best rate of every variant, {shown_as}", rows, raw, note, describe_run(run))


def chosen_rate(score: Score, group: Sequence[AtRate]) -> tuple[AtRate, Float[np.ndarray, " seeds"]]:
    """(the rate that is best for the first, third, fifth seed and so on; what the other seeds have at it)."""
    shown = np.array([at.outcome.shown for at in group])
    best = best_row(score, shown[:, ::2])
    return group[best], shown[best, 1::2]


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


def name_of(at: AtRate, decays: bool) -> str:
    """ "0.001", or "0.001, decay 0.1"."""
    return f"{at.learning_rate:g}" + (f", decay {at.weight_decay:g}" if decays else "")
