"""Which learning rate is best? Every variant at every rate, how narrow the window of good rates is, and what differs at the
best rates; and what a few of the seeds would have said."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FixedLocator, NullFormatter

from loglinear_jax.analysis import best_rates, style
from loglinear_jax.analysis import table as cells
from loglinear_jax.analysis.best_rates import AtRate, name_of
from loglinear_jax.analysis.experiments import describe_run
from loglinear_jax.analysis.section import Section
from loglinear_jax.analysis.table import Cell, Table
from loglinear_jax.runs.loading import Run
from loglinear_jax.statistics import FEWEST_FOR_INTERVAL, RESAMPLES, few_seeds, mean_difference, mean_interval
from loglinear_jax.tasks import ACCURACY, CONVERGED_ACCURACY, Score

# From how many seeds a few are drawn, and what they are held against: the largest gain of log-linear over one state in Guo et
# al.'s Table 2, MQAR at width 16: 55.9 against 46.9 (Mamba-2), five seeds each, as third parties quote it.
FEWEST_TO_DRAW_FROM = 16
PUBLISHED_GAIN = 9.0
MEAN, SHARE = "mean [95 % interval]", f"share ≥ {CONVERGED_ACCURACY:.0%} [95 % interval]"
CROSS_FITTED = (
    "The best rate is chosen on one half of the seeds and reported on the other, and the reverse, so every seed counts once, "
    "at a rate that was chosen without it. Both rates are shown where the halves choose different ones. Intervals of means are "
    "bootstrapped over seeds, with the choice made again in each resample, from 10 seeds on."
)
MANY_ROWS = 12  # above which a table is folded


def every_rate(run: Run) -> Table | None:
    """Every variant at every rate; None if there is one rate alone."""
    variants = best_rates.by_rate(run)
    every, decays, rows = (
        [at for group in variants.values() for at in group],
        best_rates.several_decays(variants.values()),
        [],
    )
    for variant, at in ((variant, at) for variant, group in variants.items() for at in group):
        rate = {"learning_rate": at.learning_rate, "weight_decay": at.weight_decay}
        row = {"variant": Cell(variant, variant=variant), "rate": Cell(name_of(at, decays), **rate)}
        row["seeds"] = cells.num_seeds(at.outcome)
        row[MEAN] = cells.with_interval(*mean_interval(cells.finite(at.outcome.shown)))
        if run.task.score.thresholds:
            row[SHARE] = cells.share_converged(at.outcome)
        if any(other.outcome.num_diverged for other in every):
            row["diverged"] = str(at.outcome.num_diverged)
        rows.append(row)
    note = "Intervals: of means by bootstrap over seeds, of shares Wilson's."
    return Table(f"{every[0].outcome.shown_as} at every rate", rows, note, describe_run(run)) if rows else None


def best_rates_table(run: Run) -> Table | None:
    """The best rate of every variant and its window; None if there is one rate alone."""
    variants, score = best_rates.by_rate(run), run.task.score
    if not variants:
        return None
    decays, chance, rows = best_rates.several_decays(variants.values()), best_rates.chance_of(score, variants), []
    for variant, group in variants.items():
        chosen = best_rates.chosen_rate(score, group)
        windows = best_rates.windows_of_rates(score, group, chance)
        rates = {
            f"{prefix}{name}": getattr(rate, name)  # twice the same if the halves agree
            for prefix, rate in (("", chosen.rates[0]), ("other_", chosen.rates[-1]))
            for name in ("learning_rate", "weight_decay")
        }
        row = {"variant": Cell(variant, variant=variant), "seeds": cells.num_finite(chosen.shown)}
        row["best rate"] = Cell(name_of(chosen.rates, decays), **rates)
        row["mean at it [95 % interval]"] = cells.with_interval(*best_rates.chosen_interval(score, group))
        if score.thresholds:
            share, low, high = best_rates.converged_at_chosen(chosen)
            text = "–" if np.isnan(low) else f"{share:.2f} [{low:.2f}, {high:.2f}]"
            row[SHARE] = Cell(text, share_converged=share, share_low=low, share_high=high)
        counts = dict.fromkeys(f"{len(w.rates)} of {w.tried}: {w.span(decays)}" for w in windows)
        widths = dict.fromkeys(f"{'≥ ' * w.at_edge}{w.width:.3g}" for w in windows)
        row[f"rates within {best_rates.GOOD:.0%} of the best"] = "; ".join(counts) or "–"
        row["highest of them / lowest"] = "; ".join(widths) or "–"
        rows.append(row)
    shares = " Those of shares are Wilson's, with the choice as given." if score.thresholds else ""
    note = (
        f"{CROSS_FITTED}{shares} The window: rates next to the best one, without a gap, whose mean is within "
        f"{best_rates.GOOD:.0%} of the mean there, at the same weight decay. One half of the seeds chooses the best rate and "
        "the other half has the means; both windows are shown where they differ. The highest of its rates over the lowest is "
        f"its width, ≥ where the window ends with the rates tried. {_describe_chance(score, chance)}"
    )
    shown_as = next(iter(variants.values()))[0].outcome.shown_as
    return Table(f"the best rate of every variant, {shown_as}", rows, note, describe_run(run))


def _describe_chance(score: Score, chance: float) -> str:
    if np.isnan(chance):
        return f"With fewer than {FEWEST_FOR_INTERVAL} seeds there is no interval, and no window is given."
    beyond, end = f"not below {score.text(chance)}", "lower end of that of the worst mean here"
    if score.higher_is_better:
        beyond, end = f"not above {score.text(chance)}", "upper end of that of the worst mean here, or 50 %"
    return f"No window (–) is given where the best rate is not clearly better than chance: its interval is {beyond}, the {end}."


def differences_at_best_rates(run: Run) -> Table | None:
    """Every two variants of a run, rates aside, paired by seed at the rates that the other half of the seeds chose; None if
    there is one variant, or one rate alone."""
    variants, score = best_rates.by_variant(run), run.task.score
    if len(variants) < 2 or not best_rates.by_rate(run):
        return None
    first, rows = next(iter(variants.values()))[0].outcome, []
    what = f"{score.name} A − B" + (", points" if score.unit == "%" else "")
    for a, b in itertools.combinations(variants, 2):
        *difference, p = best_rates.difference_at_best_rates(score, variants[a], variants[b])
        names = {"A": a, "B": b, "seeds": str(len(variants[a][0].outcome.seeds))}
        row = {name: Cell(text, **{name: text}) for name, text in names.items()}
        row[f"{what} [95 % interval]"] = cells.with_interval(*difference, digits=2, sign="+", name="mean_difference")
        rows.append(row | {"p": Cell(cells.short_p(p, 2), p=p)})
    note = (
        f"Paired by seed. {CROSS_FITTED} The p-values are of flipped signs (two-sided, from 14 seeds on at least 1/10,001), "
        "with the choices as given, so they are too small where the halves choose different rates: the interval counts there. "
        "They are not corrected for the number of comparisons."
    )
    table = Table(f"differences at the best rates, {first.shown_as}", rows, note, describe_run(run))
    if any(np.isnan(row["mean_difference"]) for row in table.raw):
        note += f" No difference (–) is given where a seed has no {score.name} at a rate that it reports, or there is one seed."
    return Table(table.title, rows, note, table.of)


def few_seeds_table(run: Run, num: int = 5, published: float | None = None) -> Table | None:
    """For every two variants of a run with FEWEST_TO_DRAW_FROM seeds or more, rates aside, what a comparison of `num` seeds
    would find; None for a run with fewer seeds, or one variant.

    published: a difference that is given as a gain, and how often so few seeds show one as large in either direction; for
    accuracies PUBLISHED_GAIN if None.
    """
    groups, score = best_rates.by_variant(run), run.task.score
    every = {variant: best_rates.at_best(score, group).shown for variant, group in groups.items()}
    shown = {variant: values for variant, values in every.items() if np.isfinite(values).all()}
    if len(shown) < 2 or min(map(len, shown.values())) < FEWEST_TO_DRAW_FROM:
        return None
    points, rows = ", points" if score.unit == "%" else "", []
    if published is None and score is ACCURACY:
        published = PUBLISHED_GAIN
    for a, b in itertools.combinations(shown, 2):
        difference = mean_difference(shown[a], shown[b])  # as in the table of differences
        if len(groups[a]) > 1 or len(groups[b]) > 1:
            difference = best_rates.difference_at_best_rates(score, groups[a], groups[b])[:3]
        each, same = (few_seeds(shown[a], shown[b], num, paired, published) for paired in (False, True))
        names = {"A": a, "B": b, "seeds": str(len(shown[a]))}
        row = {name: Cell(text, **{name: text}) for name, text in names.items()}
        of_all = cells.with_interval(*difference, digits=2, sign="+", name="mean_difference")
        row[f"{score.name} A − B of all{points} [95 % interval]"] = of_all
        numbers = {
            f"{prefix}_{name}": x
            for prefix, found in (("each", each), ("same", same))
            for name, x in found._asdict().items()
            if name != "as_large"
        }
        text = f"{each.low:+.2f} to {each.high:+.2f}"
        row[f"{num} seeds each: 95 % of A − B"] = Cell(text, num_drawn=num, **numbers)
        row[f"{num} each: right sign, wrong sign"] = _percents(each.right, each.wrong)
        row[f"the same {num}: right sign, wrong sign"] = _percents(same.right, same.wrong)
        if published is not None:
            behind = few_seeds(shown[a], shown[b], num, published=-published).as_large
            numbers = {"published": published, "a_ahead_as_far": each.as_large, "b_ahead_as_far": behind}
            ahead = Cell(_percents(each.as_large, behind), **numbers)
            row[f"{num} each: A, B ahead by ≥ {published:.1f}"] = ahead
        rows.append(row)
    note = (
        f"{RESAMPLES:,} comparisons of {num} seeds of each variant, drawn with replacement from all of them. The right sign is "
        "that of the difference of all seeds, which is itself not known where its interval has 0 inside. Learning rates, where "
        "there are several, are those that the other half of all seeds chose: a study that chooses them by few seeds sees less."
    )
    if left_out := [variant for variant in every if variant not in shown]:
        note += f" Not shown, as a seed has no {score.name} there: {', '.join(left_out)}."
    if published == PUBLISHED_GAIN:
        note += (
            f" {PUBLISHED_GAIN:.1f} points: the largest gain of log-linear over one state in Guo et al.'s Table 2 (Mamba-2, "
            "width 16), of five seeds, as third parties quote it."
        )
    return Table(f"what {num} seeds would tell, {groups[a][0].outcome.shown_as}", rows, note, describe_run(run))


def _percents(*shares: float) -> str:
    return ", ".join("–" if np.isnan(share) else cells.percent(share) for share in shares)


def draw_rates(run: Run) -> Figure | None:
    """The mean over seeds against the learning rate, with its interval of 95 %, a line for each variant and weight decay, and
    beside it the share of seeds that converge, where that counts; None if a run has one rate alone, or no finite score."""
    variants = best_rates.by_rate(run)
    every = [at for group in variants.values() for at in group]
    if not any(len(cells.finite(at.outcome.shown)) for at in every):
        return None
    score, first = run.task.score, every[0].outcome
    labels = [first.shown_as + (f" ({score.unit})" if score.unit else "")]
    labels += [f"seeds at ≥ {100 * CONVERGED_ACCURACY:.0f} % (%)"] * bool(score.thresholds)
    figure, (axes,) = style.new_figure(7.6 if len(labels) == 1 else style.FULL_WIDTH, 4.0, 1, len(labels))
    dashes = dict(zip(sorted({at.weight_decay for at in every}), best_rates.DASHES * len(every), strict=False))
    handles: dict[str, Any] = {}
    for variant, look in style.looks_of(variants).items():
        handles[style.describe_variant(variant)] = Line2D([], [], markersize=5, linewidth=1.8, **look._asdict())
        for decay, dash in dashes.items():
            group = [at for at in variants[variant] if at.weight_decay == decay]
            rates = [at.learning_rate for at in group]
            means = np.array([mean_interval(cells.finite(at.outcome.shown)) for at in group]).reshape(-1, 3)
            style.draw_line(axes[0], rates, *means.T, linestyle=dash, **look._asdict())
            # Shares without their intervals, which are wide: those of several variants would hide each other.
            shares = [100 * at.outcome.share_converged for at in group] if score.thresholds else []
            for axis in axes[1:]:
                style.draw_line(axis, rates, shares, linestyle=dash, **look._asdict())
    for axis, label in zip(axes, labels, strict=True):
        axis.set(xlabel="learning rate", ylabel=label, xscale="log")
        rates = sorted({at.learning_rate for at in every})
        numbered = rates[:: -(-len(rates) // (12 // len(labels)))]  # as many as there is room for
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
    style.finish(figure, f"{_message(score, variants)}\n{describe_run(run)}; {counted}{shaded}", handles)
    return figure


def _message(score: Score, variants: Mapping[str, Sequence[AtRate]]) -> str:
    chance = best_rates.chance_of(score, variants)
    windows = [window for group in variants.values() for window in best_rates.windows_of_rates(score, group, chance)]
    if not windows:
        return "Every variant at every learning rate"
    counts, tried = sorted(len(window.rates) for window in windows), max(window.tried for window in windows)
    some = f"{counts[0]}" if counts[0] == counts[-1] else f"{counts[0]} to {counts[-1]}"
    return f"{some} of {tried} rates come within {100 * best_rates.GOOD:.0f} % of a variant's best"


class Rates(Section):
    """From the summaries of runs with several learning rates or weight decays; of others what a few of their seeds would say,
    where there are many."""

    NAME = "rates"
    TITLE = "Learning rates, and few seeds"

    def show_run(self, run: Run, found: dict[str, Any]) -> None:
        self.add(draw_rates(run), "rates", run, "learning rates")
        tables = {"rates-table": every_rate, "best-rates": best_rates_table}
        for name, make in (
            tables | {"best-differences": differences_at_best_rates, "few-seeds": few_seeds_table}
        ).items():
            table = make(run)
            self.add(table, name, run, folded=table is not None and len(table.rows) > MANY_ROWS)
