"""What many seeds came to: outcomes per seed, shares with intervals, and the table of variants side by side."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
from scipy.stats import binomtest
from tabulate import tabulate

from loglinear_jax.lam import count_lam_params
from loglinear_jax.train import SeedState

CONVERGED_SHARE = 0.90  # a seed counts as converged if its best validation accuracy reaches this


def wilson_interval(successes: int, trials: int, confidence: float = 0.95) -> tuple[float, float]:
    """Wilson's score interval for a share of `trials` (Wilson 1927)."""
    interval = binomtest(successes, trials).proportion_ci(confidence, method="wilson")
    return float(interval.low), float(interval.high)


def summarize(state: SeedState) -> dict[str, Any]:
    """Outcomes of a trained variant, from its state of all seeds; accuracies are shares of 1, steps null if never.

    share_converged counts seeds whose best accuracy reached CONVERGED_SHARE; median_convergence_step is over the seeds that
    reached 99 %.
    """
    seeds = [int(seed) for seed in np.asarray(state.seed)]
    best = np.asarray(state.best_accuracy, np.float64)
    converged_step = np.asarray(state.converged_step)
    reached = converged_step[converged_step >= 0]
    num_converged = int((best >= CONVERGED_SHARE).sum())
    one_seed = jax.tree.map(lambda x: x[0], state.params)
    lam_params, other_params = count_lam_params(one_seed)

    def steps(values):
        return [int(value) if value >= 0 else None for value in np.asarray(values)]

    return {
        "seeds": seeds,
        "best_accuracy": best.tolist(),
        "best_step": steps(state.best_step),
        "converged_step": steps(converged_step),
        "diverged_step": steps(state.diverged_step),
        "last_step": int(np.asarray(state.step).max()),
        "mean_accuracy": float(best.mean()),
        "std_accuracy": float(best.std(ddof=1)) if len(seeds) > 1 else 0.0,
        "peak_accuracy": float(best.max()),
        "num_converged": num_converged,
        "share_converged": num_converged / len(seeds),
        "share_converged_interval": list(wilson_interval(num_converged, len(seeds))),
        "median_convergence_step": float(np.median(reached)) if len(reached) else None,
        "params": lam_params + other_params,
        "lam_params": lam_params,
        "lam_params_percent": 100 * lam_params / other_params,
    }


def table(variants: dict[str, dict[str, Any]], style: str = "github") -> str:
    """The summaries of several variants side by side, as a table in one of tabulate's styles."""
    rows = []
    for name, s in variants.items():
        low, high = s["share_converged_interval"]
        median, diverged = s["median_convergence_step"], sum(step is not None for step in s["diverged_step"])
        rows.append(
            {
                "variant": name,
                "seeds": len(s["seeds"]),
                "accuracy %, mean ± std": f"{100 * s['mean_accuracy']:.1f} ± {100 * s['std_accuracy']:.1f}",
                "peak %": f"{100 * s['peak_accuracy']:.1f}",
                f"share ≥ {CONVERGED_SHARE:.0%} [95 % interval]": (
                    f"{s['num_converged']}/{len(s['seeds'])} = {s['share_converged']:.2f} [{low:.2f}, {high:.2f}]"
                ),
                "median step to 99 %": "–" if median is None else f"{median:.0f}",
                "λ adds": f"{s['lam_params_percent']:.2f} %",
                **(
                    {"diverged": diverged}
                    if any(x is not None for v in variants.values() for x in v["diverged_step"])
                    else {}
                ),
            }
        )
    return tabulate(rows, headers="keys", tablefmt=style, disable_numparse=True)
