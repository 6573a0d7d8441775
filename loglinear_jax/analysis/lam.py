"""What is λ, and how input-dependent is it? Over the tokens of a sequence, its mean by head and level, what it has learned
apart from its input, and its variation over tokens."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import numpy as np
from jaxtyping import Bool, Float, Int
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from loglinear_jax.analysis import paper, style
from loglinear_jax.analysis.lam_values import layers_that, static_lam
from loglinear_jax.analysis.paper import describe_run
from loglinear_jax.analysis.section import BySeed, Context, Section
from loglinear_jax.analysis.table import Table, mean_and_std
from loglinear_jax.fenwick import occupied_levels
from loglinear_jax.lam import lam_traits
from loglinear_jax.runs.loading import Run, TrainedVariant
from loglinear_jax.tasks import CONVERGED_ACCURACY

MOST_ROWS_OF_PANEL = 12  # layers · heads: above them each variant has a figure of its own


# --- Figures ---------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Panel:
    """One heatmap of λ under a title.

    values: [levels, positions] or, by head, [layers, heads, levels]. used: cells that have an effect; others are faded.
    marks: positions by their names. layers: their numbers, if they are not all.
    """

    values: Float[np.ndarray, "*shape"]
    title: str
    used: Bool[np.ndarray, "*shape"] | None = None
    marks: Mapping[str, int] = dataclasses.field(default_factory=dict)
    layers: Sequence[int] | None = None


def draw_lam_over_tokens(panels: Sequence[Sequence[Panel]], message: str) -> Figure:
    """Draw heatmaps of λ, levels × positions, each with its own colour scale.

    Where a level's bucket is empty λ has no effect: those cells are faded. Marks are red dashed lines.

    Args:
        panels: in rows, of which long ones are broken after three.
        message: the figure's title.
    """
    panels = _at_most(3, panels)
    columns = max(map(len, panels))
    levels = max(panel.values.shape[0] for row in panels for panel in row)
    height = len(panels) * (1.5 + 0.13 * levels) + 0.7
    figure, axes = style.new_figure(style.FULL_WIDTH, height, len(panels), columns)
    for row_axes, row in zip(axes, panels, strict=True):
        style.hide(row_axes[len(row) :])
        for axis, panel in zip(row_axes, row, strict=False):
            _draw_over_tokens(axis, panel, figure.get_figwidth() / columns - 0.5)
    style.title(figure, f"{message}\ncolour: λ (faded where the level's bucket is empty, so that λ has no effect)")
    return figure


def _draw_over_tokens(axis: Axes, panel: Panel, width: float) -> None:
    levels, length = panel.values.shape
    used = np.ones_like(panel.values, bool) if panel.used is None else panel.used
    extent = (-0.5, length - 0.5, -0.5, levels - 0.5)
    how = dict(origin="lower", extent=extent, interpolation="nearest", alpha=np.where(used, 1.0, 0.22))
    _heatmap(axis, panel.values, used, pad=0.01, aspect=12, label="λ", **how)
    for number, (name, position) in enumerate(sorted(panel.marks.items(), key=lambda mark: mark[1])):
        axis.axvline(position - 0.5, color=style.MARK, linestyle="--", linewidth=1.4)
        left = position > 0.5 * length  # of its line, where the end is near on the right
        at = dict(
            xycoords=("data", "axes fraction"), textcoords="offset points", fontsize=7, color=style.MARK, va="bottom"
        )
        at |= dict(xytext=(-2 if left else 2, 2 + 9 * (number % 2)), ha="right" if left else "left")
        axis.annotate(f"{name} →" if left else f"← {name}", (position - 0.5, 1.0), **at)
    axis.set_title(style.wrap(panel.title, width, 9), fontsize=9, pad=6 + 9 * min(len(panel.marks), 2))
    axis.set(xlabel="position (token)", ylabel="level")
    axis.xaxis.get_major_locator().set_params(nbins=6, integer=True)
    axis.set_yticks(range(0, levels, 1 if levels <= 8 else 2))
    axis.tick_params(labelsize=8)


def _heatmap(axis: Axes, values: np.ndarray, shown: np.ndarray, pad: float, aspect: int, label: str = "", **how):
    """An image with its bar. shown: the values that the colours span, which do not show the last bits of a constant λ."""
    found = values[shown] if shown.any() else np.array([0.0, 1.0])
    low, high = float(found.min()), float(found.max())
    smallest = 0.02 * max(abs(low), abs(high), 1e-6)
    if high - low < smallest:
        low, high = (low + high - smallest) / 2, (low + high + smallest) / 2
    image = axis.imshow(values, cmap="viridis", aspect="auto", vmin=low, vmax=high, **how)
    bar = axis.figure.colorbar(image, ax=axis, pad=pad, aspect=aspect, label=label)
    bar.solids.set_alpha(1)
    bar.ax.tick_params(labelsize=8)
    bar.ax.yaxis.get_major_locator().set_params(nbins=4)
    return image


def draw_lam_by_head(panels: Sequence[Sequence[Panel]], message: str) -> Figure:
    """Draw heatmaps of (layers · heads) × levels with the numbers in the cells, a line between layers.

    Args:
        panels: in rows; values are [layers, heads, levels]. Levels of which no panel has a value are left out.
        message: the figure's title.
    """
    levels = max(1 + np.flatnonzero(np.isfinite(p.values).any((0, 1)))[-1:].sum() for row in panels for p in row)
    names_width, bar_width = 0.9, 0.65  # inches
    wanted = max(0.27 * levels, 1.9) + bar_width
    panels = _at_most(int(np.clip((style.FULL_WIDTH - names_width) // wanted, 1, 3)), panels)
    columns = max(map(len, panels))
    width = min(max(wanted * columns + names_width, 5.5), style.FULL_WIDTH)
    heights = [0.3 * max(p.values.shape[0] * p.values.shape[1] for p in row) + 1.3 for row in panels]
    grid = {"height_ratios": heights}
    figure, axes = style.new_figure(width, sum(heights) + 0.7, len(panels), columns, gridspec_kw=grid)
    numbers = ((width - names_width) / columns - bar_width) / levels > 0.24  # inches a cell: room for them
    for row_axes, row in zip(axes, panels, strict=True):
        style.hide(row_axes[len(row) :])
        for axis, panel in zip(row_axes, row, strict=False):
            _draw_by_head(axis, panel, levels, numbers, axis is row_axes[0])
            axis.set_title(style.wrap(panel.title, (width - names_width) / columns - 0.2, 9), fontsize=9)
    style.title(figure, message)
    return figure


def _draw_by_head(axis: Axes, panel: Panel, levels: int, numbers: bool, names: bool) -> None:
    """numbers: in the cells. names: of layers and heads, at the left."""
    layers, heads, _ = panel.values.shape
    values = panel.values[..., :levels].reshape(layers * heads, -1)
    image = _heatmap(axis, values, np.isfinite(values), pad=0.01, aspect=14)
    for (i, j), value in np.ndenumerate(values):
        if numbers and np.isfinite(value):
            color = "w" if style.is_dark(image.to_rgba(value)) else "k"
            axis.text(j, i, short(float(value)), ha="center", va="center", fontsize=7, color=color)
    rows = [f"layer {layer} head {head}" for layer in panel.layers or range(layers) for head in range(heads)]
    axis.set_yticks(range(layers * heads), rows if names else [""] * len(rows))
    for layer in range(1, layers):
        axis.axhline(layer * heads - 0.5, color="w", linewidth=3)
    axis.set_xticks(range(0, values.shape[1], 1 if numbers else 4))
    axis.tick_params(labelsize=8)
    axis.set_xlabel("level", fontsize=9)


def short(value: float) -> str:
    """Formats λ for a cell."""
    return f"{value:.2f}" if abs(value) < 10 else f"{value:.3g}"


def _at_most(columns: int, panels: Sequence[Sequence[Panel]]) -> list[Sequence[Panel]]:
    """The same rows, those that are too long broken."""
    return [row[start : start + columns] for row in panels for start in range(0, len(row), columns)]


class Heatmaps(Section):
    """A section with one kind of figure, of a few seeds of every variant with λ.

    WHAT: is shown. STEM: of the files. NOTE: below the figure.
    """

    READS_CHECKPOINTS = True
    WHAT: ClassVar[str]
    STEM: ClassVar[str]
    NOTE: ClassVar[str] = ""
    draw = staticmethod(draw_lam_by_head)

    def panels(self, trained: TrainedVariant, layers: list[int]) -> list[Panel]:
        """Returns a panel for each seed to draw; none if the variant has no such thing."""
        raise NotImplementedError

    def find(self, run: Run, trained: TrainedVariant) -> list[Panel] | None:
        layers = layers_that(trained, "has_lam")
        return (self.panels(trained, layers) or None) if layers else None

    def show_run(self, run: Run, found: dict[str, list[Panel]]) -> None:
        rows = list(found.values())
        by_head = [np.prod(panel.values.shape[:2]) for row in rows for panel in row if panel.values.ndim == 3]
        large = max(by_head, default=0) > MOST_ROWS_OF_PANEL
        for index, some in enumerate([[row] for row in rows] if large else [rows], 1):
            figure = self.draw(some, f"{style.sentence(self.WHAT)}; {describe_run(run)}")
            shown_as = self.WHAT + (f", {index} of {len(rows)}" if large else "")
            self.add(figure, self.STEM + (f"-{index}" if large else ""), run, shown_as, note=self.NOTE)

    def titled(self, trained: TrainedVariant, seed: int) -> str:
        return f"{style.describe_variant(trained.variant)}; {self.context.describe_seed(trained, seed)}"


class OverTokens(Heatmaps):
    """λ [levels, positions] of one example, at the chosen layer and head."""

    NAME, TITLE = "lam", "λ over tokens"
    WHAT, STEM = "λ over the tokens of one sequence", "lam-tokens"
    draw = staticmethod(draw_lam_over_tokens)

    def panels(self, trained: TrainedVariant, layers: list[int]) -> list[Panel]:
        context, panels = self.context, []
        layer, head = context.layer_and_head(trained, layers)
        for seed in context.drawn_seeds(trained):
            lam = context.mixer_values(trained, seed)[layer]["lam_value"][context.choices.example, :, head]
            used = occupied_levels(np.arange(lam.shape[0]), lam.shape[1]).T
            name = f"{self.titled(trained, seed)}; layer {layer}, head {head}"
            panels.append(Panel(lam.T, name, used, trained.task.marks()))
        return panels


class Means(Heatmaps):
    """λ by layer, head and level, on average over tokens."""

    NAME, TITLE = "lam", "λ by head and level"
    WHAT, STEM = "mean of λ where the level is used", "lam-mean"

    def panels(self, trained: TrainedVariant, layers: list[int]) -> list[Panel]:
        found = dependence_of(self.context, trained, layers, self.context.drawn_seeds(trained))
        return [Panel(of["mean"], self.titled(trained, seed), layers=layers) for seed, of in found.items()]


class Static(Heatmaps):
    """What λ has learned apart from its input, by layer, head and level."""

    NAME, TITLE = "lam", "λ by head and level"
    WHAT, STEM = "static part of λ", "lam-static"
    NOTE = (
        "For linear (the paper's baseline): the weights Λ, as the paper's figures show; otherwise λ where its input is 0. A "
        "content-aware λ has no such part."
    )

    def panels(self, trained: TrainedVariant, layers: list[int]) -> list[Panel]:
        mixers, panels = trained.model.settings.mixers, []
        if lam_traits(mixers[layers[0] % len(mixers)].lam).needs_scores:
            return []
        for seed in self.context.drawn_seeds(trained):
            values, what = static_lam(trained, seed, self.context.choices.which)
            panels.append(Panel(values, f"{what}\n{self.titled(trained, seed)}", layers=layers))
        return panels


# --- How it depends on the input -------------------------------------------------------------------------------------


def input_dependence(
    lam: Float[np.ndarray, "layers num T H L"], roles: Int[np.ndarray, "num T"], num_roles: int
) -> dict[str, Float[np.ndarray, "layers H L"] | Float[np.ndarray, "layers H"]]:
    """Measure how λ varies over tokens, for each layer, head and level.

    Args:
        lam: λ at every token.
        roles: the role of every token in its task.
        num_roles: how many roles there are.

    Returns:
        "mean", "std", "min", "max" [layers, H, L] over the tokens at which the level is used. "role_share" [layers, H,
        L]: the share of the variance between token roles (η²). "role_mean" [roles, layers, H, L]: the mean over the tokens
        of each role. "entropy" [layers, H]: of λ / Σ λ over the used levels, in bits, mean over tokens. nan for a level
        that is never used; role_share also for one that never varies or is used in only one role.
    """
    used = occupied_levels(np.arange(lam.shape[2]), lam.shape[-1])[:, None]  # T, 1, L
    where_used = np.ma.masked_array(lam.astype(np.float64), np.broadcast_to(~used, lam.shape))
    over = (1, 2)  # sequences and positions
    mean, std = where_used.mean(over), where_used.std(over)
    num, between, found, role_means = where_used.count(over), np.zeros(mean.shape), np.zeros(mean.shape, int), []
    for role in range(num_roles):
        others = np.broadcast_to((roles != role)[..., None, None], lam.shape)
        of_role = np.ma.masked_array(where_used.data, where_used.mask | others)
        role_means.append(of_role.mean(over).filled(np.nan))
        found += of_role.count(over) > 0
        between += (of_role.count(over) * (of_role.mean(over) - mean) ** 2).filled(0)
    total = (std**2 * num).filled(0)
    varies = (found > 1) & (total > 1e-12 * (mean.filled(0) ** 2 + 1e-12) * num)
    share = np.where(used, lam, 0).astype(np.float64)
    share /= np.maximum(share.sum(-1, keepdims=True), 1e-30)
    bits = -np.sum(share * np.log2(np.maximum(share, 1e-30)), axis=-1)
    result = {"mean": mean, "std": std, "min": where_used.min(over), "max": where_used.max(over)}
    result = {name: np.ma.filled(x, np.nan) for name, x in result.items()}
    return result | {
        "role_share": np.where(varies, between / np.where(varies, total, 1), np.nan),
        "role_mean": np.stack(role_means),
        "entropy": bits.mean(over),
    }


def relative_variation(dependence: Mapping[str, np.ndarray]) -> tuple[float, float]:
    """Summarise in two numbers how much λ varies over tokens.

    Args:
        dependence: `input_dependence`.

    Returns:
        Σ std over tokens / Σ mean, with sums over layers, heads and used levels, so that levels with larger λ count
        more; and the median of std / mean, in which all levels count the same.
    """
    std, mean = dependence["std"], dependence["mean"]
    return float(np.nansum(std) / np.nansum(mean)), float(np.nanmedian(std / mean))


def dependence_table(
    by_variant: Mapping[str, BySeed], converged: Mapping[str, Mapping[int, bool]], accuracy: str, title: str
) -> Table:
    """Tabulate how input-dependent each variant's λ is, for all seeds, and for those that reached 90 % and those that did
    not.

    Args:
        by_variant: for each variant, by seed, `input_dependence`, the numbers of its "layers" and the names of its "roles".
        converged: whether each seed reached 90 %.
        accuracy: by which accuracy.
        title: of the table.

    Returns:
        The table; its CSV has every layer, head and level. Seeds whose λ is not finite are counted and left out.
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
                for role, of_role in zip(d["roles"], d["role_mean"], strict=True):
                    numbers[f"mean at {role}"] = float(of_role[layer, head, level])
                long.append(of_seed | place | numbers | {"entropy_of_head_bits": float(d["entropy"][layer, head])})
    low, high = paper.BASELINE_LAM_RANGE
    note = (
        "Over the tokens at which a level's bucket is not empty. Σ std / Σ mean: sums over layers, heads and levels, mean ± "
        "std over seeds. The median of std / mean gives levels with a small λ the same weight. The paper calls its "
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
        "level of the largest mean (seeds)": "; ".join(
            f"layer {layer}: " + ", ".join(f"{level} ({seeds})" for level, seeds in sorted(Counter(levels).items()))
            for layer, levels in zip(found[0]["layers"], zip(*map(_largest_levels, found), strict=True), strict=True)
        ),
    }


