"""Which learning rate is best? Every variant at every rate, the best of them, chosen on other seeds than it is reported on, and
what differs at the best rates."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FixedLocator, NullFormatter
from ml_collections import ConfigDict

from loglinear_jax.analysis import style
from loglinear_jax.analysis import table as cells
from loglinear_jax.analysis.paper import describe_run
from loglinear_jax.analysis.section import Section
from loglinear_jax.analysis.table import Cell, Table
from loglinear_jax.components import split_outside
from loglinear_jax.config import SWEPT
from loglinear_jax.runs.loading import Run
from loglinear_jax.runs.outcome import VariantOutcome, on_one_set, shared_seeds
from loglinear_jax.statistics import (
    FEWEST_FOR_INTERVAL,
    cross_fit,
    cross_fit_difference,
    cross_fit_interval,
    mean_interval,
    wilson_interval,
)
from loglinear_jax.tasks import CONVERGED_ACCURACY, Score

DASHES = ("-", "--", ":", "-.")  # of weight decays in figures
RATES = frozenset(f"train.{name}" for name in SWEPT)
MEAN, SHARE = "mean [95 % interval]", f"share ≥ {CONVERGED_ACCURACY:.0%} [95 % interval]"
CROSS_FITTED = (
    "The best rate is chosen on one half of the seeds and reported on the other, and the reverse, so every seed counts once, "
    "at a rate that was chosen without it. Both rates are shown where the halves choose different ones. Intervals of means are "
    "bootstrapped over seeds, with the choice made again in each resample, from 10 seeds on."
)


# --- Variants and their rates -----------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class AtRate:
    """A variant's outcome at one learning rate and weight decay; `variant` is its name with them."""

    variant: str
    learning_rate: float
    weight_decay: float
    outcome: VariantOutcome


def named_rates(variant: str) -> dict[str, str]:
    """Lists those of RATES that a variant's name sets, with their values."""
    settings = (split_outside(part, "=") for part in split_outside(variant, "+"))
    return {name: "=".join(value) for name, *value in settings if name in RATES}


def without_rates(config: ConfigDict, variants: Iterable[str]) -> dict[str, dict[str, tuple[float, float]]]:
    """Group variants that differ in their rates only.

    Returns:
        By the name without rates, and then by variant, (learning rate, weight decay).
    """
    found: dict[str, dict[str, tuple[float, float]]] = {}
    for variant in variants:
        given = named_rates(variant)
        others = "+".join(part for part in split_outside(variant, "+") if part.partition("=")[0] not in given)
        rate, decay = (float(given.get(f"train.{name}", config.train[name])) for name in SWEPT)
        found.setdefault(others or config.model.lam, {})[variant] = rate, decay
    return found


