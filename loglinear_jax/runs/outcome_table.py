"""The table of a run's variants side by side, as it is printed when a run ends."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from tabulate import tabulate

from loglinear_jax.runs.cells import (
    finite,
    mean_and_std,
    num_and_share_converged,
    num_seeds,
    of_evaluated,
    perplexity,
    solved_and_step,
)
from loglinear_jax.runs.outcome import VariantOutcome, on_one_set
from loglinear_jax.tasks import CONVERGED_ACCURACY, SOLVED_ACCURACY


def outcome_table(outcomes: Mapping[str, VariantOutcome], style: str = "github") -> str:
    """The outcomes of several variants of a task, in one of tabulate's styles."""
    outcomes = on_one_set(outcomes)
    any_diverged = any(outcome.num_diverged for outcome in outcomes.values())
    rows = []
    for name, outcome in outcomes.items():
        row = {"variant": name, "seeds": num_seeds(outcome)} | outcome_columns(outcome)
        if any_diverged:
            row["diverged"] = outcome.num_diverged
        rows.append(row)
    return tabulate(rows, headers="keys", tablefmt=style, disable_numparse=True)


def outcome_columns(outcome: VariantOutcome) -> dict[str, str]:
    """One variant's outcome as cells to be read, by column."""
    return _columns_with_thresholds(outcome) if outcome.score.thresholds else _columns_of_losses(outcome)


def _columns_with_thresholds(outcome: VariantOutcome) -> dict[str, str]:
    return {
        f"{outcome.shown_as} %, mean ± std": mean_and_std(100 * outcome.accuracy),
        "peak %": f"{100 * outcome.peak_accuracy:.1f}",
        f"share ≥ {CONVERGED_ACCURACY:.0%} [95 % interval]": num_and_share_converged(outcome),
        f"seeds ≥ {SOLVED_ACCURACY:.0%} in validation; median step": solved_and_step(outcome),
        "λ adds": f"{outcome.lam_params_percent:.2f} %",
    }


def _columns_of_losses(outcome: VariantOutcome) -> dict[str, str]:
    best, rate = finite(outcome.best), outcome.tokens_per_second
    steps = [step for step in outcome.best_step if step is not None]
    columns = {
        "predicts": outcome.predicts,
        "validation perplexity, mean ± std": perplexity(outcome.best_loss),
        "best": f"{best.min():.2f}" if len(best) else "–",
        "test perplexity": perplexity(of_evaluated(outcome, outcome.test_loss)),
        "at step": f"{np.median(steps):.0f}" if steps else "–",
        "λ adds": f"{outcome.lam_params_percent:.4f} %",
        "tokens/s": "–" if rate is None else f"{rate:,.0f}",
    }
    return {name: cell for name, cell in columns.items() if cell is not None}