def _largest_levels(dependence: Mapping[str, np.ndarray]) -> list[int]:
    """The level at which each layer's λ, averaged over tokens that use the level and over heads, is largest."""
    return np.nan_to_num(dependence["mean"]).mean(axis=1).argmax(axis=-1).tolist()


class Dependence(Section):
    """The section `dependence`: λ of all sequences, of every seed."""

    NAME = "dependence"
    TITLE = "How input-dependent is λ?"
    READS_CHECKPOINTS = True

    def find(self, run: Run, trained: TrainedVariant) -> tuple[BySeed, dict[int, bool], str] | None:
        """Returns `input_dependence` by seed, whether the seed reached 90 %, and by which accuracy."""
        if not (layers := layers_that(trained, "has_lam")):
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
    """Computes `input_dependence` of these seeds over the report's sequences, with "layers" and "roles" as
    `dependence_table` takes them."""
    tokens, _ = context.sequences(trained)
    roles, num_roles = trained.task.roles(tokens), len(trained.task.ROLES)

    def compute(seed: int) -> dict[str, np.ndarray]:
        values = context.mixer_values(trained, seed)
        lam = np.stack([values[layer]["lam_value"] for layer in layers])
        of_tokens = {"layers": np.array(layers), "roles": np.array(trained.task.ROLES)}
        return input_dependence(lam, roles, num_roles) | of_tokens

    return context.over_seeds(trained, "dependence", seeds, compute)
