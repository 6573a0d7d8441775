"""How input-dependent is λ? Its variation over tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from jaxtyping import Float, Int

from loglinear_jax.analysis import paper
from loglinear_jax.analysis.experiments import describe_run
from loglinear_jax.analysis.section import Context, Section
from loglinear_jax.analysis.table import Table, mean_and_std
from loglinear_jax.fenwick import occupied_levels
from loglinear_jax.runs.loading import Run, TrainedVariant
from loglinear_jax.tasks import CONVERGED_ACCURACY

BySeed = Mapping[int, Mapping[str, np.ndarray]]


def input_dependence(
    lam: Float[np.ndarray, "layers num T H L"], roles: Int[np.ndarray, "num T"], num_roles: int
) -> dict[str, Float[np.ndarray, "layers H L"] | Float[np.ndarray, "layers H"]]:
    """How λ varies over tokens, for each layer, head and level: "mean", "std", "min", "max" over the tokens at which the
    level is used, and "role_share", the share of that variance which lies between token roles (η²); nan for a level that is
    never used, or (role_share) never varies or is used in one role only. And "entropy" over levels, in bits, of λ / Σ λ
    over the used levels: the mean over tokens, for each layer and head.
    """
    layers, num, length, heads, levels = lam.shape
    used = occupied_levels(np.arange(length), levels)
    lam = lam.astype(np.float64)
    result = {name: np.full((layers, heads, levels), np.nan) for name in ("mean", "std", "min", "max", "role_share")}
    for level in range(levels):
        at = used[:, level]
        if not at.any():
            continue
        values = lam[..., level][:, :, at]  # layers, num, positions, heads
        mean = values.mean((1, 2))
        total = ((values - mean[:, None, None]) ** 2).sum((1, 2))
        between, found = np.zeros_like(total), 0
        for role in range(num_roles):
            here = roles[:, at] == role
            if here.any():
                found += 1
                of_role = values[:, here]  # layers, tokens, heads
                between += of_role.shape[1] * (of_role.mean(1) - mean) ** 2
        result["mean"][..., level] = mean
        result["std"][..., level] = np.sqrt(total / (num * at.sum()))
        result["min"][..., level], result["max"][..., level] = values.min((1, 2)), values.max((1, 2))
        varies = (found > 1) & (total > 1e-12 * (mean**2 + 1e-12) * num * at.sum())
        result["role_share"][..., level] = np.where(varies, between / np.where(varies, total, 1), np.nan)
    share = np.where(used[:, None, :], lam, 0)
    share /= np.maximum(share.sum(-1, keepdims=True), 1e-30)
    bits = -np.sum(share * np.log2(np.maximum(share, 1e-30)), axis=-1)
    return result | {"entropy": bits.mean((1, 2))}


def relative_variation(dependence: Mapping[str, np.ndarray]) -> tuple[float, float]:
    """Two numbers for "λ hardly varies": Σ std over tokens / Σ mean, the sums over layers, heads and used levels, so that
    levels count by their λ; and the median of std / mean, in which all count the same."""
    std, mean = dependence["std"], dependence["mean"]
    return float(np.nansum(std) / np.nansum(mean)), float(np.nanmedian(std / mean))


def dependence_table(
    by_variant: Mapping[str, BySeed], converged: Mapping[str, Mapping[int, bool]], accuracy: str, title: str
) -> Table:
    """How input-dependent each variant's λ is: one row for all seeds, and for those that converged and those that did not.

    by_variant: for each variant, by seed, `input_dependence` and the numbers of its "layers". converged: whether that seed did,
    by which accuracy. The CSV has every layer, head and level. Seeds whose λ is not finite are counted, and left out.
    """
    rows, long = [], []
    for variant, seeds in by_variant.items():
        flags = {seed: bool(converged[variant][seed]) for seed, d in seeds.items() if np.isfinite(d["entropy"]).all()}
        parts = {"all": list(flags)}
        if len(set(flags.values())) == 2:
            parts["converged"] = [seed for seed, flag in flags.items() if flag]
            parts["others"] = [seed for seed, flag in flags.items() if not flag]
        if left_out := len(seeds) - len(flags):
            parts[f"not finite: {left_out}"] = []
        for name, chosen in parts.items():
            row = {"variant": variant, "seeds": f"{name} ({len(chosen)})"}
            rows.append(row | (_dependence_cells([seeds[seed] for seed in chosen]) if chosen else {}))
        for seed, d in seeds.items():
            of_seed = {"variant": variant, "seed": seed, "converged": bool(converged[variant][seed])}
            for layer, head, level in np.ndindex(d["mean"].shape):
                place = {"layer": int(d["layers"][layer]), "head": head, "level": level}
                names = ("mean", "std", "min", "max", "role_share")
                numbers = {name: float(d[name][layer, head, level]) for name in names}
                long.append(of_seed | place | numbers | {"entropy_of_head_bits": float(d["entropy"][layer, head])})
    low, high = paper.BASELINE_LAM_RANGE
    note = (
        "Over the tokens at which a level's bucket is not empty. Σ std / Σ mean: sums over layers, heads and levels, mean ± "
        "std over seeds; beside it the median of std / mean, in which levels of small λ count as much. The paper calls its "
        f"baseline (linear) input-independent, with λ from {low} to {high}."
    )
    if any(row["seeds"].startswith("converged") for row in rows):
        note += f" Converged: {accuracy} of at least {100 * CONVERGED_ACCURACY:.0f} %."
    return Table(title, rows, note, long=long)


def _dependence_cells(found: Sequence[Mapping[str, np.ndarray]]) -> dict[str, str]:
    variation, shares = 100 * np.array([relative_variation(d) for d in found]), []
    for d in found:  # the share between roles over all layers, heads and levels
        total = np.where(np.isfinite(d["role_share"]), d["std"] ** 2, 0)
        if total.sum():
            shares.append(float(np.nansum(d["role_share"] * total) / total.sum()))
    low, high = min(np.nanmin(d["min"]) for d in found), max(np.nanmax(d["max"]) for d in found)
    return {
        "Σ std over tokens / Σ mean of λ": f"{mean_and_std(variation[:, 0])} %",
        "median std / mean": f"{variation[:, 1].mean():.1f} %",
        "λ from – to": f"{low:.3g} – {high:.3g}",
        "of the variance between roles": f"{100 * np.mean(shares):.0f} %" if shares else "–",
        "entropy over levels, bits": f"{np.mean([d['entropy'].mean() for d in found]):.2f}",
    }


class Dependence(Section):
    """From λ of all sequences, of every seed."""

    NAME = "dependence"
    TITLE = "How input-dependent is λ?"
    READS_CHECKPOINTS = True

    def find(self, run: Run, trained: TrainedVariant) -> tuple[BySeed, dict[int, bool], str] | None:
        """(`input_dependence` by seed, whether the seed converged, by which accuracy)."""
        if not (layers := self.layers(run, trained, "has_lam", "λ")):
            return None
        found = dependence_of(self.context, trained, layers, self.context.averaged_seeds(trained))
        accuracy, shown_as = self.context.accuracy(run, trained)
        return found, {seed: bool(accuracy[seed] >= CONVERGED_ACCURACY) for seed in found}, shown_as

    def show_run(self, run: Run, found: dict[str, Any]) -> None:
        by_variant, converged = ({variant: of[i] for variant, of in found.items()} for i in (0, 1))
        shown_as = next(iter(found.values()))[2]
        table = dependence_table(by_variant, converged, shown_as, f"{describe_run(run)}: variation of λ")
        self.add(table, "lam-dependence", run, "variation of λ")


def dependence_of(
    context: Context, trained: TrainedVariant, layers: list[int], seeds: list[int]
) -> dict[int, dict[str, np.ndarray]]:
    """`input_dependence` of these seeds over the report's sequences, and the numbers of the "layers"."""
    tokens, _ = context.sequences(trained)
    roles, num_roles = trained.task.roles(tokens), len(trained.task.ROLES)

    def compute(seed: int) -> dict[str, np.ndarray]:
        values = context.mixer_values(trained, seed)
        lam = np.stack([values[layer]["lam_value"] for layer in layers])
        return input_dependence(lam, roles, num_roles) | {"layers": np.array(layers)}

    return context.over_seeds(trained, "dependence", seeds, compute)
