"""What came out of one run? Its variants beside each other, every seed, and tests of differences."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from tabulate import tabulate

from loglinear_jax.analysis import cells, paper
from loglinear_jax.analysis.best_rates import pairs_of_like_rates
from loglinear_jax.analysis.experiments import describe_run
from loglinear_jax.analysis.section import Section
from loglinear_jax.analysis.table import Table
from loglinear_jax.runs.loading import Run
from loglinear_jax.runs.outcome import VariantOutcome, on_one_set
from loglinear_jax.statistics import mcnemar, mean_difference, mean_interval
from loglinear_jax.tasks import CONVERGED_ACCURACY, SOLVED_ACCURACY

MANY_RUNS = 5  # from which their own tables are folded


def outcome_table(outcomes: Mapping[str, VariantOutcome], style: str = "github") -> str:
    """The outcomes of several variants of a task, in one of tabulate's styles."""
    outcomes = on_one_set(outcomes)
    any_diverged = any(outcome.num_diverged for outcome in outcomes.values())
    rows = []
    for name, outcome in outcomes.items():
        row = {"variant": name, "seeds": cells.num_seeds(outcome)} | outcome_columns(outcome)
        if any_diverged:
            row["diverged"] = outcome.num_diverged
        rows.append(row)
    return tabulate(rows, headers="keys", tablefmt=style, disable_numparse=True)


def outcome_columns(outcome: VariantOutcome) -> dict[str, str]:
    """One variant's outcome as cells to be read, by column."""
    return _columns_with_thresholds(outcome) if outcome.score.thresholds else _columns_of_losses(outcome)


def _columns_with_thresholds(outcome: VariantOutcome) -> dict[str, str]:
    return {
        f"{outcome.shown_as} %, mean ± std": cells.mean_and_std(100 * outcome.accuracy),
        "peak %": f"{100 * outcome.peak_accuracy:.1f}",
        f"share ≥ {CONVERGED_ACCURACY:.0%} [95 % interval]": cells.num_and_share_converged(outcome),
        f"seeds ≥ {SOLVED_ACCURACY:.0%} in validation; median step": cells.solved_and_step(outcome),
        "λ adds": f"{outcome.lam_params_percent:.2f} %",
    }


def _columns_of_losses(outcome: VariantOutcome) -> dict[str, str]:
    best, rate = cells.finite(outcome.best), outcome.tokens_per_second
    steps = [step for step in outcome.best_step if step is not None]
    columns = {
        "predicts": outcome.predicts,
        "validation perplexity, mean ± std": cells.perplexity(outcome.best_loss),
        "best": f"{best.min():.2f}" if len(best) else "–",
        "test perplexity": cells.perplexity(cells.of_evaluated(outcome, outcome.test_loss)),
        "at step": f"{np.median(steps):.0f}" if steps else "–",
        "λ adds": f"{outcome.lam_params_percent:.4f} %",
        "tokens/s": "–" if rate is None else f"{rate:,.0f}",
    }
    return {name: cell for name, cell in columns.items() if cell is not None}


def outcomes(run: Run) -> Table:
    """Every variant of a run: mean ± std, peak, share of converged seeds with Wilson's interval, and the paper's number."""
    rows, raw = [], []
    variants = on_one_set(run.outcomes)
    published = {variant: paper.result(run.config, variant) for variant in variants}
    for variant, outcome in variants.items():
        row = {"variant": variant, "seeds": cells.num_seeds(outcome)} | outcome_columns(outcome)
        if any(published.values()):
            row["the paper"] = published[variant] or "–"
        rows.append(row)
        numbers = {k: v for k, v in outcome.to_json().items() if not isinstance(v, (dict, list))}
        raw.append(
            {"run": run.name, "variant": variant, "num_seeds": len(outcome.seeds), "shown": outcome.shown_as}
            | numbers
            | (_share(outcome) if outcome.score.thresholds else _perplexities(outcome))
            | {"diverged": outcome.num_diverged, "the_paper": published[variant]}
        )
    note = cells.accuracy_note(_first(variants), counts_solved=True)
    if run.task.score.thresholds:
        note += " Intervals: Wilson, 95 %."
    if any(published.values()):
        note += " The last column is the paper's, of 3 to 11 seeds."
    return Table(f"outcomes, {_first(variants).shown_as}", rows, raw, note, describe_run(run))


def _share(outcome: VariantOutcome) -> dict[str, float]:
    return dict(zip(("share_low", "share_high"), outcome.share_converged_interval, strict=True))


