"""Tables of a run that trained its variants at several learning rates or weight decays: which rate is best, how narrow the
window of good ones is, and how variants differ at their best rates."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import Float
from ml_collections import ConfigDict

from loglinear_jax.analysis.labels import describe_run
from loglinear_jax.analysis.tables.table import Table
from loglinear_jax.config import SWEPT
from loglinear_jax.runs.cells import finite, num_finite, num_seeds, percent, share_converged, short_p, with_interval
from loglinear_jax.runs.loading import Run
from loglinear_jax.runs.outcome import VariantOutcome, on_one_set
from loglinear_jax.statistics import (
    FEWEST_FOR_INTERVAL,
    RESAMPLES,
    cross_fit,
    cross_fit_difference,
    cross_fit_interval,
    few_seeds,
    mean_difference,
    mean_interval,
    wilson_interval,
)
from loglinear_jax.tasks import ACCURACY, CONVERGED_ACCURACY, Score

RATES = frozenset(f"train.{name}" for name in SWEPT)
GOOD = 0.9  # of the mean at the best rate: what counts as within the window
# From how many seeds a few are drawn, and what they are held against: the largest gain of log-linear over one state in Guo et
# al.'s Table 2, MQAR at width 16: 55.9 against 46.9 (Mamba-2), five seeds each, as third parties quote it.
FEWEST_TO_DRAW_FROM = 16
PUBLISHED_GAIN = 9.0
SHARE = f"share ≥ {CONVERGED_ACCURACY:.0%} [95 % interval]"
CROSS_FITTED = (
    "The best rate is chosen on one half of the seeds and reported on the other, and the reverse, so every seed counts once, "
    "at a rate that was chosen without it. Both rates are shown where the halves choose different ones. Intervals of means are "
    "bootstrapped over seeds, with the choice made again in each resample, from 10 seeds on."
)


@dataclasses.dataclass(frozen=True)
class AtRate:
    """A variant's outcome at one learning rate and weight decay. variant: its name with them."""

    variant: str
    learning_rate: float
    weight_decay: float
    outcome: VariantOutcome


def by_variant(run: Run) -> dict[str, list[AtRate]]:
    """By variant without its rates, its outcomes at each of them, from the lowest rate on."""
    return _by_variant(run, on_one_set(run.outcomes))


def by_rate(run: Run) -> dict[str, list[AtRate]]:
    """`by_variant`, of variants with several rates alone."""
    return {variant: rates for variant, rates in by_variant(run).items() if len(rates) > 1}


class AtBest(NamedTuple):
    """shown: what each seed has. mean, low, high: of these, with an interval of 95 %; nan where there are too few seeds."""

    shown: Float[np.ndarray, " seeds"]
    mean: float
    low: float
    high: float


def at_best_rates(run: Run, outcomes: Mapping[str, VariantOutcome]) -> dict[str, AtBest]:
    """By variant without its rates, `at_best`.

    outcomes: by variant, those of the run with accuracies on the set that is to be shown.
    """
    return {variant: at_best(run.task.score, rates) for variant, rates in _by_variant(run, outcomes).items()}


def at_best(score: Score, group: Sequence[AtRate]) -> AtBest:
    """What a variant has at the rate that the other half of the seeds chose; at its only rate if there is one."""
    if len(group) > 1:
        return AtBest(chosen_rate(score, group).shown, *chosen_interval(score, group))
    shown = group[0].outcome.shown
    return AtBest(shown, *mean_interval(finite(shown)))


def at_best_of_runs(runs: Sequence[Run]) -> tuple[list[tuple[Run, dict[str, AtBest]]], str]:
    """(Each run whose score is accuracy, with its variants at their best rates; what they are, such as "test accuracy": of all
    on the same set)."""
    runs = [run for run in runs if run.outcomes and run.task.score is ACCURACY]
    outcomes = on_one_set({(i, v): outcome for i, run in enumerate(runs) for v, outcome in run.outcomes.items()})
    found = []
    for index, run in enumerate(runs):
        own = {variant: outcome for (i, variant), outcome in outcomes.items() if i == index}
        found.append((run, at_best_rates(run, own)))
    return found, next((outcome.shown_as for outcome in outcomes.values()), "")


