"""What came out of one run? Its variants beside each other, every seed, and tests of differences."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from tabulate import tabulate

from loglinear_jax.analysis import paper
from loglinear_jax.analysis import table as cells
from loglinear_jax.analysis.experiments import describe_run
from loglinear_jax.analysis.rates import pairs_of_like_rates
from loglinear_jax.analysis.section import Section
from loglinear_jax.analysis.table import Cell, Table
from loglinear_jax.runs.loading import Run
from loglinear_jax.runs.outcome import VariantOutcome, on_one_set
from loglinear_jax.statistics import mcnemar, mean_difference, mean_interval
from loglinear_jax.tasks import CONVERGED_ACCURACY, SOLVED_ACCURACY

MANY_RUNS = 5  # from which their own tables are folded


def outcome_table(outcomes: Mapping[str, VariantOutcome]) -> str:
    """The outcomes of several variants of a task, as a table of Markdown."""
    outcomes = on_one_set(outcomes)
    any_diverged = any(outcome.num_diverged for outcome in outcomes.values())
    rows = []
    for name, outcome in outcomes.items():
        diverged = {"diverged": outcome.num_diverged} if any_diverged else {}
        rows.append({"variant": name, "seeds": cells.num_seeds(outcome)} | outcome_columns(outcome) | diverged)
    return tabulate(rows, headers="keys", tablefmt="github", disable_numparse=True)


def outcome_columns(outcome: VariantOutcome) -> dict[str, str]:
    """One variant's outcome as cells to be read, by column."""
    if outcome.score.thresholds:
        return {
            f"{outcome.shown_as} %, mean ± std": cells.mean_and_std(100 * outcome.accuracy),
            "peak %": f"{100 * outcome.peak_accuracy:.1f}",
            f"share ≥ {CONVERGED_ACCURACY:.0%} [95 % interval]": cells.num_and_share_converged(outcome),
            f"seeds ≥ {SOLVED_ACCURACY:.0%} in validation; median step": cells.solved_and_step(outcome),
            "λ adds": f"{outcome.lam_params_percent:.2f} %",
        }
    best, rate = cells.finite(outcome.best), outcome.tokens_per_second
    columns = {
        "predicts": outcome.predicts,
        "validation perplexity, mean ± std": cells.perplexity(outcome.best_loss),
        "best": f"{best.min():.2f}" if len(best) else "–",
        "test perplexity": cells.perplexity(cells.of_evaluated(outcome, outcome.test_loss)),
        "at step": cells.median_of(outcome.best_step),
        "λ adds": f"{outcome.lam_params_percent:.4f} %",
        "tokens/s": "–" if rate is None else f"{rate:,.0f}",
    }
    return {name: cell for name, cell in columns.items() if cell is not None}


def outcomes(run: Run) -> Table:
    """Every variant of a run: mean ± std, peak, share of converged seeds with Wilson's interval, and the paper's number."""
    variants, rows = on_one_set(run.outcomes), []
    published = {variant: paper.result(run.config, variant) for variant in variants}
    for variant, outcome in variants.items():
        numbers = {k: v for k, v in outcome.to_json().items() if not isinstance(v, (dict, list))}
        numbers |= {"num_seeds": len(outcome.seeds), "shown": outcome.shown_as, "diverged": outcome.num_diverged}
        for name, values in (("perplexity", outcome.shown), ("test_perplexity", np.exp(_tested(outcome)))):
            if not outcome.score.thresholds and len(values := cells.finite(values)):
                std = float(values.std(ddof=1)) if len(values) > 1 else None
                numbers |= {f"num_{name}": len(values), f"mean_{name}": float(values.mean()), f"std_{name}": std}
        named = Cell(variant, run=run.name, variant=variant, **numbers, the_paper=published[variant])
        row = {"variant": named, "seeds": cells.num_seeds(outcome)} | outcome_columns(outcome)
        rows.append(row | ({"the paper": published[variant] or "–"} if any(published.values()) else {}))
    first = next(iter(variants.values()))
    note = cells.accuracy_note(first, counts_solved=True)
    note += " Intervals: Wilson, 95 %." if run.task.score.thresholds else ""
    note += " The last column is the paper's, of 3 to 11 seeds." if any(published.values()) else ""
    return Table(f"outcomes, {first.shown_as}", rows, note, describe_run(run))