def by_variant(run: Run, outcomes: Mapping[str, VariantOutcome] | None = None) -> dict[str, list[AtRate]]:
    """Group a run's outcomes by variant without its rates.

    Args:
        run: with finished variants.
        outcomes: those of the run with accuracies on the set that is to be shown; None: on one set.

    Returns:
        For each variant its outcomes, from the lowest rate on.
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
    """Tells whether there is more than one weight decay among groups of outcomes."""
    return len({at.weight_decay for group in groups for at in group}) > 1


def name_of(at: AtRate | Sequence[AtRate], decays: bool) -> str:
    """Formats a rate: "0.001", or "0.001 (decay 0.1)"; several as "0.001 and 0.004"."""
    if not isinstance(at, AtRate):
        return " and ".join(name_of(each, decays) for each in at)
    return f"{at.learning_rate:g}" + (f" (decay {at.weight_decay:g})" if decays else "")


def pairs_of_like_rates(run: Run, outcomes: Mapping[str, VariantOutcome]) -> list[tuple[str, str]]:
    """Lists every two variants, except those that differ in rate and of which one was trained at several."""
    groups = without_rates(run.config, outcomes).values()
    rate_of = {variant: (rate, len(group) > 1) for group in groups for variant, rate in group.items()}

    def alike(a: str, b: str) -> bool:
        (rate_a, several_a), (rate_b, several_b) = rate_of[a], rate_of[b]
        return rate_a == rate_b or not (several_a or several_b)

    return [pair for pair in itertools.combinations(outcomes, 2) if alike(*pair)]


# --- The best of them -------------------------------------------------------------------------------------------------


class Chosen(NamedTuple):
    """What a variant has at its best rates, where halves of the seeds choose for each other.

    rates: those chosen, the most frequent first, one if the halves agree. shown: what each seed has on average at the rates
    that halves without it chose, in the order of the seeds. mean, low, high: over all seeds, with a bootstrap interval of 95 %
    in which the rate is chosen again in each resample; nan where there are too few seeds.
    """

    rates: tuple[AtRate, ...]
    shown: Float[np.ndarray, " seeds"]
    mean: float
    low: float
    high: float


def chosen_rate(score: Score, group: Sequence[AtRate]) -> Chosen:
    """Choose the best of a variant's rates on one half of the seeds, report it on the other, and the reverse.

    Every seed counts once, at rates that were chosen without it, on average over many halvings (`cross_fit`): no seed
    both chooses and is reported. The result is that of choosing with half of the seeds, not of one rate.

    Args:
        score: of the task.
        group: the variant's outcomes, as `by_variant` gives them.

    Returns:
        The choice; for a variant with a single rate, its values there. With several rates and one seed there is nothing
        to report.
    """
    values = _shown(group, shared_seeds(at.outcome for at in group))
    if len(group) == 1:
        return Chosen(tuple(group), values[0], *mean_interval(cells.finite(values[0])))
    rows, shown = cross_fit(values, score.higher_is_better)
    return Chosen(tuple(group[row] for row in rows), shown, *cross_fit_interval(values, score.higher_is_better))


def difference_at_best_rates(
    score: Score, a: Sequence[AtRate], b: Sequence[AtRate]
) -> tuple[float, float, float, float]:
    """Compare two variants of one run at the rates that other halves of the seeds chose; each may have one rate alone.

    Returns:
        (mean over seeds of a - b, low, high, p), as `cross_fit_difference`.
    """
    seeds = shared_seeds(at.outcome for at in (*a, *b))
    return cross_fit_difference(_shown(a, seeds), _shown(b, seeds), score.higher_is_better)


def _shown(group: Sequence[AtRate], seeds: Sequence[int]) -> Float[np.ndarray, "rates seeds"]:
    return np.array([at.outcome.of_seeds(seeds).shown for at in group])


# --- Tables and the figure of a run; None if it has one rate alone ----------------------------------------------------


def every_rate(run: Run) -> Table | None:
    """Tabulates every variant at every rate; None for a run without several rates."""
    variants, rows = by_rate(run), []
    every = [at for group in variants.values() for at in group]
    for variant, at in ((variant, at) for variant, group in variants.items() for at in group):
        rate = {"learning_rate": at.learning_rate, "weight_decay": at.weight_decay}
        name = name_of(at, several_decays(variants.values()))
        row = {"variant": variant, "rate": Cell(name, **rate)}
        row["seeds"] = cells.num_seeds(at.outcome)
        row[MEAN] = cells.mean_with_interval(cells.finite(at.outcome.shown))
        if run.task.score.thresholds:
            row[SHARE] = cells.share_converged(at.outcome)
        if any(other.outcome.num_diverged for other in every):
            row["diverged"] = str(at.outcome.num_diverged)
        rows.append(row)
    note = "Intervals: of means by bootstrap over seeds, of shares Wilson's."
    return Table(f"{every[0].outcome.shown_as} at every rate", rows, note, describe_run(run)) if rows else None


def best_rates_table(run: Run) -> Table | None:
    """Tabulates the best rate of every variant; None for a run without several rates."""
    variants, score, rows = by_rate(run), run.task.score, []
    for variant, group in variants.items():
        rates, shown, *interval = chosen_rate(score, group)
        numbers = {
            f"{prefix}{name}": getattr(rate, name)  # twice the same if the halves agree
            for prefix, rate in (("", rates[0]), ("other_", rates[-1]))
            for name in ("learning_rate", "weight_decay")
        }
        row = {"variant": variant, "seeds": cells.num_finite(shown)}
        row["best rate"] = Cell(name_of(rates, several_decays(variants.values())), **numbers)
        row["mean at it [95 % interval]"] = cells.with_interval(*interval)
        if score.thresholds:
            num = int((shown >= 100 * float(np.float32(CONVERGED_ACCURACY))).sum())
            share, low, high = (num / len(shown), *wilson_interval(num, len(shown))) if len(shown) else (np.nan,) * 3
            text = f"{share:.2f} [{low:.2f}, {high:.2f}]" if len(shown) else "–"
            row[SHARE] = Cell(text, share_converged=share, share_low=low, share_high=high)
        rows.append(row)
    if not rows:
        return None
    shares = " Those of shares are Wilson's, with the choice as given." if score.thresholds else ""
    title = f"the best rate of every variant, {next(iter(variants.values()))[0].outcome.shown_as}"
    return Table(title, rows, f"{CROSS_FITTED}{shares}", describe_run(run))


def differences_at_best_rates(run: Run) -> Table | None:
    """Tabulate the differences between every two variants, rates aside, paired by seed at the best rates.

    Returns:
        The table; None for one variant, or a run without several rates.
    """
    variants, score = by_variant(run), run.task.score
    if len(variants) < 2 or not by_rate(run):
        return None
    first, rows = next(iter(variants.values()))[0].outcome, []
    what = f"{score.name} A − B" + (", points" if score.unit == "%" else "")
    for a, b in itertools.combinations(variants, 2):
        *difference, p = difference_at_best_rates(score, variants[a], variants[b])
        row = {"A": a, "B": b, "seeds": str(len(shared_seeds(at.outcome for at in (*variants[a], *variants[b]))))}
        row[f"{what} [95 % interval]"] = cells.with_interval(*difference, digits=2, sign="+", name="mean_difference")
        rows.append(row | {"p": Cell(cells.short_p(p, 2), p=p)})
    note = (
        f"Paired by seed. {CROSS_FITTED} The p-values are of flipped signs (two-sided, from 14 seeds on at least 1/10,001), "
        "with the choices as given, so they are too small where the halves choose different rates: the interval counts there. "
        "They are not corrected for the number of comparisons."
    )
    if any(row[f"{what} [95 % interval]"] == "–" for row in rows):
        note += f" No difference (–) is given where a seed has no {score.name} at a rate that it reports, or there is one seed."
    return Table(f"differences at the best rates, {first.shown_as}", rows, note, describe_run(run))


def draw_rates(run: Run) -> Figure | None:
    """Draw the mean over seeds against the learning rate, and beside it the share of seeds that reach 90 %.

    Returns:
        A figure with a line for each variant and weight decay, 95 % intervals of the means shaded; None for a run
        without several rates, or without a finite score.
    """
    variants = by_rate(run)
    every = [at for group in variants.values() for at in group]
    if not any(len(cells.finite(at.outcome.shown)) for at in every):
        return None
    score, first = run.task.score, every[0].outcome
    labels = [first.shown_as + (f" ({score.unit})" if score.unit else "")]
    labels += [f"seeds at ≥ {100 * CONVERGED_ACCURACY:.0f} % (%)"] * bool(score.thresholds)
    figure, (axes,) = style.new_figure(7.6 if len(labels) == 1 else style.FULL_WIDTH, 4.0, 1, len(labels))
    dashes = dict(zip(sorted({at.weight_decay for at in every}), DASHES * len(every), strict=False))
    handles: dict[str, Any] = {}
    for variant, look in style.looks_of(variants).items():
        handles[style.describe_variant(variant)] = Line2D([], [], markersize=5, linewidth=1.8, **look._asdict())
        for decay, dash in dashes.items():
            group = [at for at in variants[variant] if at.weight_decay == decay]
            rates = [at.learning_rate for at in group]
            means = np.array([mean_interval(cells.finite(at.outcome.shown)) for at in group]).reshape(-1, 3)
            style.draw_line(axes[0], rates, *means.T, linestyle=dash, **look._asdict())
            # Shares without their intervals, which are wide: those of several variants would hide each other.
            for axis in axes[1:]:
                shares = [100 * at.outcome.share_converged for at in group]
                style.draw_line(axis, rates, shares, linestyle=dash, **look._asdict())
    rates = sorted({at.learning_rate for at in every})
    numbered = rates[:: -(-len(rates) // (12 // len(labels)))]  # as many as there is room for
    for axis, label in zip(axes, labels, strict=True):
        axis.set(xlabel="learning rate", ylabel=label, xscale="log")
        axis.xaxis.set_major_locator(FixedLocator(numbered))
        axis.xaxis.set_minor_locator(FixedLocator([rate for rate in rates if rate not in numbered]))
        axis.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
        axis.xaxis.set_minor_formatter(NullFormatter())
        for tick in axis.get_xticklabels():
            tick.set(rotation=45, ha="right", rotation_mode="anchor", fontsize=9)
        if score.metric != "loss":
            axis.set_ylim(-2, 102)
    if score.metric == "loss":
        axes[0].set_yscale("log")
        style.log_ticks(axes[0].yaxis)
    for decay, dash in dashes.items() if len(dashes) > 1 else ():
        handles[f"weight decay {decay:g}"] = Line2D([], [], color="0.35", linewidth=1.8, linestyle=dash)
    seeds = len(first.seeds)
    shaded = ", shaded: 95 % interval of the mean" if seeds >= FEWEST_FOR_INTERVAL else ""
    lacking = sum(len(at.outcome.shown) - len(cells.finite(at.outcome.shown)) for at in every)
    left_out = f", without {lacking} that have no finite {score.name}" if lacking else ""
    counted = f"{seeds} seed{'s' * (seeds > 1)} at each rate{left_out}"
    style.finish(figure, f"Every variant at every learning rate\n{describe_run(run)}; {counted}{shaded}", handles)
    return figure


class Rates(Section):
    """The section `rates`, from the summaries of runs with several learning rates or weight decays."""

    NAME = "rates"
    TITLE = "Learning rates"

    def show_run(self, run: Run, found: dict[str, Any]) -> None:
        self.add(draw_rates(run), "rates", run, "learning rates")
        tables = {
            "rates-table": every_rate,
            "best-rates": best_rates_table,
            "best-differences": differences_at_best_rates,
        }
        for name, make in tables.items():
            self.add(make(run), name, run)
