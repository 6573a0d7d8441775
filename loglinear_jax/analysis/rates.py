"""Which learning rate is best? Every variant at every rate, and what differs at the best rates."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FixedLocator, NullFormatter

from loglinear_jax.analysis import best_rates, style
from loglinear_jax.analysis import table as cells
from loglinear_jax.analysis.best_rates import name_of
from loglinear_jax.analysis.experiments import describe_run
from loglinear_jax.analysis.section import Section
from loglinear_jax.analysis.table import Cell, Table
from loglinear_jax.runs.loading import Run
from loglinear_jax.statistics import FEWEST_FOR_INTERVAL, mean_interval
from loglinear_jax.tasks import CONVERGED_ACCURACY

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
    """The best rate of every variant; None if there is one rate alone."""
    variants, score = best_rates.by_rate(run), run.task.score
    if not variants:
        return None
    decays, rows = best_rates.several_decays(variants.values()), []
    for variant, group in variants.items():
        chosen = best_rates.chosen_rate(score, group)
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
        rows.append(row)
    shares = " Those of shares are Wilson's, with the choice as given." if score.thresholds else ""
    shown_as = next(iter(variants.values()))[0].outcome.shown_as
    return Table(f"the best rate of every variant, {shown_as}", rows, f"{CROSS_FITTED}{shares}", describe_run(run))


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
    style.finish(figure, f"Every variant at every learning rate\n{describe_run(run)}; {counted}{shaded}", handles)
    return figure


class Rates(Section):
    """From the summaries of runs with several learning rates or weight decays."""

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
            table = make(run)
            self.add(table, name, run, folded=table is not None and len(table.rows) > MANY_ROWS)
