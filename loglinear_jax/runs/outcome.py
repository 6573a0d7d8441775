"""What many seeds came to: outcomes per seed, shares with intervals, and the table of variants side by side."""

from __future__ import annotations

from typing import Any

import flax.linen as nn
import jax
import numpy as np
from tabulate import tabulate

from loglinear_jax.train.distributed import to_host
from loglinear_jax.lam import count_lam_params
from loglinear_jax.models import LanguageModel
from loglinear_jax.train import SOLVED_ACCURACY, SeedState

CONVERGED_ACCURACY = 0.90  # a seed counts as converged if its best validation accuracy reaches this


def wilson_interval(successes: int, trials: int, confidence: float = 0.95) -> tuple[float, float]:
    """Wilson's score interval for a share of `trials` (Wilson 1927)."""
    from scipy.stats import binomtest  # importing it takes a good part of a run's start

    interval = binomtest(successes, trials).proportion_ci(confidence, method="wilson")
    return float(interval.low), float(interval.high)


def describe_model(model: nn.Module, seq_len: int) -> str:
    """The size of a model in words, and what λ adds to it."""
    tokens = jax.ShapeDtypeStruct((1, seq_len), np.int32)
    lam, other = count_lam_params(jax.eval_shape(model.init, jax.random.key(0), tokens))
    size = f"{lam + other:,} parameters, of which {lam:,} ({100 * lam / other:.4f} %) are λ's"
    return size + (" (the paper, with d_h = 2 L: below 0.007 %)" if lam and isinstance(model, LanguageModel) else "")


def summarize(state: SeedState, metric: str = "accuracy") -> dict[str, Any]:
    """Outcomes of a trained variant, from its state of all seeds; accuracies are shares of 1, losses in nats, steps null if
    never. metric: by which the best step of a seed was chosen, "accuracy" or "loss".

    share_converged counts seeds whose best accuracy reached CONVERGED_ACCURACY (90 %); solved_step is the step at which each
    reached SOLVED_ACCURACY (99 %), median_solved_step its median over those that did.
    """
    seeds, best_accuracy, best_loss, solved_step, diverged_step, best_step, last_step = to_host(
        (
            state.seed,
            state.best_accuracy,
            state.best_loss,
            state.solved_step,
            state.diverged_step,
            state.best_step,
            state.step,
        )
    )
    seeds, best = seeds.tolist(), best_accuracy.astype(np.float64)
    reached = solved_step[solved_step >= 0]
    num_converged = int((best >= CONVERGED_ACCURACY).sum())
    one_seed = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), state.params)
    lam_params, other_params = count_lam_params(one_seed)

    def steps(values):
        return [int(value) if value >= 0 else None for value in values]

    return {
        "metric": metric,
        "seeds": seeds,
        "best_loss": best_loss.astype(np.float64).tolist(),
        "best_accuracy": best.tolist(),
        "best_step": steps(best_step),
        "solved_step": steps(solved_step),
        "diverged_step": steps(diverged_step),
        "last_step": int(last_step.max()),
        "mean_accuracy": float(best.mean()),
        "std_accuracy": float(best.std(ddof=1)) if len(seeds) > 1 else None,
        "peak_accuracy": float(best.max()),
        "num_converged": num_converged,
        "share_converged": num_converged / len(seeds),
        "share_converged_interval": list(wilson_interval(num_converged, len(seeds))),
        "median_solved_step": float(np.median(reached)) if len(reached) else None,
        "params": lam_params + other_params,
        "lam_params": lam_params,
        "lam_params_percent": 100 * lam_params / other_params,
    }


def table(variants: dict[str, dict[str, Any]], style: str = "github") -> str:
    """The summaries of several variants side by side, as a table in one of tabulate's styles."""
    any_diverged = any(step is not None for s in variants.values() for step in s["diverged_step"])
    rows = []
    for name, s in variants.items():
        row = {"variant": name, "seeds": len(s["seeds"])}
        row |= columns_of(s)
        if any_diverged:
            row["diverged"] = sum(step is not None for step in s["diverged_step"])
        rows.append(row)
    return tabulate(rows, headers="keys", tablefmt=style, disable_numparse=True)


def columns_of(s: dict[str, Any]) -> dict[str, str]:
    """One variant's summary as cells to be read, by column."""
    return _language_columns(s) if "predicts" in s else _recall_columns(s)


def mean_and_std(s: dict[str, Any]) -> str:
    """ "84.7 ± 30.1": a summary's accuracy in %; of one seed without ±."""
    spread = "" if s["std_accuracy"] is None else f" ± {100 * s['std_accuracy']:.1f}"
    return f"{100 * s['mean_accuracy']:.1f}{spread}"


def _recall_columns(s: dict[str, Any]) -> dict[str, str]:
    low, high = s["share_converged_interval"]
    reached = sum(step is not None for step in s["solved_step"])
    median = f"; {s['median_solved_step']:.0f}" if reached else ""
    share = f"{s['num_converged']}/{len(s['seeds'])} = {s['share_converged']:.2f} [{low:.2f}, {high:.2f}]"
    return {
        "accuracy %, mean ± std": mean_and_std(s),
        "peak %": f"{100 * s['peak_accuracy']:.1f}",
        f"share ≥ {CONVERGED_ACCURACY:.0%} [95 % interval]": share,
        f"seeds ≥ {SOLVED_ACCURACY:.0%}; median step": f"{reached}/{len(s['seeds'])}{median}",
        "λ adds": f"{s['lam_params_percent']:.2f} %",
    }


def _language_columns(s: dict[str, Any]) -> dict[str, str]:
    def mean_perplexity(losses):
        perplexity = np.exp(np.asarray([np.nan if x is None else x for x in losses], np.float64))
        spread = f" ± {perplexity.std(ddof=1):.2f}" if len(perplexity) > 1 else ""
        return f"{perplexity.mean():.2f}{spread}"

    return {
        "predicts": s["predicts"],
        "validation perplexity, mean ± std": mean_perplexity(s["best_loss"]),
        "best": f"{np.exp(np.nanmin(np.asarray(s['best_loss'], np.float64))):.2f}",
        "test perplexity": mean_perplexity(s["test_loss"]),
        "at step": f"{np.median([step for step in s['best_step'] if step is not None] or [np.nan]):.0f}",
        "λ adds": f"{s['lam_params_percent']:.4f} %",
        "tokens/s": "–" if s["tokens_per_second"] is None else f"{s['tokens_per_second']:,.0f}",
    }
