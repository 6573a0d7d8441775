"""Figures. Each function draws one matplotlib Figure from arrays or runs; `save` writes it as PNG and SVG."""

from __future__ import annotations

import dataclasses
import os
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
from jaxtyping import Bool, Float
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from loglinear_jax.analysis.attention_rows import AttentionRow
from loglinear_jax.runs.loading import Run, read_run
from loglinear_jax.tasks import SOLVED_ACCURACY

# Okabe and Ito's colours, safe for the colour-blind: a λ has the same one in every figure.
COLORS = {
    "fixed": "#56B4E9",
    "linear": "#0072B2",
    "mlp_softmax": "#E69F00",
    "mlp_softplus": "#D55E00",
    "rope": "#009E73",
    "mixer=linear": "#CC79A7",
    "mixer=softmax": "#000000",
}
OTHER_COLORS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#D55E00", "#56B4E9", "#000000", "#999999")
MARK = "#D4002A"
DOTS_PER_INCH = 150
CELL_DIGITS = 2


def save(figure: Figure, stem: Path) -> list[Path]:
    """Writes stem.png and stem.svg."""
    paths = [stem.with_suffix(suffix) for suffix in (".png", ".svg")]
    with mpl.rc_context({"svg.hashsalt": "loglinear_jax"}):
        for path in paths:
            figure.savefig(path, dpi=DOTS_PER_INCH, metadata={"Date": None} if path.suffix == ".svg" else None)
    return paths


def describe_run(record: Run) -> str:
    """The task, the setting if it is `released`, and the label if there is one."""
    setting = "" if record.config.model.init_scheme == "paper" else ", released setting"
    return record.task.describe() + setting + (f" ({record.label})" if record.label else "")


def describe_variant(variant: str) -> str:
    """A variant's name for titles and legends."""
    names = {"mixer=softmax": "softmax attention", "mixer=linear": "linear attention, λ ≡ 1"}
    return names.get(variant, variant if "=" in variant else f"λ: {variant}")


def colors_of(variants: Iterable[str]) -> dict[str, str]:
    """A colour for each variant: its own if it has one, else the next that none of them has."""
    variants = list(variants)
    taken = {COLORS[v] for v in variants if v in COLORS}
    free = [color for color in OTHER_COLORS if color not in taken] or list(OTHER_COLORS)
    others = [v for v in variants if v not in COLORS]
    return {v: COLORS[v] if v in COLORS else free[others.index(v) % len(free)] for v in variants}


def _figure(width: float, height: float, rows: int = 1, columns: int = 1, **kwargs: Any) -> tuple[Figure, np.ndarray]:
    figure = Figure(figsize=(width, height), layout="constrained")
    return figure, figure.subplots(rows, columns, squeeze=False, **kwargs)


def _open_frame(axis: Axes) -> None:
    axis.spines[["top", "right"]].set_visible(False)


# --- Learning -------------------------------------------------------------------------------------------------------