def _tested(outcome: VariantOutcome) -> np.ndarray:
    return cells.of_evaluated(outcome, outcome.test_loss)


def by_seed(run: Run) -> Table:
    """Each seed's accuracy in %, or perplexity."""
    variants, rows = on_one_set(run.outcomes), []
    first, unit = next(iter(variants.values())), run.task.score.unit
    for index, seed in enumerate(first.seeds):
        row = {"seed": Cell(seed, seed=seed)}
        for variant, outcome in variants.items():
            value = float(outcome.shown[index])
            is_finite = np.isfinite(value)
            row[variant] = Cell(f"{value:.1f}" if is_finite else "–", **{variant: value if is_finite else None})
        rows.append(row)
    return Table(f"{first.shown_as}{unit and f' ({unit})'} of every seed", rows, of=describe_run(run))


def parts(run: Run) -> Table | None:
    """Every variant's mean test accuracy on each part of the test; None where the test has one part alone."""
    rows = []
    for variant, outcome in run.outcomes.items():
        of_parts = outcome.test_accuracy_of_parts or {}
        found = {part: cells.with_interval(*mean_interval(100 * cells.finite(x))) for part, x in of_parts.items()}
        if found:
            rows.append({"variant": Cell(variant, variant=variant), "seeds": cells.num_seeds(outcome)} | found)
    note = "Test accuracy in %, mean over seeds [95 % interval by bootstrap], of the parameters that validation chose."
    return Table("test accuracy on each part of the test", rows, note, describe_run(run)) if rows else None


def differences(run: Run) -> Table | None:
    """Every two variants of a run, paired by seed; None if there is only one. Where variants have several learning rates, those
    of the same rate: differences at the best rates have a table of their own (`differences_at_best_rates`)."""
    variants = on_one_set(run.outcomes)
    pairs, score, rows = pairs_of_like_rates(run, variants), run.task.score, []
    for name_a, name_b in pairs:
        a, b = variants[name_a], variants[name_b]
        values = np.array([a.shown, b.shown])
        row = {"A": Cell(name_a, A=name_a), "B": Cell(name_b, B=name_b)}
        values = values[:, there := np.isfinite(values).all(0)]
        row["seeds"] = Cell(cells.num_finite(np.where(there, 0, np.nan)), seeds=len(values[0]))
        for threshold in score.thresholds:
            only_a, only_b, p = mcnemar(a.reached(threshold), b.reached(threshold))
            at = f"{100 * threshold:.0f}"
            numbers = {f"only_a_{at}": only_a, f"only_b_{at}": only_b, f"mcnemar_p_{at}": p}
            text = f"{only_a}, {only_b}, {p:.2g}"
            row[f"≥ {threshold:.0%}: only A, only B, McNemar p"] = Cell(text, **numbers)
        what = f"{score.name} A − B" + (", points" if score.unit == "%" else "")
        difference = cells.with_interval(*mean_difference(*values), digits=2, sign="+", name="mean_difference")
        rows.append(row | {f"{what} [95 % interval]": difference})
    if not rows:
        return None
    first = next(iter(variants.values()))
    note = (
        f"{cells.accuracy_note(first)} Paired by seed. The p-values are exact and not corrected for the number of "
        "comparisons; intervals are bootstrapped, from 10 seeds on."
    )
    if len(pairs) < len(variants) * (len(variants) - 1) // 2:
        note += " Pairs of different learning rates or weight decays are left out."
    return Table(f"differences in {first.shown_as}", rows, note, describe_run(run))


class Outcomes(Section):
    """From the summary of each run."""

    NAME = "tables"
    TITLE = "Results"

    def show_run(self, run: Run, found: dict[str, Any]) -> None:
        if not run.outcomes:
            self.context.report.problems.append(f"{run.workdir}: no results yet: there is no summary.json")
            return
        self.add(outcomes(run), "outcomes", run, folded=len(self.context.runs) >= MANY_RUNS)
        self.add(parts(run), "parts", run)
        self.add(differences(run), "differences", run, folded=True)
        self.add(by_seed(run), "seeds", run, folded=True)
