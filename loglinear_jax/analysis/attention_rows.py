"""What does a head draw on? The row of the attention matrix at one position, by past token."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

import numpy as np
from jaxtyping import Float, Int
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from loglinear_jax.analysis import style
from loglinear_jax.analysis.answers import answer_places
from loglinear_jax.analysis.lam import short
from loglinear_jax.analysis.lam_values import Which, layers_that, mixer_values
from loglinear_jax.analysis.paper import describe_run
from loglinear_jax.analysis.section import Section, slug
from loglinear_jax.fenwick import fenwick_level
from loglinear_jax.models.settings import MixerSettings
from loglinear_jax.runs.loading import Run, TrainedVariant

BLUE, BUCKETS = "#0072B2", ("#999999", "#E69F00")


@dataclasses.dataclass(frozen=True)
class AttentionRow:
    """Row t of one head's attention matrix: o_t = Σ_s weight[s] v_s.

    weight[s] = λ_t[level[s]] · exp(Σ_{s<r≤t} g_r) · (q_t · k_s), and with the delta rule
    λ_t[level[s]] · β_s · q_tᵀ [Π_{s<r≤t} exp(g_r) (I - β_r k_r k_rᵀ)] k_s.

    weight, level: for s = 0 .. t. lam: λ_t [L]; ones for one state.
    """

    position: int
    weight: Float[np.ndarray, " S"]
    level: Int[np.ndarray, " S"]
    lam: Float[np.ndarray, " L"]

    @property
    def buckets(self) -> list[tuple[int, int]]:
        """The buckets of the row, as (first source, one after the last)."""
        starts = [0, *(1 + np.flatnonzero(np.diff(self.level)))]
        return list(zip(starts, [*starts[1:], len(self.level)], strict=True))


def attention_row(
    trained: TrainedVariant,
    seed: int,
    tokens: Int[np.ndarray, " T"],
    *,
    layer: int,
    head: int,
    position: int,
    which: Which = "best",
) -> AttentionRow:
    """Compute the row of the attention matrix for one token of a sequence, with the level of each past token.

    Args:
        trained: the variant.
        seed: whose parameters are taken.
        tokens: the sequence.
        layer: from 0, or from the end if negative.
        head: likewise.
        position: likewise; the token's place in the sequence.
        which: parameters at the seed's best evaluation, or at the end.

    Raises:
        ValueError: for a layer of softmax attention, and for a layer, head or position that does not exist.
    """
    settings = trained.model.settings
    values = mixer_values(trained, seed, np.asarray(tokens)[None], which)
    sizes = {"layer": (layer, settings.layers), "head": (head, settings.heads), "position": (position, len(tokens))}
    for name, (value, size) in sizes.items():
        if not -size <= value < size:
            raise ValueError(f"{name}={value}: expected -{size} to {size - 1}")
    if layer % settings.layers not in values:
        raise ValueError(f"layer={layer} has no states: expected one of {list(values)}")
    return row_of_values(values[layer % settings.layers], settings, head % settings.heads, position % len(tokens))


def row_of_values(
    values: Mapping[str, np.ndarray], settings: MixerSettings, head: int, position: int, sequence: int = 0
) -> AttentionRow:
    """Compute a row of the attention matrix from what `mixer_values` has of its layer.

    Args:
        values: of the layer, by name.
        settings: of the model.
        head: from 0.
        position: of the token, from 0.
        sequence: which of the sequences the row is in.
    """
    group, past = head // (settings.heads // settings.groups), slice(position + 1)
    query = values["queries"][sequence, position, group].astype(np.float64)
    keys = values["keys"][sequence, past, group].astype(np.float64)
    log_decay = values["log_decay"][sequence, past, head].astype(np.float64)
    level = fenwick_level(np.asarray(position), np.arange(position + 1))
    lam = values["lam_value"][sequence, position, head] if "lam_value" in values else np.ones(level.max() + 1)
    if "beta" in values:
        beta, weight = values["beta"][sequence, past, head].astype(np.float64), np.empty(len(keys))
        for s in reversed(range(len(keys))):
            weight[s] = beta[s] * (keys[s] @ query)
            query = np.exp(log_decay[s]) * (query - weight[s] * keys[s])
    else:
        total = np.cumsum(log_decay)
        weight = np.exp(total[-1] - total) * (keys @ query)
    return AttentionRow(position, lam[level] * weight, level, lam)


def draw_attention_rows(
    rows: Sequence[tuple[AttentionRow, str, Sequence[int] | np.ndarray]],
    marks: Mapping[str, int],
    length: int,
    message: str,
) -> Figure:
    """Draw rows of attention by source token, and beside each the sum of |weight| in every bucket, with the bucket's λ.

    Args:
        rows: (row, its title, positions of sources to point out).
        marks: positions in the sequence by their names; dashed lines.
        length: of the sequence, in tokens.
        message: the figure's title.
    """
    height = max(2.5, 0.9 + 0.16 * max(len(row.buckets) for row, *_ in rows))
    grid = {"width_ratios": (3.2, 1)}
    figure, axes = style.new_figure(style.FULL_WIDTH, 0.8 + height * len(rows), len(rows), 2, gridspec_kw=grid)
    for (axis, sums), (row, name, pointed) in zip(axes, rows, strict=True):
        _draw_weights(axis, row, pointed, length)
        for position in marks.values():
            axis.axvline(position - 0.5, color=style.MARK, linestyle="--", linewidth=1.0)
        axis.set_title(style.wrap(name, 6.2, 9), fontsize=9)
        _draw_sums(sums, row)
    style.finish(figure, message)
    return figure


def _draw_weights(axis: Axes, row: AttentionRow, pointed: Sequence[int] | np.ndarray, length: int) -> None:
    axis.vlines(np.arange(len(row.weight)), 0, row.weight, color=BLUE, linewidth=max(1.0, min(4.0, 250 / length)))
    axis.axhline(0, color="0.3", linewidth=0.8)
    for number, (start, stop) in enumerate(row.buckets):
        axis.axvspan(start - 0.5, stop - 0.5, color=BUCKETS[number % 2], alpha=0.16, linewidth=0)
        if stop - start > 0.09 * length:
            how = dict(textcoords="offset points", ha="center", va="top", fontsize=8)
            at = dict(xy=((start + stop - 1) / 2, 1.0), xycoords=("data", "axes fraction"), xytext=(0, -2))
            axis.annotate(f"level {row.level[start]}", **at, **how)
    axis.plot(pointed, row.weight[pointed], "D", markersize=7, markerfacecolor="none", markeredgecolor=style.MARK)
    axis.plot(row.position, 0, "v", color="k", markersize=7, clip_on=False)
    axis.margins(y=0.14)
    axis.set(xlabel="source position (token)", ylabel="weight of its value", xlim=(-1, length))


def _draw_sums(axis: Axes, row: AttentionRow) -> None:
    levels = [row.level[start] for start, _ in row.buckets]
    total = [np.abs(row.weight[start:stop]).sum() for start, stop in row.buckets]
    axis.barh(range(len(levels)), total, color=BLUE)
    for at, (level, value) in enumerate(zip(levels, total, strict=True)):
        how = dict(xytext=(3, 0), textcoords="offset points", va="center", fontsize=8)
        axis.annotate(f"λ {short(float(row.lam[level]))}", (value, at), **how)
    axis.set_yticks(range(len(levels)), [f"level {level}" for level in levels], fontsize=8)
    axis.margins(x=0.45)
    axis.xaxis.get_major_locator().set_params(nbins=3)
    axis.set_xlabel("Σ |weight| in the bucket")


class AttentionRows(Section):
    """The section `rows`: rows of the best of the drawn seeds, for every variant with states."""

    NAME = "rows"
    TITLE = "What a head draws on"
    INTRO = (
        "One row of the attention matrix: the weight λ · decay · (q · k) that a position gives to the value of each earlier "
        "token, by that token's Fenwick bucket; with the delta rule λ · β · (q · what later tokens have left of k). Diamonds: "
        "the place of the right answer or, in a task without sources, all earlier places of its token. Triangle: the position."
    )
    READS_CHECKPOINTS = True

    def find(self, run: Run, trained: TrainedVariant) -> None:
        """Draws at once, as the values are large."""
        if not (layers := layers_that(trained, "has_states")):
            return
        context, choices, task = self.context, self.context.choices, trained.task
        tokens, targets = (x[choices.example] for x in context.sequences(trained))
        layer, head = context.layer_and_head(trained, layers)
        seed = context.best_seed(trained)
        values = context.mixer_values(trained, seed)[layer]
        scored = np.flatnonzero(targets >= 0)
        positions = choices.positions or [int(scored[i]) for i in (0, len(scored) // 2, len(scored) - 1)]
        rows = []
        for position in dict.fromkeys(positions):
            if not 0 <= position < len(tokens):
                raise ValueError(f"position={position}: expected 0 to {len(tokens) - 1}")
            row = row_of_values(values, trained.model.settings, head, position, choices.example)
            if not np.isfinite(row.weight).all():
                raise ValueError(f"seed {seed}: weights are not finite")
            role = task.ROLES[task.roles(tokens[None])[0, position]]
            title = f"position {position}, {role} (token {task.shown(tokens[position])})"
            if targets[position] >= 0:
                title += f", to predict: {task.shown(targets[position])}"
            if len(pointed := answer_places(task, tokens, targets, position)):
                share = np.abs(row.weight[pointed]).sum() / max(np.abs(row.weight).sum(), 1e-30)
                title += f"; {100 * share:.0f} % of Σ |weight| where the answer is"
            rows.append((row, title, pointed))
        name = style.describe_variant(trained.variant)
        message = f"{name}; {context.describe_seed(trained, seed)}; {describe_run(run)}; layer {layer}, head {head}"
        figure = draw_attention_rows(rows, task.marks(), len(tokens), message)
        self.add(figure, f"rows-{slug(trained.variant)}", run, name)
