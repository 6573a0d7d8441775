"""Which learning rate is best? Every variant at every rate, how narrow the window of good rates is, and what differs at the
best rates; and what a few of the seeds would have said."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FixedLocator, NullFormatter

from loglinear_jax.analysis import best_rates, cells, style
from loglinear_jax.analysis.experiments import describe_run
from loglinear_jax.analysis.section import Section
from loglinear_jax.analysis.table import Table
from loglinear_jax.runs.loading import Run
from loglinear_jax.runs.outcome import VariantOutcome
from loglinear_jax.statistics import FEWEST_FOR_INTERVAL, RESAMPLES, few_seeds, mean_difference, mean_interval
from loglinear_jax.tasks import ACCURACY, CONVERGED_ACCURACY, Score

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
MANY_ROWS = 12  # above which a table is folded


def rates(run: Run) -> list[Table]:
    """(every variant at every rate, the best rate of every variant and its window); none if there is one rate alone."""
    variants = best_rates.by_rate(run)
    if not variants:
        return []
    shown_as = next(iter(variants.values()))[0].outcome.shown_as
    decays = len({at.weight_decay for group in variants.values() for at in group}) > 1
    return [_at_every_rate(run, variants, shown_as, decays), _best_rates(run, variants, shown_as, decays)]


def _at_every_rate(run: Run, variants: dict[str, list[best_rates.AtRate]], shown_as: str, decays: bool) -> Table:
    rows, raw = [], []
    for variant, group in variants.items():
        for at in group:
            mean, low, high = mean_interval(cells.finite(at.outcome.shown))
            row = {"variant": variant, "rate": best_rates.name_of(at, decays), "seeds": cells.num_seeds(at.outcome)}
            row["mean [95 % interval]"] = cells.with_interval(mean, low, high)
            number = {"variant": variant, "learning_rate": at.learning_rate, "weight_decay": at.weight_decay}
            number |= {"num_seeds": len(at.outcome.seeds), "mean": mean, "low": low, "high": high}
            if run.task.score.thresholds:
                row[SHARE] = cells.share_converged(at.outcome)
                number |= {"share_converged": at.outcome.share_converged}
                number |= dict(zip(("share_low", "share_high"), at.outcome.share_converged_interval, strict=True))
            if any(other.outcome.num_diverged for others in variants.values() for other in others):
                row["diverged"] = str(at.outcome.num_diverged)
            rows.append(row)
            raw.append(number)
    note = "Intervals: of means by bootstrap over seeds, of shares Wilson's."
    return Table(f"{shown_as} at every rate", rows, raw, note, describe_run(run))


def _raw_rates(chosen: best_rates.Chosen) -> dict[str, float]:
    """The rates as plain numbers; twice the same if the halves agree."""
    of_halves = (("", chosen.rates[0]), ("other_", chosen.rates[-1]))
    names = ("learning_rate", "weight_decay")
    return {f"{prefix}{name}": getattr(rate, name) for prefix, rate in of_halves for name in names}


def _best_rates(run: Run, variants: dict[str, list[best_rates.AtRate]], shown_as: str, decays: bool) -> Table:
    rows, raw, score = [], [], run.task.score
    chance = best_rates.chance_of(score, variants)
    for variant, group in variants.items():
        chosen = best_rates.chosen_rate(score, group)
        mean, low, high = best_rates.chosen_interval(score, group)
        windows = best_rates.windows_of_rates(score, group, chance)
        row = {
            "variant": variant,
            "seeds": cells.num_finite(chosen.shown),
            "best rate": best_rates.name_of(chosen.rates, decays),
        }
        row["mean at it [95 % interval]"] = cells.with_interval(mean, low, high)
        share = {}
        if score.thresholds:
            share = dict(
                zip(("share_converged", "share_low", "share_high"), best_rates.converged_at_chosen(chosen), strict=True)
            )
            row[SHARE] = "–" if np.isnan(share["share_low"]) else "{:.2f} [{:.2f}, {:.2f}]".format(*share.values())
        row[f"rates within {best_rates.GOOD:.0%} of the best"] = _either(
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
        f"{CROSS_FITTED}{shares} The window: rates next to the best one, without a gap, whose mean is within "
        f"{best_rates.GOOD:.0%} of the mean there, at the same weight decay. One half of the seeds chooses the best rate and "
        "the other half has the means; both windows are shown where they differ. The highest of its rates over the lowest is "
        f"its width, ≥ where the window ends with the rates tried. {_describe_chance(score, chance)}"
    )
    return Table(f"the best rate of every variant, {shown_as}", rows, raw, note, describe_run(run))


def differences_at_best_rates(run: Run) -> Table | None:
    """Every two variants of a run, rates aside, paired by seed at the rates that the other half of the seeds chose; None if
    there is one variant, or one rate alone."""
    variants = best_rates.by_variant(run)
    if len(variants) < 2 or not best_rates.by_rate(run):
        return None
    score, shown_as = run.task.score, next(iter(variants.values()))[0].outcome.shown_as
    what = f"{score.name} A − B" + (", points" if score.unit == "%" else "")
    rows, raw = [], []
    for a, b in itertools.combinations(variants, 2):
        mean, low, high, p = best_rates.difference_at_best_rates(score, variants[a], variants[b])
        names = {"A": a, "B": b, "seeds": str(len(variants[a][0].outcome.seeds))}
        rows.append(
            names
            | {
                f"{what} [95 % interval]": cells.with_interval(mean, low, high, digits=2, sign="+"),
                "p": cells.short_p(p, 2) if np.isfinite(p) else "–",
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
    groups, score = best_rates.by_variant(run), run.task.score
    every = {variant: best_rates.at_best(score, group).shown for variant, group in groups.items()}
    shown = {variant: values for variant, values in every.items() if np.isfinite(values).all()}
    if len(shown) < 2 or min(map(len, shown.values())) < FEWEST_TO_DRAW_FROM:
        return None
    points = ", points" if score.unit == "%" else ""
    if published is None and score is ACCURACY:
        published = PUBLISHED_GAIN
    rows, raw = [], []
    for a, b in itertools.combinations(shown, 2):
        if len(groups[a]) == len(groups[b]) == 1:  # as in the table of differences
            mean, low, high = mean_difference(shown[a], shown[b])
        else:
            mean, low, high, _ = best_rates.difference_at_best_rates(score, groups[a], groups[b])
        each, same = (few_seeds(shown[a], shown[b], num, paired, published) for paired in (False, True))
        names = {"A": a, "B": b, "seeds": str(len(shown[a]))}
        row = names | {
            f"{score.name} A − B of all{points} [95 % interval]": cells.with_interval(
                mean, low, high, digits=2, sign="+"
            )
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
    if left_out := [variant for variant in every if variant not in shown]:
        note += f" Not shown, as a seed has no {score.name} there: {', '.join(left_out)}."
    if published == PUBLISHED_GAIN:
        note += (
            f" {PUBLISHED_GAIN:.1f} points: the largest gain of log-linear over one state in Guo et al.'s Table 2 (Mamba-2, "
            "width 16), of five seeds, as third parties quote it."
        )
    return Table(f"what {num} seeds would tell, {groups[a][0].outcome.shown_as}", rows, raw, note, describe_run(run))


def _percents(*shares: float) -> str:
    return ", ".join("–" if np.isnan(share) else cells.percent(share) for share in shares)


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


def _raw_windows(windows: Sequence[best_rates.Window]) -> dict[str, float | int | None]:
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


def draw_rates(run: Run) -> Figure | None:
    """The mean over seeds against the learning rate, with its interval of 95 %, a line for each variant and weight decay, and
    beside it the share of seeds that converge, where that counts; None if a run has one rate alone, or no finite score."""
    variants = best_rates.by_rate(run)
    every = [at for group in variants.values() for at in group]
    if not any(len(cells.finite(at.outcome.shown)) for at in every):
        return None
    score, first = run.task.score, every[0].outcome
    panels = [(first.shown_as + (f" ({score.unit})" if score.unit else ""), _mean_shown)]
    if score.thresholds:
        panels.append((f"seeds at ≥ {100 * CONVERGED_ACCURACY:.0f} % (%)", _percent_converged))
    figure, (axes,) = style.new_figure(7.6 if len(panels) == 1 else style.FULL_WIDTH, 4.0, 1, len(panels))
    dashes = dict(zip(sorted({at.weight_decay for at in every}), best_rates.DASHES * len(every), strict=False))
    handles: dict[str, Any] = {}
    for axis, (label, of_outcome) in zip(axes, panels, strict=True):
        for variant, look in style.looks_of(variants).items():
            how = look._asdict() | {"markersize": 5, "linewidth": 1.8}
            handles[style.describe_variant(variant)] = Line2D([], [], **how)
            for decay, dash in dashes.items():
                group = [at for at in variants[variant] if at.weight_decay == decay]
                _draw_line(axis, group, of_outcome, linestyle=dash, **how)
        axis.set_xscale("log")
        axis.set(xlabel="learning rate", ylabel=label)
        _ticks_at(axis, sorted({at.learning_rate for at in every}), len(panels))
        style.open_frame(axis)
    if score.metric == "loss":
        axes[0].set_yscale("log")
        style.log_ticks(axes[0].yaxis)
    else:
        for axis in axes:
            axis.set_ylim(-2, 102)
    for decay, dash in dashes.items() if len(dashes) > 1 else ():
        handles[f"weight decay {decay:g}"] = Line2D([], [], color="0.35", linewidth=1.8, linestyle=dash)
    style.legend_below(figure, handles)
    seeds = len(first.seeds)
    shaded = ", shaded: 95 % interval of the mean" if seeds >= FEWEST_FOR_INTERVAL else ""
    lacking = sum(len(at.outcome.shown) - len(cells.finite(at.outcome.shown)) for at in every)
    left_out = f", without {lacking} that have no finite {score.name}" if lacking else ""
    counted = f"{seeds} seed{'s' * (seeds > 1)} at each rate{left_out}"
    style.title(figure, f"{_message(score, variants)}\n{describe_run(run)}; {counted}{shaded}")
    return figure


def _draw_line(
    axis: Axes,
    group: Sequence[best_rates.AtRate],
    of_outcome: Callable[[VariantOutcome], tuple[float, float, float]],
    **how: Any,
) -> None:
    """A number of the outcome, and its interval, against the rate."""
    if group:
        rates = [at.learning_rate for at in group]
        numbers, lows, highs = np.array([of_outcome(at.outcome) for at in group]).T
        axis.plot(rates, numbers, **how)
        axis.fill_between(rates, lows, highs, color=how["color"], alpha=0.12, linewidth=0)


def _mean_shown(outcome: VariantOutcome) -> tuple[float, float, float]:
    return mean_interval(cells.finite(outcome.shown))


def _percent_converged(outcome: VariantOutcome) -> tuple[float, float, float]:
    """Without its interval, which is wide: those of several variants would hide each other. It is in the table."""
    return 100 * outcome.share_converged, np.nan, np.nan


def _ticks_at(axis: Axes, rates: Sequence[float], panels: int) -> None:
    """Ticks at the rates that were tried, and numbers at all of them, or at as many as there is room for."""
    most = 12 // panels
    shown = rates[:: -(-len(rates) // most)]
    axis.xaxis.set_major_locator(FixedLocator(shown))
    axis.xaxis.set_minor_locator(FixedLocator([rate for rate in rates if rate not in shown]))
    axis.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axis.xaxis.set_minor_formatter(NullFormatter())
    for label in axis.get_xticklabels():
        label.set(rotation=45, ha="right", rotation_mode="anchor", fontsize=9)


def _message(score: Score, variants: Mapping[str, Sequence[best_rates.AtRate]]) -> str:
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
        made = dict(zip(("rates-table", "best-rates"), rates(run), strict=False))  # none of a run with one rate
        made["best-differences"] = differences_at_best_rates(run)
        made["few-seeds"] = few_seeds_table(run)
        for name, table in made.items():
            self.add(table, name, run, folded=table is not None and len(table.rows) > MANY_ROWS)
