"""How input-dependent is λ? Its variation over tokens, in a table and by level."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from jaxtyping import Float, Int
from matplotlib.figure import Figure

from loglinear_jax.analysis import paper, style
from loglinear_jax.analysis.cells import mean_and_std
from loglinear_jax.analysis.experiments import describe_run
from loglinear_jax.analysis.section import Context, Section
from loglinear_jax.analysis.table import Table
from loglinear_jax.fenwick import occupied_levels
from loglinear_jax.runs.loading import Run, TrainedVariant
from loglinear_jax.tasks import CONVERGED_ACCURACY


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


def relative_variation(dependence: dict[str, np.ndarray]) -> tuple[float, float]:
    """Two numbers for "λ hardly varies": Σ std over tokens / Σ mean, the sums over layers, heads and used levels, so that
    levels count by their λ; and the median of std / mean, in which all count the same."""
    std, mean = dependence["std"], dependence["mean"]
    return float(np.nansum(std) / np.nansum(mean)), float(np.nanmedian(std / mean))


def dependence_table(
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
            parts["converged"] = [seed for seed, flag in flags.items() if flag]
            parts["others"] = [seed for seed, flag in flags.items() if not flag]
        if left_out := len(seeds) - len(flags):
            parts[f"not finite: {left_out}"] = []
        for name, chosen in parts.items():
            row = {"variant": variant, "seeds": f"{name} ({len(chosen)})"}
            rows.append(row | (_dependence_cells([seeds[seed] for seed in chosen]) if chosen else {}))
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


def draw_dependence(
    by_variant: Mapping[str, Mapping[int, Mapping[str, np.ndarray]]], message: str, subject: str
) -> Figure:
    """For each level: std of λ over tokens relative to its mean, and the share of that variance between token roles.

    by_variant: for each variant, an `input_dependence` by seed. Lines are means over layers, heads and seeds; dots are seeds.
    message: the figure's title; subject: what it is of.
    """
    panels = [
        (lambda d: 100 * d["std"] / d["mean"], "std over tokens / mean of λ (%)"),
        (lambda d: 100 * d["role_share"], "share of variance between roles (%)"),
    ]
    if not any(np.isfinite(d["role_share"]).any() for seeds in by_variant.values() for d in seeds.values()):
        del panels[1]
    figure, (axes,) = style.new_figure(2.0 + 3.7 * len(panels), 4.0, 1, len(panels))
    for axis, (value, label) in zip(axes, panels, strict=True):
        for variant, (color, marker) in style.looks_of(by_variant).items():
            seeds = np.array([_nanmean(value(d), (0, 1)) for d in by_variant[variant].values()])
            used = [_nanmean(d["mean"], (0, 1)) for d in by_variant[variant].values()]
            levels = np.flatnonzero(np.isfinite(used).any(0))
            seeds = seeds[:, levels]
            axis.plot(np.tile(levels, (len(seeds), 1)).T, seeds.T, ".", color=color, alpha=0.35, markersize=5)
            how = dict(color=color, marker=marker, markersize=5, linewidth=2.2, label=style.describe_variant(variant))
            axis.plot(levels, _nanmean(seeds, 0), **how)
        axis.set(xlabel="level", ylabel=label, xticks=levels)
        axis.set_ylim(bottom=0)
        style.open_frame(axis)
    style.legend_below(figure, style.handles_of(axes[0]))
    style.title(figure, f"{message}\n{subject}\nlines: means over layers, heads and seeds; dots: seeds")
    return figure


def _nanmean(values: np.ndarray, axis: Any) -> np.ndarray:
    counted = np.isfinite(values)
    total = np.where(counted, values, 0).sum(axis)
    return np.where(counted.any(axis), total / np.maximum(counted.sum(axis), 1), np.nan)


class Dependence(Section):
    """From λ of all sequences, of every seed."""

    NAME = "dependence"
    TITLE = "How input-dependent is λ?"
    READS_CHECKPOINTS = True

    def find(self, run: Run, trained: TrainedVariant) -> tuple[dict[int, dict], dict[int, bool], str] | None:
        """(`input_dependence` by seed, whether the seed converged, by which accuracy)."""
        if not trained.model.settings.has_lam:
            return None
        found = dependence_of(self.context, trained, self.context.averaged_seeds(trained))
        accuracy, shown_as = self.context.accuracy(run, trained)
        return found, {seed: bool(accuracy[seed] >= CONVERGED_ACCURACY) for seed in found}, shown_as

    def show_run(self, run: Run, found: dict[str, Any]) -> None:
        dependence = {variant: of_seeds for variant, (of_seeds, _, _) in found.items()}
        converged = {variant: flags for variant, (_, flags, _) in found.items()}
        shown_as = next(iter(found.values()))[2]
        table = dependence_table(dependence, converged, shown_as, f"{describe_run(run)}: variation of λ")
        self.add(table, "lam-dependence", run, "variation of λ")
        figure = draw_dependence(dependence, _message(dependence), describe_run(run))
        self.add(figure, "lam-variation", run, "variation of λ by level")


def dependence_of(context: Context, trained: TrainedVariant, seeds: list[int]) -> dict[int, dict[str, np.ndarray]]:
    """`input_dependence` of these seeds over the report's sequences."""
    tokens, _ = context.sequences(trained)
    roles, num_roles = trained.task.roles(tokens), len(trained.task.ROLES)

    def compute(seed: int) -> dict[str, np.ndarray]:
        return input_dependence(context.lam_of(trained, seed), roles, num_roles)

    sample = hashlib.sha256(np.ascontiguousarray([tokens, roles]).tobytes()).hexdigest()[:16]
    return context.over_seeds(trained, "dependence", {"sample": sample}, seeds, compute)


def _message(found: dict[str, dict[int, dict]]) -> str:
    variation = {
        variant: np.mean([relative_variation(of_seed)[0] for of_seed in seeds.values()])
        for variant, seeds in found.items()
    }
    shown = [f"{style.describe_variant(variant)} {100 * value:.0f} %" for variant, value in variation.items()]
    return f"Variation of λ over tokens, relative to its mean: {', '.join(shown)}"
