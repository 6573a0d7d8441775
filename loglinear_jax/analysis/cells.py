"""How numbers are written in the cells of tables, and which accuracies a table shows."""

from __future__ import annotations

import re
from collections.abc import Sequence

import numpy as np

from loglinear_jax.runs.outcome import VariantOutcome
from loglinear_jax.statistics import mean_interval
from loglinear_jax.tasks import ACCURACY, SOLVED_ACCURACY


def mean_and_std(values: Sequence[float] | np.ndarray, digits: int = 1) -> str:
    """ "84.7 ± 30.1": mean and standard deviation over seeds, which one seed does not have; "–" without any seed."""
    if not len(values):
        return "–"
    spread = f" ± {np.std(values, ddof=1):.{digits}f}" if len(values) > 1 else ""
    return f"{np.mean(values):.{digits}f}{spread}"


def finite(values: Sequence[float | None] | np.ndarray | None) -> np.ndarray:
    """The values that are there: without None, nan and infinity."""
    found = np.array([] if values is None else values, np.float64)
    return found[np.isfinite(found)]


def num_finite(values: Sequence[float] | np.ndarray) -> str:
    """ "3"; "2 of 3" if one of the seeds has no finite value, and is left out of means."""
    found = len(finite(values))
    return str(found) if found == len(values) else f"{found} of {len(values)}"


def num_seeds(outcome: VariantOutcome) -> str:
    """ "3"; "2 of 3; 1 diverged" if one of the seeds has no score, as it diverged before its first evaluation."""
    lacking = ~np.isfinite(outcome.shown)
    diverged = sum(step is not None for step, lacks in zip(outcome.diverged_step, lacking, strict=True) if lacks)
    return num_finite(outcome.shown) + (f"; {diverged} diverged" if diverged else "")


def mean_std_and_reached(values: Sequence[float] | np.ndarray, least: float) -> str:
    """ "84.7 ± 30.1 (49/64)": and how many are at least `least`."""
    return f"{mean_and_std(values)} ({sum(value >= least for value in values)}/{len(values)})"


def perplexity(losses: Sequence[float | None] | np.ndarray | None, digits: int = 2) -> str:
    """ "76.30 ± 0.89" of losses in nats, of the seeds that have a finite one; of none "–"."""
    with np.errstate(over="ignore"):
        return mean_and_std(finite(np.exp(finite(losses))), digits)


def of_evaluated(outcome: VariantOutcome, values: Sequence[float | None] | None) -> np.ndarray:
    """Test values of the seeds with a finite evaluation in validation: those of the other seeds are of parameters that were
    never trained."""
    if values is None:
        return np.zeros(0)
    return finite([value for value, best in zip(values, outcome.best, strict=True) if np.isfinite(best)])


def with_interval(mean: float, low: float, high: float, digits: int = 1, sign: str = "") -> str:
    """ "71.2 [66.0, 75.9]"; without the interval where there is none, "–" where there is no mean. sign: "+" for differences."""
    if not np.isfinite(mean):
        return "–"
    form = f"{sign}.{digits}f"
    return f"{mean:{form}}" + (f" [{low:{form}}, {high:{form}}]" if np.isfinite(low) else "")


def mean_with_interval(values: Sequence[float] | np.ndarray) -> str:
    """The same of some values' mean."""
    return with_interval(*mean_interval(values))


def percent(share: float, digits: int = 0) -> str:
    """ "73 %": 100 % only for all of them, 0 % only for none."""
    if share in (0, 1):
        return f"{100 * share:.0f} %"
    least = 10.0**-digits
    return f"{min(max(100 * share, least), 100 - least):.{digits}f} %"


def short_p(p_value: float, digits: int = 1) -> str:
    """ "0.0005", "8e-7"."""
    return re.sub(r"e-0", "e-", f"{p_value:.{digits}g}")


def share_converged(outcome: VariantOutcome) -> str:
    """ "0.77 [0.65, 0.85]": the share of seeds at 90 %, with Wilson's interval."""
    return f"{outcome.share_converged:.2f} {_wilson(outcome)}"


def num_and_share_converged(outcome: VariantOutcome) -> str:
    """ "49/64 = 0.77 [0.65, 0.85]"."""
    return f"{outcome.num_converged}/{len(outcome.seeds)} = {share_converged(outcome)}"


def converged_and_solved(outcome: VariantOutcome) -> str:
    """ "49/64 [0.65, 0.85], 38/64": how many seeds reached 90 %, with the interval of their share, and 99 %."""
    return f"{outcome.num_converged}/{len(outcome.seeds)} {_wilson(outcome)}, {outcome.num_solved}/{len(outcome.seeds)}"


def median_step(outcome: VariantOutcome, separator: str = "") -> str:
    """ "; 1200", for behind the number of seeds at 99 %: the median step at which they reached it; nothing if none did.
    separator: of thousands."""
    return "" if outcome.median_solved_step is None else f"; {outcome.median_solved_step:{separator}.0f}"


def solved_and_step(outcome: VariantOutcome, separator: str = "") -> str:
    """ "38/64; 1200": how many seeds reached 99 %, and the median step at which they did."""
    return f"{outcome.num_solved}/{len(outcome.seeds)}{median_step(outcome, separator)}"


def _wilson(outcome: VariantOutcome) -> str:
    low, high = outcome.share_converged_interval
    return f"[{low:.2f}, {high:.2f}]"


def accuracy_note(outcome: VariantOutcome, counts_solved: bool = False) -> str:
    """Which accuracies, or perplexities, a table shows, as a sentence for below it. counts_solved: whether it also counts seeds
    that solved their task, which they do in validation."""
    if outcome.score is not ACCURACY or outcome.test_accuracy is None:
        return f"{outcome.score.name.capitalize()}: each seed's best in validation."
    note = "Accuracy: on each seed's test set, with the parameters that validation chose."
    return note + f" Seeds at ≥ {100 * SOLVED_ACCURACY:.0f} %, and their steps: in validation." * counts_solved
