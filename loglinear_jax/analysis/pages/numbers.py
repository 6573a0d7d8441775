"""Numbers in the prose of pages. Their names in pages are short, as they stand between words."""

from __future__ import annotations

import numpy as np

from loglinear_jax.analysis.pages.options import Runs, number
from loglinear_jax.analysis.pages.results import outcome_of
from loglinear_jax.runs.cells import mean_and_std, perplexity, short_p
from loglinear_jax.runs.outcome import VariantOutcome
from loglinear_jax.statistics import mcnemar
from loglinear_jax.tasks import CONVERGED_ACCURACY


@number("converged")
def num_converged(runs: Runs, variant: str = "*") -> str:
    """How many seeds reached 90 %, over all of these runs (and variants, without one)."""
    return f"{sum(o.num_converged for o in _outcomes(runs, variant)):,}"


@number("solved")
def num_solved(runs: Runs, variant: str = "*") -> str:
    """How many reached 99 %."""
    return f"{sum(o.num_solved for o in _outcomes(runs, variant)):,}"


@number("seeds")
def num_seeds(runs: Runs, variant: str = "*") -> str:
    """How many seeds there are."""
    return f"{sum(len(o.seeds) for o in _outcomes(runs, variant)):,}"


@number("between")
def num_between(runs: Runs, variant: str, low: str, high: str) -> str:
    """How many seeds end with an accuracy from `low` to below `high` %."""
    accuracy = 100 * _accuracies(runs, variant)
    return str(int(((accuracy >= float(low)) & (accuracy < float(high))).sum()))


@number("mean")
def mean_accuracy(runs: Runs, variant: str) -> str:
    """Mean accuracy in %: "84.7"."""
    return f"{100 * np.mean(_accuracies(runs, variant)):.1f}"


@number("mean_and_std")
def mean_accuracy_and_std(runs: Runs, variant: str) -> str:
    """ "84.7 ± 30.1"."""
    return mean_and_std(100 * _accuracies(runs, variant))


@number("p")
def p_of_mcnemar(runs: Runs, a: str, b: str, at: str = "90") -> str:
    """McNemar's exact p that two variants of one run reach `at` % equally often."""
    [run] = runs
    return short_p(mcnemar(*(outcome_of(run, variant).reached(float(at) / 100) for variant in (a, b)))[2])


@number()
def changed_sides(runs: Runs) -> str:
    """How many seeds of two runs converge in one of them only, over all their variants."""
    first, second = (run.outcomes for run in runs)
    pairs = ((first[v].reached(CONVERGED_ACCURACY), second[v].reached(CONVERGED_ACCURACY)) for v in first)
    return str(sum(x != y for a, b in pairs for x, y in zip(a, b, strict=True)))


@number("perplexity")
def validation_perplexity(runs: Runs, variant: str, digits: str = "1") -> str:
    """Validation perplexity, mean ± std over the seeds of one run."""
    [run] = runs
    return perplexity(outcome_of(run, variant).best_loss, int(digits))


@number("lam_share")
def share_of_lam(runs: Runs, variant: str) -> str:
    """The parameters of λ in % of all others: "0.0083"."""
    [run] = runs
    return f"{outcome_of(run, variant).lam_params_percent:.4f}"


def _accuracies(runs: Runs, variant: str) -> np.ndarray:
    return np.concatenate([o.accuracy for o in _outcomes(runs, variant)])


def _outcomes(runs: Runs, variant: str) -> list[VariantOutcome]:
    """The outcomes of a variant in these runs, or with * of all of theirs."""
    if variant == "*":
        return [o for run in runs for o in run.outcomes.values()]
    return [outcome_of(run, variant) for run in runs]