def named_rates(variant: str) -> dict[str, str]:
    """Those of RATES that a variant's name sets, with their values."""
    settings = (part.partition("=") for part in variant.split("+"))
    return {name: value for name, _, value in settings if name in RATES}


def without_rates(config: ConfigDict, variants: Iterable[str]) -> dict[str, dict[str, tuple[float, float]]]:
    """By variant without its rates, those that have one: by their names, learning rate and weight decay."""
    found: dict[str, dict[str, tuple[float, float]]] = {}
    for variant in variants:
        given = named_rates(variant)
        others = "+".join(part for part in variant.split("+") if part.partition("=")[0] not in given)
        rate, decay = (float(given.get(f"train.{name}", config.train[name])) for name in SWEPT)
        found.setdefault(others or config.model.lam, {})[variant] = rate, decay
    return found


def _by_variant(run: Run, outcomes: Mapping[str, VariantOutcome]) -> dict[str, list[AtRate]]:
    return {
        name: sorted(
            (AtRate(variant, rate, decay, outcomes[variant]) for variant, (rate, decay) in at_rates.items()),
            key=lambda at: (at.weight_decay, at.learning_rate),
        )
        for name, at_rates in without_rates(run.config, outcomes).items()
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
            mean, low, high = mean_interval(finite(at.outcome.shown))
            row = {"variant": variant, "rate": name_of(at, decays), "seeds": num_seeds(at.outcome)}
            row["mean [95 % interval]"] = with_interval(mean, low, high)
            number = {"variant": variant, "learning_rate": at.learning_rate, "weight_decay": at.weight_decay}
            number |= {"num_seeds": len(at.outcome.seeds), "mean": mean, "low": low, "high": high}
            if run.task.score.thresholds:
                row[SHARE] = share_converged(at.outcome)
                number |= {"share_converged": at.outcome.share_converged}
                number |= dict(zip(("share_low", "share_high"), at.outcome.share_converged_interval, strict=True))
            if any(other.outcome.num_diverged for others in variants.values() for other in others):
                row["diverged"] = str(at.outcome.num_diverged)
            rows.append(row)
            raw.append(number)
    note = "Intervals: of means by bootstrap over seeds, of shares Wilson's."
    return Table(f"{shown_as} at every rate", rows, raw, note, describe_run(run))


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
    chance = chance_of(score, variants)
    for variant, group in variants.items():
        chosen = chosen_rate(score, group)
        mean, low, high = chosen_interval(score, group)
        windows = windows_of_rates(score, group, chance)
        row = {"variant": variant, "seeds": num_finite(chosen.shown), "best rate": name_of(chosen.rates, decays)}
        row["mean at it [95 % interval]"] = with_interval(mean, low, high)
        share = {}
        if score.thresholds:
            share = dict(zip(("share_converged", "share_low", "share_high"), converged_at_chosen(chosen), strict=True))
            row[SHARE] = "–" if np.isnan(share["share_low"]) else "{:.2f} [{:.2f}, {:.2f}]".format(*share.values())
        row[f"rates within {GOOD:.0%} of the best"] = _either(
            f"{len(w.rates)} of {w.tried}: {w.span(decays)}" for w in windows
        )
        row["highest of them / lowest"] = _either(f"{'≥ ' * w.at_edge}{w.width:.3g}" for w in windows)
        rows.append(row)
        raw.append(
            {"variant": variant, "num_seeds": len(chosen.shown)}
            | _raw_rates(chosen)
            | {"mean": mean, "low": low, "high": high}
            | share
            | _raw_windows(windows)
        )
    shares = " Those of shares are Wilson's, with the choice as given." if score.thresholds else ""
    note = (
        f"{CROSS_FITTED}{shares} The window: rates next to the best one, without a gap, whose mean is within {GOOD:.0%} of the "
        "mean there, at the same weight decay. One half of the seeds chooses the best rate and the other half has the means; "
        "both windows are shown where they differ. The highest of its rates over the lowest is its width, ≥ where the window "
        f"ends with the rates tried. {_describe_chance(score, chance)}"
    )
    return Table(f"the best rate of every variant, {shown_as}", rows, raw, note, describe_run(run))


def differences_at_best_rates(run: Run) -> Table | None:
    """Every two variants of a run, rates aside, paired by seed at the rates that the other half of the seeds chose; None if
    there is one variant, or one rate alone."""
    variants = by_variant(run)
    if len(variants) < 2 or not by_rate(run):
        return None
    score, shown_as = run.task.score, next(iter(variants.values()))[0].outcome.shown_as
    what = f"{score.name} A − B" + (", points" if score.unit == "%" else "")
    rows, raw = [], []
    for a, b in itertools.combinations(variants, 2):
        mean, low, high, p = difference_at_best_rates(score, variants[a], variants[b])
        names = {"A": a, "B": b, "seeds": str(len(variants[a][0].outcome.seeds))}
        rows.append(
            names
            | {
                f"{what} [95 % interval]": with_interval(mean, low, high, digits=2, sign="+"),
                "p": short_p(p, 2) if np.isfinite(p) else "–",
            }
        )
        raw.append(names | {"mean_difference": mean, "low": low, "high": high, "p": p})
    note = (
        f"Paired by seed. {CROSS_FITTED} The p-values are of flipped signs (two-sided, from 14 seeds on at least 1/10,001), "
        "with the choices as given, so they are too small where the halves choose different rates: the interval counts there. "
        "They are not corrected for the number of comparisons."
    )
    if any(np.isnan(row["mean_difference"]) for row in raw):
        note += f" No difference (–) is given where a seed has no {score.name} at a rate that it reports, or there is one seed."
    return Table(f"differences at the best rates, {shown_as}", rows, raw, note, describe_run(run))


def few_seeds_table(run: Run, num: int = 5, published: float | None = None) -> Table | None:
    """For every two variants of a run with FEWEST_TO_DRAW_FROM seeds or more, rates aside, what a comparison of `num` seeds
    would find; None for a run with fewer seeds, or one variant.

    published: a difference that is given as a gain, and how often so few seeds show one as large in either direction; for
    accuracies PUBLISHED_GAIN if None.
    """
    outcomes = on_one_set(run.outcomes)
    at_best = at_best_rates(run, outcomes)
    shown = {v: x.shown for v, x in at_best.items() if np.isfinite(x.shown).all()}
    if len(shown) < 2 or min(map(len, shown.values())) < FEWEST_TO_DRAW_FROM:
        return None
    score, points = run.task.score, ", points" if run.task.score.unit == "%" else ""
    if published is None and score is ACCURACY:
        published = PUBLISHED_GAIN
    groups, rows, raw = _by_variant(run, outcomes), [], []
    for a, b in itertools.combinations(shown, 2):
        if len(groups[a]) == len(groups[b]) == 1:  # as in the table of differences
            mean, low, high = mean_difference(shown[a], shown[b])
        else:
            mean, low, high, _ = difference_at_best_rates(score, groups[a], groups[b])
        each, same = (few_seeds(shown[a], shown[b], num, paired, published) for paired in (False, True))
        names = {"A": a, "B": b, "seeds": str(len(shown[a]))}
        row = names | {
            f"{score.name} A − B of all{points} [95 % interval]": with_interval(mean, low, high, digits=2, sign="+")
        }
        row[f"{num} seeds each: 95 % of A − B"] = f"{each.low:+.2f} to {each.high:+.2f}"
        row[f"{num} each: right sign, wrong sign"] = _percents(each.right, each.wrong)
        row[f"the same {num}: right sign, wrong sign"] = _percents(same.right, same.wrong)
        number = names | {"mean_difference": mean, "low": low, "high": high, "num_drawn": num}
        number |= {f"each_{name}": x for name, x in each._asdict().items() if name != "as_large"}
        number |= {f"same_{name}": x for name, x in same._asdict().items() if name != "as_large"}
        if published is not None:
            behind = few_seeds(shown[a], shown[b], num, published=-published).as_large
            row[f"{num} each: A, B ahead by ≥ {published:.1f}"] = _percents(each.as_large, behind)
            number |= {"published": published, "a_ahead_as_far": each.as_large, "b_ahead_as_far": behind}
        rows.append(row)
        raw.append(number)
    note = (
        f"{RESAMPLES:,} comparisons of {num} seeds of each variant, drawn with replacement from all of them. The right sign is "
        "that of the difference of all seeds, which is itself not known where its interval has 0 inside. Learning rates, where "
        "there are several, are those that the other half of all seeds chose: a study that chooses them by few seeds sees less."
    )
    if left_out := [variant for variant in at_best if variant not in shown]:
        note += f" Not shown, as a seed has no {score.name} there: {', '.join(left_out)}."
    if published == PUBLISHED_GAIN:
        note += (
            f" {PUBLISHED_GAIN:.1f} points: the largest gain of log-linear over one state in Guo et al.'s Table 2 (Mamba-2, "
            "width 16), of five seeds, as third parties quote it."
        )
    return Table(f"what {num} seeds would tell, {groups[a][0].outcome.shown_as}", rows, raw, note, describe_run(run))


def _percents(*shares: float) -> str:
    return ", ".join("–" if np.isnan(share) else percent(share) for share in shares)


def difference_at_best_rates(
    score: Score, a: Sequence[AtRate], b: Sequence[AtRate]
) -> tuple[float, float, float, float]:
    """(mean over seeds of a - b, low, high, p) of two variants of one run, each of which may have one rate alone:
    `cross_fit_difference`."""
    return cross_fit_difference(_shown(a), _shown(b), score.higher_is_better)


def pairs_of_like_rates(run: Run, outcomes: Mapping[str, VariantOutcome]) -> list[tuple[str, str]]:
    """Every two variants, without those that differ in rate and of which one was trained at several."""
    rate_of = {
        variant: (rate, len(at_rates) > 1)
        for at_rates in without_rates(run.config, outcomes).values()
        for variant, rate in at_rates.items()
    }

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


def converged_at_chosen(chosen: Chosen) -> tuple[float, float, float]:
    """(share of the seeds that reached 90 % at the rate that the other half chose, low, high) with Wilson's interval, which
    takes the choice as given; nan for one seed."""
    if not len(chosen.shown):
        return np.nan, np.nan, np.nan
    reached = int((chosen.shown >= 100 * float(np.float32(CONVERGED_ACCURACY))).sum())
    return reached / len(chosen.shown), *wilson_interval(reached, len(chosen.shown))


def _shown(group: Sequence[AtRate]) -> Float[np.ndarray, "rates seeds"]:
    return np.array([at.outcome.shown for at in group])


@dataclasses.dataclass(frozen=True)
class Window:
    """The rates around the best one that are nearly as good, from the lowest on. tried: how many rates there are at this weight
    decay. at_edge: whether the window ends with them, so that it may be wider."""

    rates: tuple[AtRate, ...]
    tried: int
    at_edge: bool

    @property
    def width(self) -> float:
        """The highest learning rate over the lowest."""
        return self.rates[-1].learning_rate / self.rates[0].learning_rate

    def span(self, decays: bool) -> str:
        """ "0.001 to 0.004", or "0.001 to 0.004 (decay 0.1)"; of one rate "0.001"."""
        first = "" if len(self.rates) == 1 else f"{self.rates[0].learning_rate:g} to "
        return first + name_of(self.rates[-1], decays)


def windows_of_rates(score: Score, group: Sequence[AtRate], chance: float) -> tuple[Window, ...]:
    """The window of rates within GOOD of the best, once for each half of the seeds that chooses the best; none unless the mean
    at the best is clearly better than chance (`chosen_interval` beyond it).

    One half chooses the best rate, the other half has the means: of the rates around the best, and of the best itself, to which
    they are compared. The best mean of the half that chooses would be too good a reference, and the window too narrow: of six
    equally good rates at which half of 16 seeds converge, it would hold 1.5 instead of 3.2.
    """
    _, low, high = chosen_interval(score, group)
    if not (low > chance if score.higher_is_better else high < chance):  # nor if one of them is nan
        return ()
    shown = _shown(group)
    by_first, by_others = cross_fit(shown, score.higher_is_better).chosen
    return _around(score, group, by_first, shown[:, 1::2].mean(1)), _around(
        score, group, by_others, shown[:, ::2].mean(1)
    )


def _around(score: Score, group: Sequence[AtRate], best: int, means: Float[np.ndarray, " rates"]) -> Window:
    good = means >= GOOD * means[best] if score.higher_is_better else means <= means[best] / GOOD
    tried = [
        row for row, at in enumerate(group) if at.weight_decay == group[best].weight_decay
    ]  # from the lowest rate on
    low = high = tried.index(best)
    while low > 0 and good[tried[low - 1]]:
        low -= 1
    while high < len(tried) - 1 and good[tried[high + 1]]:
        high += 1
    rates = tuple(group[row] for row in tried[low : high + 1])
    return Window(rates, len(tried), at_edge=low == 0 or high == len(tried) - 1)


def chance_of(score: Score, variants: Mapping[str, Sequence[AtRate]]) -> float:
    """What a variant that learned nothing reaches at most, as no task says what chance is: the better end of the interval of
    the worst mean among all variants and rates; of accuracies at most 50 %, which is chance with two answers, as every variant
    may have learned at every rate. nan where there are too few seeds for intervals."""
    intervals = [mean_interval(finite(at.outcome.shown)) for group in variants.values() for at in group]
    intervals = [interval for interval in intervals if np.isfinite(interval).all()]
    if not intervals:
        return np.nan
    return min(min(intervals)[2], 50.0) if score.higher_is_better else max(intervals)[1]


def _describe_chance(score: Score, chance: float) -> str:
    if np.isnan(chance):
        return f"With fewer than {FEWEST_FOR_INTERVAL} seeds there is no interval, and no window is given."
    if score.higher_is_better:
        beyond, end = f"not above {score.text(chance)}", "upper end of that of the worst mean here, or 50 %"
    else:
        beyond, end = f"not below {score.text(chance)}", "lower end of that of the worst mean here"
    return f"No window (–) is given where the best rate is not clearly better than chance: its interval is {beyond}, the {end}."


def _either(of_windows: Iterable[str]) -> str:
    """One text if both windows have the same, both if not, – for none."""
    return "; ".join(dict.fromkeys(of_windows)) or "–"


def _raw_windows(windows: Sequence[Window]) -> dict[str, float | int | None]:
    """As plain numbers; empty where there is no window."""
    found: dict[str, float | int | None] = {}
    for prefix, window in zip(("", "other_"), windows or (None, None), strict=True):
        found |= {
            f"{prefix}window_low": window and window.rates[0].learning_rate,
            f"{prefix}window_high": window and window.rates[-1].learning_rate,
            f"{prefix}window_decay": window and window.rates[0].weight_decay,
            f"{prefix}num_good": window and len(window.rates),
            f"{prefix}num_rates": window and window.tried,
            f"{prefix}window_at_edge": window and window.at_edge,
        }
    return found


def name_of(at: AtRate | Sequence[AtRate], decays: bool) -> str:
    """ "0.001", or "0.001 (decay 0.1)"; of several "0.001 and 0.004"."""
    if not isinstance(at, AtRate):
        return " and ".join(name_of(each, decays) for each in at)
    return f"{at.learning_rate:g}" + (f" (decay {at.weight_decay:g})" if decays else "")
