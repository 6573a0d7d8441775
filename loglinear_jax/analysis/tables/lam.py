"""Tables of λ: how much it depends on its input, and how often it finds the answers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from loglinear_jax.analysis import paper
from loglinear_jax.analysis.lam_values import relative_variation
from loglinear_jax.analysis.looks import best_heads
from loglinear_jax.analysis.tables.table import Table
from loglinear_jax.runs.cells import mean_and_std
from loglinear_jax.tasks import CONVERGED_ACCURACY


def dependence(
    by_variant: Mapping[str, Mapping[int, Mapping[str, np.ndarray]]],
    converged: Mapping[str, Mapping[int, bool | np.bool_]],
    accuracy: str,
    title: str,
) -> Table:
    """How input-dependent each variant's λ is: one row for all seeds, and for those that converged and those that did not.

    by_variant: for each variant, an `input_dependence` by seed. converged: whether that seed did. accuracy: by which, such as
    "test accuracy". The CSV has every layer, head and level. Seeds whose λ is not finite are counted, and left out.
    """
    rows, raw = [], []
    for variant, seeds in by_variant.items():
        flags = {seed: bool(converged[variant][seed]) for seed, d in seeds.items() if np.isfinite(d["entropy"]).all()}
        parts = {"all": list(flags)}
        if len(set(flags.values())) == 2:
            parts |= {
                name: [s for s, flag in flags.items() if flag == want]
                for name, want in (("converged", True), ("others", False))
            }
        if left_out := len(seeds) - len(flags):
            parts |= {f"not finite: {left_out}": []}
        for name, chosen in parts.items():
            row = {"variant": variant, "seeds": f"{name} ({len(chosen)})"}
            if chosen:
                row |= _dependence_cells([seeds[seed] for seed in chosen])
            rows.append(row)
        for seed, d in seeds.items():
            for at in np.ndindex(d["mean"].shape):
                raw.append(
                    {"variant": variant, "seed": seed, "converged": bool(converged[variant][seed])}
                    | dict(zip(("layer", "head", "level"), at, strict=True))
                    | {name: float(d[name][at]) for name in ("mean", "std", "min", "max", "role_share")}
                    | {"entropy_of_head_bits": float(d["entropy"][at[:2]])}
                )
    low, high = paper.BASELINE_LAM_RANGE
    note = (
        "Over the tokens at which a level's bucket is not empty. Σ std / Σ mean: sums over layers, heads and levels, mean ± "
        "std over seeds; beside it the median of std / mean, in which levels of small λ count as much. The paper calls its "
        f"baseline (linear) input-independent, with λ from {low} to {high}."
    )
    if any(row["seeds"].startswith("converged") for row in rows):
        note += f" Converged: {accuracy} of at least {100 * CONVERGED_ACCURACY:.0f} %."
    return Table(title, rows, raw, note)


def _dependence_cells(found: Sequence[Mapping[str, np.ndarray]]) -> dict[str, str]:
    variation = 100 * np.array([relative_variation(d) for d in found])
    shares = [share for d in found if np.isfinite(share := _pooled_share(d))]
    low, high = min(np.nanmin(d["min"]) for d in found), max(np.nanmax(d["max"]) for d in found)
    return {
        "Σ std over tokens / Σ mean of λ": f"{mean_and_std(variation[:, 0])} %",
        "median std / mean": f"{variation[:, 1].mean():.1f} %",
        "λ from – to": f"{low:.3g} – {high:.3g}",
        "of the variance between roles": f"{100 * np.mean(shares):.0f} %" if shares else "–",
        "entropy over levels, bits": f"{np.mean([d['entropy'].mean() for d in found]):.2f}",
    }


def _pooled_share(d: Mapping[str, np.ndarray]) -> float:
    """The share of the variance over tokens that lies between roles, over all layers, heads and levels."""
    total = np.where(np.isfinite(d["role_share"]), d["std"] ** 2, 0)
    return float(np.nansum(d["role_share"] * total) / total.sum()) if total.sum() else np.nan


def looks(
    by_variant: Mapping[str, Mapping[int, Mapping[str, np.ndarray]]],
    accuracy: Mapping[str, Mapping[int, float]],
    by_position: float,
    title: str,
) -> Table:
    """How often each variant's λ finds the answers: one row for each layer, of which each seed's best head counts.

    by_variant: for each variant, a `looks_at_answers` by seed; accuracy: of that seed, from 0 to 1. by_position: of
    `found_by_position`. The CSV has every seed, layer and head. Seeds whose λ is not finite are counted, and left out.
    """
    rows, raw = [], []
    for variant, seeds in by_variant.items():
        finite, best = best_heads(seeds)
        row = {"variant": variant, "seeds": str(len(finite))}
        if len(finite) < len(seeds):
            row["seeds"] += f", not finite: {len(seeds) - len(finite)}"
        if not finite:
            rows.append(row)
        for layer in range(best["largest"].shape[1] if finite else 0):
            cells = {"answers at the largest λ": "largest", "λ there / Σ λ": "weight"}
            found = {name: f"{mean_and_std(100 * best[key][:, layer])} %" for name, key in cells.items()}
            rows.append(row | {"layer": str(layer)} | found)
        for seed, of_seed in seeds.items():
            for layer, head in np.ndindex(of_seed["largest"].shape):
                raw.append(
                    {"variant": variant, "seed": seed, "accuracy": float(accuracy[variant][seed]), "layer": layer, "head": head}
                    | {name: float(values[layer, head]) for name, values in of_seed.items()}
                    | {"by_position": by_position}
                )  # fmt: skip
    note = (
        "At the queries: the share of them at which λ of the bucket with the answer is larger than λ of every other occupied "
        "level; and the mean share of that λ in the sum over the occupied levels. Of each layer the head with the largest "
        "first number, mean ± std over seeds. The best rule that sees the position alone, and picks the level that most often "
        f"holds the answer there, finds {100 * by_position:.1f} %."
    )
    return Table(title, rows, raw, note)