def _perplexities(outcome: VariantOutcome) -> dict[str, float | None]:
    """Mean and standard deviation over the seeds with a finite evaluation, and how many these are."""
    shown, tested = cells.finite(outcome.shown), np.exp(cells.of_evaluated(outcome, outcome.test_loss))
    numbers: dict[str, float | None] = {"num_evaluated": len(shown)}
    for name, values in (("perplexity", shown), ("test_perplexity", tested)):
        numbers[f"mean_{name}"] = float(values.mean()) if len(values) else None
        numbers[f"std_{name}"] = float(values.std(ddof=1)) if len(values) > 1 else None
    return numbers


def by_seed(run: Run) -> Table:
    """Each seed's accuracy in %, or perplexity."""
    variants = on_one_set(run.outcomes)
    seeds = _first(variants).seeds
    shown = {v: [float(x) if np.isfinite(x) else None for x in outcome.shown] for v, outcome in variants.items()}
    raw = [{"seed": seed} | {v: shown[v][i] for v in variants} for i, seed in enumerate(seeds)]
    rows = [{k: "–" if x is None else str(x) if k == "seed" else f"{x:.1f}" for k, x in row.items()} for row in raw]
    unit = run.task.score.unit
    what = _first(variants).shown_as + (f" ({unit})" if unit else "")
    return Table(f"{what} of every seed", rows, raw, of=describe_run(run))


def parts(run: Run) -> Table | None:
    """Every variant's mean test accuracy on each part of the test; None where the test has one part alone."""
    variants = {name: outcome for name, outcome in run.outcomes.items() if outcome.test_accuracy_of_parts}
    if not variants:
        return None
    rows, raw = [], []
    for variant, outcome in variants.items():
        row = {"variant": variant, "seeds": cells.num_seeds(outcome)}
        for part, accuracies in outcome.test_accuracy_of_parts.items():
            mean, low, high = mean_interval(100 * cells.finite(accuracies))
            row[part] = cells.with_interval(mean, low, high)
            raw.append(
                {"variant": variant, "part": part, "num_seeds": len(outcome.seeds), "mean": mean}
                | {"low": low, "high": high}
            )
        rows.append(row)
    note = "Test accuracy in %, mean over seeds [95 % interval by bootstrap], of the parameters that validation chose."
    return Table("test accuracy on each part of the test", rows, raw, note, describe_run(run))


def differences(run: Run) -> Table | None:
    """Every two variants of a run, paired by seed; None if there is only one. Where variants have several learning rates, those
    of the same rate: differences at the best rates have a table of their own (`differences_at_best_rates`)."""
    variants = on_one_set(run.outcomes)
    pairs = pairs_of_like_rates(run, variants)
    if not pairs:
        return None
    score = run.task.score
    rows, raw = [], []
    for name_a, name_b in pairs:
        a, b = variants[name_a], variants[name_b]
        values = np.array([a.shown, b.shown])
        names = {"A": name_a, "B": name_b}
        row = names | {"seeds": cells.num_finite(values.sum(0))}
        values = values[:, np.isfinite(values).all(0)]
        number: dict[str, Any] = names | {"seeds": len(values[0])}
        for threshold in score.thresholds:
            only_a, only_b, p = mcnemar(a.reached(threshold), b.reached(threshold))
            row[f"≥ {threshold:.0%}: only A, only B, McNemar p"] = f"{only_a}, {only_b}, {p:.2g}"
            at = f"{100 * threshold:.0f}"
            number |= {f"only_a_{at}": only_a, f"only_b_{at}": only_b, f"mcnemar_p_{at}": p}
        what = f"{score.name} A − B" + (", points" if score.unit == "%" else "")
        mean, low, high = mean_difference(*values)
        row[f"{what} [95 % interval]"] = cells.with_interval(mean, low, high, digits=2, sign="+")
        rows.append(row)
        raw.append(number | {"mean_difference": mean, "low": low, "high": high})
    note = (
        f"{cells.accuracy_note(_first(variants))} Paired by seed. The p-values are exact and not corrected for the number of "
        "comparisons; intervals are bootstrapped, from 10 seeds on."
    )
    if len(pairs) < len(variants) * (len(variants) - 1) // 2:
        note += " Pairs of different learning rates or weight decays are left out."
    return Table(f"differences in {_first(variants).shown_as}", rows, raw, note, describe_run(run))


def _first(variants: Mapping[str, VariantOutcome]) -> VariantOutcome:
    return next(iter(variants.values()))


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