def draw_learning_curves(workdir: str | os.PathLike | Run, path: str | os.PathLike | None = None) -> Figure:
    """Validation accuracy (a language model's: perplexity) against step, for each variant of a run: every seed thin, the
    median and quartiles of the seeds in black. Saved to `path` if given."""
    record = workdir if isinstance(workdir, Run) else read_run(workdir)
    language, several = not record.task.score.thresholds, record.config.train.num_seeds > 2
    variants, colors = record.variants, colors_of(record.variants)
    columns = min(len(variants), 3)
    rows = -(-len(variants) // columns)
    figure, axes = _figure(4.4 * columns, 0.6 + 3.1 * rows, rows, columns, sharex=True, sharey=True)
    for axis in axes.flat[len(variants) :]:
        axis.set_axis_off()
    for axis, variant in zip(axes.flat, variants, strict=False):
        metrics = record.metrics(variant)
        step = metrics["step"]
        if len(step):
            values = np.exp(metrics["val_loss"]) if language else 100 * metrics["val_accuracy"]
            axis.plot(
                step,
                values,
                color=colors[variant],
                alpha=max(0.2, values.shape[1] ** -0.4),
                linewidth=0.8 if several else 2,
            )
            if several:
                low, median, high = np.nanpercentile(values, (25, 50, 75), axis=1)
                axis.plot(step, np.stack([low, high], 1), color="0.15", linewidth=1.3, linestyle=(0, (4, 2)))
                axis.plot(step, median, color="0.15", linewidth=2.4)
        axis.set(title=describe_variant(variant), xlabel="training step")
        axis.xaxis.set_tick_params(labelbottom=True)
        if language:
            axis.set_yscale("log")
            for set_formatter in (axis.yaxis.set_major_formatter, axis.yaxis.set_minor_formatter):
                set_formatter(lambda value, _: f"{value:g}")
        else:
            axis.axhline(100 * SOLVED_ACCURACY, color="0.6", linewidth=0.8, linestyle=":")
            axis.set_ylim(0, 102)
        _open_frame(axis)
    for axis in axes[:, 0]:
        axis.set_ylabel("validation perplexity" if language else "validation accuracy (%)")
    seeds = record.config.train.num_seeds
    how = "\ncoloured: every seed; black: median of the seeds; dashed: quartiles" if several else ""
    figure.suptitle(f"{describe_run(record)}; {seeds} seed{'s' * (seeds > 1)}{how}", fontsize=11)
    if path is not None:
        figure.savefig(path, dpi=120)
    return figure


def draw_convergence(record: Run) -> Figure | None:
    """Share of the seeds that have reached 99 % validation accuracy by each step: the distribution of the convergence step.

    None if the run has no summary, or its task is no matter of accuracy.
    """
    if record.summary is None or not record.task.score.thresholds:
        return None
    figure, ((axis,),) = _figure(7.2, 4.2)
    variants = record.outcomes
    last = max(s.last_step for s in variants.values())
    for variant, color in colors_of(variants).items():
        steps = variants[variant].solved_step
        reached = np.sort([step for step in steps if step is not None])
        share = 100 * np.arange(len(reached) + 1) / len(steps)
        label = f"{describe_variant(variant)} ({len(reached)} of {len(steps)})"
        axis.step(
            [0, *reached, 1.04 * last], [*share, share[-1]], where="post", color=color, linewidth=2.2, label=label
        )
    axis.set(xlabel="training step", ylabel="seeds at ≥ 99 % accuracy (%)", ylim=(-2, 102), xlim=(0, 1.04 * last))
    axis.legend(frameon=False, loc="upper left", bbox_to_anchor=(1, 1), fontsize=9)
    axis.set_title(describe_run(record))
    _open_frame(axis)
    return figure


def draw_shares(shares: Mapping[str, Sequence[Mapping[str, Any]]]) -> Figure:
    """How many seeds converge in several settings: a panel for each task, a row for each setting, a colour for each variant.

    shares: by the task's name the numbers of `tables.by_setting`: changed, variant, num_seeds, num_converged, num_solved,
    share_low, share_high. Discs are the share of seeds at ≥ 90 % accuracy with Wilson's 95 % interval, rings that at ≥ 99 %.
    """
    settings = list(dict.fromkeys(number["changed"] for numbers in shares.values() for number in numbers))
    colors = colors_of(dict.fromkeys(number["variant"] for numbers in shares.values() for number in numbers))
    lines = [textwrap.fill(changed or "nothing", 40) for changed in settings]
    spacing = 0.14
    room = [max(0.5, spacing * len(colors) + 0.2) + 0.12 * line.count("\n") for line in lines]
    top = np.cumsum([0, *room])
    middle = dict(zip(settings, (top[:-1] + top[1:]) / 2, strict=True))
    figure, (axes,) = _figure(3.6 + 3.6 * len(shares), 1.4 + 0.65 * top[-1], columns=len(shares), sharey=True)
    handles: dict[str, Any] = {}
    for axis, (task, numbers) in zip(axes, shares.items(), strict=True):
        for index, (variant, color) in enumerate(colors.items()):
            own = [number for number in numbers if number["variant"] == variant]
            if not own:
                continue
            y = [middle[number["changed"]] + spacing * (index - (len(colors) - 1) / 2) for number in own]
            at_90, at_99, low, high = (
                100 * np.array([number[name] / (number["num_seeds"] if "num" in name else 1) for number in own])
                for name in ("num_converged", "num_solved", "share_low", "share_high")
            )
            axis.hlines(y, low, high, color=color, linewidth=1.6)
            disc = dict(color=color, markersize=5.5, clip_on=False)
            (handles[describe_variant(variant)],) = axis.plot(at_90, y, "o", **disc)
            axis.plot(at_99, y, "o", markerfacecolor="none", zorder=3, **disc)
        axis.hlines(top[1:-1], 0, 100, color="0.9", linewidth=0.8, zorder=0)
        axis.set(xlim=(0, 100), ylim=(top[-1], 0), xlabel="seeds (%)", title=textwrap.fill(task, 26))
        axis.title.set_fontsize(10)
        axis.grid(axis="x", color="0.9", linewidth=0.8)
        axis.set_axisbelow(True)
        _open_frame(axis)
    axes[0].set_yticks([middle[changed] for changed in settings], lines, fontsize=9)
    axes[0].set_ylabel("changed")
    handles["≥ 90 % accuracy, with 95 % interval"] = Line2D([], [], color="0.3", marker="o", markersize=5.5)
    handles["≥ 99 %"] = Line2D(
        [], [], color="0.3", marker="o", markersize=5.5, markerfacecolor="none", linestyle="none"
    )
    figure.legend(
        handles.values(), handles, loc="outside upper center", ncols=min(len(handles), 5), frameon=False, fontsize=9
    )
    return figure


def draw_initial_memory(
    panels: Sequence[tuple[str, int, Mapping[str, tuple[Float[np.ndarray, " S"], Float[np.ndarray, " S"]]]]], what: str
) -> Figure:
    """Every seed's best accuracy against how far back it remembers before training.

    panels: (title, length of the sequences, variant -> (tokens [S], accuracy from 0 to 1 [S])). what: whose memory it is.
    """
    columns = min(len(panels), 3)
    rows = -(-len(panels) // columns)
    figure, axes = _figure(0.8 + 3.7 * columns, 0.9 + 3.2 * rows, rows, columns, sharex=True, sharey=True)
    variants = list(dict.fromkeys(variant for *_, drawn in panels for variant in drawn))
    colors, markers = colors_of(variants), dict(zip(variants, "os^Dv" * len(variants), strict=False))
    handles: dict[str, Any] = {}
    for axis in axes.flat[len(panels) :]:
        axis.set_axis_off()
    for axis, (title, length, drawn) in zip(axes.flat, panels, strict=False):
        for variant, (tokens, accuracy) in drawn.items():
            how = dict(color=colors[variant], alpha=0.65, markersize=5, clip_on=False)
            (handles[describe_variant(variant)],) = axis.plot(tokens, 100 * accuracy, markers[variant], **how)
        axis.axvline(length, color="0.5", linestyle="--", linewidth=1)
        axis.set_xscale("log")
        axis.set(title=textwrap.fill(title, 44), xlabel=what, ylim=(0, 102))
        axis.title.set_fontsize(9)
        axis.xaxis.set_tick_params(labelbottom=True)
        axis.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
        _open_frame(axis)
    for axis in axes[:, 0]:
        axis.set_ylabel("best validation accuracy (%)")
    handles["length of the sequences"] = Line2D([], [], color="0.5", linestyle="--", linewidth=1)
    figure.legend(handles.values(), handles, loc="outside upper center", ncols=6, frameon=False, fontsize=9)
    return figure


# --- λ --------------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Panel:
    """One heatmap: values [rows, columns] under a title."""

    values: Float[np.ndarray, "R C"]
    title: str
    used: Bool[np.ndarray, "R C"] | None = None  # cells that have no effect are drawn faded
    marks: Mapping[str, int] = dataclasses.field(default_factory=dict)


def draw_lam_over_tokens(panels: Sequence[Sequence[Panel]], title: str) -> Figure:
    """Heatmaps of λ, levels × positions, in a grid of panels; each panel has its own colour scale.

    Where a level's bucket is empty λ has no effect: those cells are faded. Marks are red dashed lines.
    """
    columns = max(map(len, panels))
    levels = max(panel.values.shape[0] for row in panels for panel in row)
    height = len(panels) * (1.35 + 0.14 * levels) + 0.7
    figure, axes = _figure(max(6.6 * columns, 9.0) if columns < 3 else 5.6 * columns, height, len(panels), columns)
    for row_axes, row in zip(axes, panels, strict=True):
        for axis in row_axes[len(row) :]:
            axis.set_axis_off()
        for axis, panel in zip(row_axes, row, strict=False):
            levels, length = panel.values.shape
            used = np.ones_like(panel.values, bool) if panel.used is None else panel.used
            low, high = _limits(panel.values[used])
            extent = (-0.5, length - 0.5, -0.5, levels - 0.5)
            how = dict(aspect="auto", origin="lower", extent=extent, vmin=low, vmax=high, interpolation="nearest")
            image = axis.imshow(panel.values, cmap="viridis", alpha=np.where(used, 1.0, 0.22), **how)
            figure.colorbar(image, ax=axis, pad=0.01, aspect=12, label="λ").solids.set_alpha(1)
            positions = sorted(panel.marks.values())
            for name, position in panel.marks.items():
                axis.axvline(position - 0.5, color=MARK, linestyle="--", linewidth=1.4)
                # To the left of its line where the end or another line's name is near on the right.
                following = min((p for p in positions if p > position), default=1.1 * length)
                left = following - position < 0.3 * length
                axis.annotate(
                    f"{name} →" if left else f"← {name}", (position - 0.5, 1.0), xycoords=("data", "axes fraction"),
                    xytext=(-2 if left else 2, 2), textcoords="offset points", ha="right" if left else "left",
                    va="bottom", fontsize=8, color=MARK,
                )  # fmt: skip
            axis.set_title(panel.title, fontsize=10, pad=16 if panel.marks else 6)
            axis.set(xlabel="position (token)", ylabel="level")
            axis.set_yticks(range(0, levels, 1 if levels <= 8 else 2))
    figure.suptitle(
        f"{title}\ncolour: λ (faded where the level's bucket is empty, so that λ has no effect)", fontsize=11
    )
    return figure


def draw_lam_by_head(panels: Sequence[Sequence[Panel]], title: str) -> Figure:
    """Heatmaps of (layers · heads) × levels with the numbers in the cells, a line between layers; the panels' values are
    [layers, heads, levels]. Levels of which no panel has a value are left out."""
    columns = max(map(len, panels))
    levels = max(1 + np.flatnonzero(np.isfinite(p.values).any((0, 1)))[-1:].sum() for row in panels for p in row)
    heights = [0.34 * max(p.values.shape[0] * p.values.shape[1] for p in row) + 1.2 for row in panels]
    width = max(0.52 * levels, 3.2) + 1.1
    grid = {"height_ratios": heights}
    figure, axes = _figure(width * columns, sum(heights) + 0.6, len(panels), columns, gridspec_kw=grid)
    for row_axes, row in zip(axes, panels, strict=True):
        for axis in row_axes[len(row) :]:
            axis.set_axis_off()
        for axis, panel in zip(row_axes, row, strict=False):
            layers, heads, _ = panel.values.shape
            values = panel.values[..., :levels].reshape(layers * heads, -1)
            low, high = _limits(values[np.isfinite(values)])
            image = axis.imshow(values, cmap="viridis", aspect="auto", vmin=low, vmax=high)
            for (i, j), value in np.ndenumerate(values):
                if np.isfinite(value):
                    dark = np.dot(image.to_rgba(value)[:3], (0.3, 0.59, 0.11)) < 0.5
                    axis.text(j, i, _short(value), ha="center", va="center", fontsize=7, color="w" if dark else "k")
            figure.colorbar(image, ax=axis, pad=0.01, aspect=14)
            names = [f"layer {layer} head {head}" for layer in range(layers) for head in range(heads)]
            axis.set_yticks(range(layers * heads), names)
            for layer in range(1, layers):
                axis.axhline(layer * heads - 0.5, color="w", linewidth=3)
            axis.set_xticks(range(values.shape[1]))
            axis.tick_params(labelsize=8)
            axis.set_title(panel.title, fontsize=10)
            axis.set_xlabel("level")
    figure.suptitle(title, fontsize=11)
    return figure


def draw_dependence(by_variant: Mapping[str, Mapping[int, Mapping[str, np.ndarray]]], title: str) -> Figure:
    """For each level: std of λ over tokens relative to its mean, and the share of that variance between token roles.

    by_variant: for each variant, an `input_dependence` by seed. Lines are means over layers, heads and seeds; dots are seeds.
    """
    panels = [
        (lambda d: 100 * d["std"] / d["mean"], "std over tokens / mean of λ (%)"),
        (lambda d: 100 * d["role_share"], "share of variance between roles (%)"),
    ]
    if not any(np.isfinite(d["role_share"]).any() for seeds in by_variant.values() for d in seeds.values()):
        del panels[1]
    figure, (axes,) = _figure(1.9 + 4.8 * len(panels), 4.2, 1, len(panels))
    for axis, (value, label) in zip(axes, panels, strict=True):
        for variant, color in colors_of(by_variant).items():
            seeds = np.array([_nanmean(value(d), (0, 1)) for d in by_variant[variant].values()])
            used = [_nanmean(d["mean"], (0, 1)) for d in by_variant[variant].values()]
            levels = np.flatnonzero(np.isfinite(used).any(0))
            seeds = seeds[:, levels]
            axis.plot(np.tile(levels, (len(seeds), 1)).T, seeds.T, ".", color=color, alpha=0.35, markersize=5)
            axis.plot(levels, _nanmean(seeds, 0), color=color, linewidth=2.2, label=describe_variant(variant))
        axis.set(xlabel="level", ylabel=label, xticks=levels)
        axis.set_ylim(bottom=0)
        _open_frame(axis)
    axes[-1].legend(frameon=False, fontsize=9, loc="upper left", bbox_to_anchor=(1, 1))
    figure.suptitle(f"{title}\nlines: means over layers, heads and seeds; dots: seeds", fontsize=11)
    return figure


# --- What a head draws on ---------------------------------------------------------------------------------------------


def draw_attention_rows(
    rows: Sequence[tuple[AttentionRow, str, Sequence[int]]], marks: Mapping[str, int], length: int, title: str
) -> Figure:
    """Rows of attention by source token, their Fenwick buckets shaded, and beside each the sum of |weight| in every bucket,
    with the bucket's λ.

    rows: (row, its title, positions of sources to point out).
    """
    grid = {"width_ratios": (4.2, 1)}
    figure, axes = _figure(13.0, 0.7 + 2.6 * len(rows), len(rows), 2, gridspec_kw=grid)
    for (axis, sums), (row, name, pointed) in zip(axes, rows, strict=True):
        sources = np.arange(len(row.weight))
        starts = [0, *(1 + np.flatnonzero(np.diff(row.level)))]
        stops = [*starts[1:], len(sources)]
        axis.vlines(sources, 0, row.weight, color="#0072B2", linewidth=max(1.0, min(4.0, 360 / length)))
        axis.axhline(0, color="0.3", linewidth=0.8)
        for number, (start, stop) in enumerate(zip(starts, stops, strict=True)):
            axis.axvspan(start - 0.5, stop - 0.5, color="#E69F00" if number % 2 else "#999999", alpha=0.16, linewidth=0)
            if stop - start > 0.06 * length:
                axis.annotate(
                    f"level {row.level[start]}", ((start + stop - 1) / 2, 1.0), xycoords=("data", "axes fraction"),
                    xytext=(0, -2), textcoords="offset points", ha="center", va="top", fontsize=8,
                )  # fmt: skip
        for source in pointed:
            axis.plot(source, row.weight[source], "D", markersize=7, markerfacecolor="none", markeredgecolor=MARK)
        for position in marks.values():
            axis.axvline(position - 0.5, color=MARK, linestyle="--", linewidth=1.0)
        axis.plot(row.position, 0, "v", color="k", markersize=7, clip_on=False)
        axis.margins(y=0.14)
        axis.set_xlim(-1, length)
        axis.set_title(name, fontsize=10)
        axis.set(xlabel="source position (token)", ylabel="weight of its value")
        _open_frame(axis)

        levels = row.level[starts]
        total = [np.abs(row.weight[start:stop]).sum() for start, stop in zip(starts, stops, strict=True)]
        sums.barh(range(len(levels)), total, color="#0072B2")
        for at, (level, value) in enumerate(zip(levels, total, strict=True)):
            sums.annotate(
                f"λ {_short(row.lam[level])}",
                (value, at),
                xytext=(3, 0),
                textcoords="offset points",
                va="center",
                fontsize=8,
            )
        sums.set_yticks(range(len(levels)), [f"level {level}" for level in levels], fontsize=8)
        sums.margins(x=0.35)
        sums.set_xlabel("Σ |weight| in the bucket")
        _open_frame(sums)
    figure.suptitle(title, fontsize=11)
    return figure


# --- Length, and cost -------------------------------------------------------------------------------------------------


def draw_scores_by_length(
    by_variant: Mapping[str, tuple[Sequence[int], Float[np.ndarray, "S N"]]], trained: int, language: bool, title: str
) -> Figure:
    """Accuracy (language: perplexity) against the length of the evaluated sequences: seeds thin, means thick.

    by_variant: (lengths [N], values [S, N] of the seeds). trained: the length of the training sequences.
    """
    figure, ((axis,),) = _figure(7.6, 4.2)
    for variant, color in colors_of(by_variant).items():
        lengths, values = by_variant[variant]
        axis.plot(lengths, values.T, color=color, alpha=max(0.15, 0.5 / len(values) ** 0.5), linewidth=0.8)
        label = describe_variant(variant)
        axis.plot(lengths, values.mean(0), color=color, linewidth=2.4, marker="o", label=label)
    axis.axvline(trained, color=MARK, linestyle="--", linewidth=1.2)
    axis.annotate(
        "trained", (trained, 0.02), xycoords=("data", "axes fraction"), xytext=(3, 0), textcoords="offset points",
        color=MARK,
    )  # fmt: skip
    every = sorted({n for lengths, _ in by_variant.values() for n in lengths})
    axis.set_xscale("log", base=2)
    axis.set_xticks(every, [f"{n:,}" for n in every])
    axis.minorticks_off()
    axis.set(xlabel="length of the evaluated sequences (tokens)", ylabel="perplexity" if language else "accuracy (%)")
    if not language:
        axis.set_ylim(0, 102)
    axis.legend(frameon=False, fontsize=9, loc="upper left", bbox_to_anchor=(1, 1))
    axis.set_title(title, fontsize=11)
    _open_frame(axis)
    return figure


def draw_complexity(measured: Mapping[str, Mapping[str, Sequence[float]]], title: str) -> Figure:
    """Training time and decoding memory against T, log-log. measured: variant -> "length", "ms", "bytes"."""
    figure, (axes,) = _figure(12, 4.4, 1, 2)
    panels = (("ms", "training step (ms)", 1), ("bytes", "decoding memory of a sequence (KiB)", 1024))
    for axis, (name, label, unit) in zip(axes, panels, strict=True):
        for (variant, color), marker in zip(colors_of(measured).items(), "osD^vP" * 9, strict=False):
            found = measured[variant]
            values = np.asarray(found[name]) / unit
            axis.plot(
                found["length"], values, marker=marker, color=color, label=describe_variant(variant), linewidth=1.8
            )
        axis.set_xscale("log", base=2)
        axis.set_yscale("log")
        lengths = sorted({n for found in measured.values() for n in found["length"]})
        axis.set_xticks(lengths, [f"{n // 1024}k" if n >= 1024 else str(n) for n in lengths])
        axis.minorticks_off()
        axis.set(xlabel="T (tokens)", ylabel=label)
        axis.grid(alpha=0.3)
        _open_frame(axis)
    axes[1].legend(frameon=False, fontsize=9, loc="upper left", bbox_to_anchor=(1, 1))
    figure.suptitle(title, fontsize=11)
    return figure


def _limits(values: np.ndarray) -> tuple[float, float]:
    low, high = (float(values.min()), float(values.max())) if values.size else (0.0, 1.0)
    # A constant λ would otherwise show the last bits of its rounding.
    smallest = 0.02 * max(abs(low), abs(high), 1e-6)
    if high - low < smallest:
        middle = (low + high) / 2
        low, high = middle - smallest / 2, middle + smallest / 2
    return low, high


def _short(value: float) -> str:
    return f"{value:.{CELL_DIGITS}f}" if abs(value) < 10 else f"{value:.3g}"


def _nanmean(values: np.ndarray, axis: Any) -> np.ndarray:
    counted = np.isfinite(values)
    total = np.where(counted, values, 0).sum(axis)
    return np.where(counted.any(axis), total / np.maximum(counted.sum(axis), 1), np.nan)
