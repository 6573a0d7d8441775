"""How the cells of pages are written."""

from __future__ import annotations

import re

import numpy as np

from loglinear_jax.runs.outcome import VariantOutcome
from loglinear_jax.statistics import mean_difference, mean_interval


def short_p(p_value: float, digits: int = 1) -> str:
    """ "0.0005", "8e-7"."""
    return re.sub(r"e-0", "e-", f"{p_value:.{digits}g}")


def points_between(ours: VariantOutcome, others: VariantOutcome) -> str:
    """ "+1.2 [−0.3, +2.7]": the mean difference of two variants' accuracies, paired by seed."""
    mean, low, high = mean_difference(*(100 * o.accuracy for o in (ours, others)))
    interval = f" [{low:+.1f}, {high:+.1f}]" if np.isfinite(low) else ""
    return f"{mean:+.1f}{interval}".replace("-", "−")


def mean_and_interval(percent) -> str:
    """ "71.2 [66.0, 75.9]"."""
    mean, low, high = mean_interval(percent)
    return f"{mean:.1f}" + (f" [{low:.1f}, {high:.1f}]" if np.isfinite(low) else "")


def mean_and_std(values, digits: int = 1) -> str:
    """Mean ± standard deviation over seeds, which one seed does not have."""
    spread = f" ± {np.std(values, ddof=1):.{digits}f}" if len(values) > 1 else ""
    return f"{np.mean(values):.{digits}f}{spread}"


def perplexity(losses, digits: int = 2) -> str:
    """ "76.30 ± 0.89" of losses in nats."""
    return mean_and_std(np.exp(np.asarray(losses, np.float64)), digits)


def lam_share(outcome: VariantOutcome) -> str:
    """ "0.0083": the parameters of λ in % of all others."""
    return f"{outcome.lam_params_percent:.4f}"
