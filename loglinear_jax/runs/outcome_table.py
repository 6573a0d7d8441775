"""The table of a run's variants side by side, as it is printed when a run ends."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from tabulate import tabulate

from loglinear_jax.runs.outcome import VariantOutcome, on_one_set
from loglinear_jax.tasks import CONVERGED_ACCURACY, SOLVED_ACCURACY


def outcome_table(outcomes: Mapping[str, VariantOutcome], style: str = "github") -> str:
    """The outcomes of several variants of a task, in one of tabulate's styles."""
    outcomes = on_one_set(outcomes)
    any_diverged = any(outcome.num_diverged for outcome in outcomes.values())
    rows = []
    for name, outcome in outcomes.items():
        row = {"variant": name, "seeds": len(outcome.seeds)} | outcome_columns(outcome)
        if any_diverged:
            row["diverged"] = outcome.num_diverged
        rows.append(row)
    return tabulate(rows, headers="keys", tablefmt=style, disable_numparse=True)


def outcome_columns(outcome: VariantOutcome) -> dict[str, str]:
    """One variant's outcome as cells to be read, by column."""
    return _columns_with_thresholds(outcome) if outcome.score.thresholds else _columns_of_losses(outcome)


def mean_and_std(outcome: VariantOutcome) -> str:
    """ "84.7 ± 30.1": accuracy in %; of one seed without ±."""
    spread = "" if outcome.std_accuracy is None else f" ± {100 * outcome.std_accuracy:.1f}"
    return f"{100 * outcome.mean_accuracy:.1f}{spread}"


def _columns_with_thresholds(outcome: VariantOutcome) -> dict[str, str]:
    (low, high), seeds = outcome.share_converged_interval, len(outcome.seeds)
    median = "" if outcome.median_solved_step is None else f"; {outcome.median_solved_step:.0f}"
    share = f"{outcome.num_converged}/{seeds} = {outcome.share_converged:.2f} [{low:.2f}, {high:.2f}]"
    return {
        f"{outcome.shown_as} %, mean ± std": mean_and_std(outcome),
        "peak %": f"{100 * outcome.peak_accuracy:.1f}",
        f"share ≥ {CONVERGED_ACCURACY:.0%} [95 % interval]": share,
        f"seeds ≥ {SOLVED_ACCURACY:.0%} in validation; median step": f"{outcome.num_solved}/{seeds}{median}",
        "λ adds": f"{outcome.lam_params_percent:.2f} %",
    }


def _columns_of_losses(outcome: VariantOutcome) -> dict[str, str]:
    best = np.exp(np.nanmin(np.array(outcome.best_loss, float)))
    rate = outcome.tokens_per_second
    columns = {
        "predicts": outcome.predicts,
        "validation perplexity, mean ± std": mean_perplexity(outcome.best_loss),
        "best": f"{best:.2f}",
        "test perplexity": mean_perplexity(outcome.test_loss or []),
        "at step": f"{np.median([step for step in outcome.best_step if step is not None] or [np.nan]):.0f}",
        "λ adds": f"{outcome.lam_params_percent:.4f} %",
        "tokens/s": "–" if rate is None else f"{rate:,.0f}",
    }
    return {name: cell for name, cell in columns.items() if cell is not None}


def mean_perplexity(losses: Sequence[float | None]) -> str:
    """ "76.30 ± 0.89" of losses in nats; of one seed without ±, of none "–"."""
    if not losses:
        return "–"
    perplexity = np.exp(np.array(losses, float))
    spread = f" ± {perplexity.std(ddof=1):.2f}" if len(perplexity) > 1 else ""
    return f"{perplexity.mean():.2f}{spread}"
