"""What does a head draw on? The row of the attention matrix at one position, by past token."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Literal

import numpy as np
from jaxtyping import Float, Int
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from loglinear_jax.analysis import style
from loglinear_jax.analysis.answers import answer_places
from loglinear_jax.analysis.experiments import describe_run
from loglinear_jax.analysis.html import slug
from loglinear_jax.analysis.lam import short
from loglinear_jax.analysis.lam_values import check_index, mixer_values
from loglinear_jax.analysis.section import Section
from loglinear_jax.fenwick import fenwick_level
from loglinear_jax.models.settings import MixerSettings
from loglinear_jax.runs.loading import Run, TrainedVariant
from loglinear_jax.tasks.base import BaseTask


@dataclasses.dataclass(frozen=True)
class AttentionRow:
    """Row t of one head: o_t = Σ_s weight[s] v_s, with weight[s] = λ_t[level[s]] · exp(Σ_{s<r≤t} g_r) · (q_t · k_s), and with
    the delta rule λ_t[level[s]] · β_s · q_tᵀ [Π_{s<r≤t} exp(g_r) (I - β_r k_r k_rᵀ)] k_s.

    weight, level: for s = 0 .. t. lam: λ_t [L]; ones for one state.
    """

    position: int
    weight: Float[np.ndarray, " S"]
    level: Int[np.ndarray, " S"]
    lam: Float[np.ndarray, " L"]


def attention_row(
    trained: TrainedVariant,
    seed: int,
    tokens: Int[np.ndarray, " T"],
    *,
    layer: int,
    head: int,
    position: int,
    which: Literal["best", "last"] = "best",
) -> AttentionRow:
    """The row of one sequence's token at `position`. layer, head, position count from 0, or from the end if negative.

    Raises ValueError for softmax attention, and for a layer, head or position that is not there.
    """
    settings = trained.model.settings
    check_index("layer", layer, settings.layers)
    check_index("head", head, settings.heads)
    check_index("position", position, len(tokens))
    return row_of_values(mixer_values(trained, seed, np.asarray(tokens)[None], which)[layer], settings, head, position)


def row_of_values(
    values: Mapping[str, np.ndarray], settings: MixerSettings, head: int, position: int, sequence: int = 0
) -> AttentionRow:
    """The row of one token from what `mixer_values` has of its layer; `sequence`: which of the sequences it is in."""
    values = {name: value[sequence : sequence + 1] for name, value in values.items()}
    length = values["log_decay"].shape[1]
    check_index("position", position, length)
    head, position = head % settings.heads, position % length
    group = head // (settings.heads // settings.groups)
    query = values["queries"][0, position, group].astype(np.float64)
    keys = values["keys"][0, : position + 1, group].astype(np.float64)
    log_decay = values["log_decay"][0, : position + 1, head].astype(np.float64)
    level = fenwick_level(np.asarray(position), np.arange(position + 1))
    lam = values["lam_value"][0, position, head] if "lam_value" in values else np.ones(level.max() + 1)
    beta = values["beta"][0, : position + 1, head].astype(np.float64) if "beta" in values else None
    return AttentionRow(position, lam[level] * _without_lam(query, keys, log_decay, beta), level, lam)


def _without_lam(query, keys, log_decay, beta) -> Float[np.ndarray, " S"]:
    """The row for λ ≡ 1; beta is None without the delta rule."""
    if beta is None:
        total = np.cumsum(log_decay)
        return np.exp(total[-1] - total) * (keys @ query)
    weight = np.empty(len(keys))
    for s in reversed(range(len(keys))):
        weight[s] = beta[s] * (keys[s] @ query)
        query = np.exp(log_decay[s]) * (query - weight[s] * keys[s])
    return weight


def draw_attention_rows(
    rows: Sequence[tuple[AttentionRow, str, Sequence[int] | np.ndarray]],
    marks: Mapping[str, int],
    length: int,
    message: str,
) -> Figure:
    """Rows of attention by source token, their Fenwick buckets shaded, and beside each the sum of |weight| in every bucket,
    with the bucket's λ.

    rows: (row, its title, positions of sources to point out). message: the figure's title.
    """
    levels = max(len(np.unique(row.level)) for row, *_ in rows)
    height = max(2.5, 0.9 + 0.16 * levels)
    grid = {"width_ratios": (3.2, 1)}
    figure, axes = style.new_figure(style.FULL_WIDTH, 0.8 + height * len(rows), len(rows), 2, gridspec_kw=grid)
    for (axis, sums), (row, name, pointed) in zip(axes, rows, strict=True):
        starts = [0, *(1 + np.flatnonzero(np.diff(row.level)))]
        buckets = list(zip(starts, [*starts[1:], len(row.weight)], strict=True))
        _draw_weights(axis, row, buckets, pointed, length)
        for position in marks.values():
            axis.axvline(position - 0.5, color=style.MARK, linestyle="--", linewidth=1.0)
        axis.set_title(style.wrap(name, 6.2, 9), fontsize=9)
        _draw_sums(sums, row, buckets)
    style.title(figure, message)
    return figure


def _draw_weights(
    axis: Axes,
    row: AttentionRow,
    buckets: Sequence[tuple[int, int]],
    pointed: Sequence[int] | np.ndarray,
    length: int,
) -> None:
    axis.vlines(np.arange(len(row.weight)), 0, row.weight, color="#0072B2", linewidth=max(1.0, min(4.0, 250 / length)))
    axis.axhline(0, color="0.3", linewidth=0.8)
    for number, (start, stop) in enumerate(buckets):
        axis.axvspan(start - 0.5, stop - 0.5, color="#E69F00" if number % 2 else "#999999", alpha=0.16, linewidth=0)
        if stop - start > 0.09 * length:
            axis.annotate(
                f"level {row.level[start]}", ((start + stop - 1) / 2, 1.0), xycoords=("data", "axes fraction"),
                xytext=(0, -2), textcoords="offset points", ha="center", va="top", fontsize=8,
            )  # fmt: skip
    for source in pointed:
        axis.plot(source, row.weight[source], "D", markersize=7, markerfacecolor="none", markeredgecolor=style.MARK)
    axis.plot(row.position, 0, "v", color="k", markersize=7, clip_on=False)
    axis.margins(y=0.14)
    axis.set_xlim(-1, length)
    axis.set(xlabel="source position (token)", ylabel="weight of its value")
    style.open_frame(axis)


def _draw_sums(axis: Axes, row: AttentionRow, buckets: Sequence[tuple[int, int]]) -> None:
    levels = [row.level[start] for start, _ in buckets]
    total = [np.abs(row.weight[start:stop]).sum() for start, stop in buckets]
    axis.barh(range(len(levels)), total, color="#0072B2")
    for at, (level, value) in enumerate(zip(levels, total, strict=True)):
        how = dict(xytext=(3, 0), textcoords="offset points", va="center", fontsize=8)
        axis.annotate(f"λ {short(float(row.lam[level]))}", (value, at), **how)
    axis.set_yticks(range(len(levels)), [f"level {level}" for level in levels], fontsize=8)
    axis.margins(x=0.45)
    axis.xaxis.get_major_locator().set_params(nbins=3)
    axis.set_xlabel("Σ |weight| in the bucket")
    style.open_frame(axis)


class AttentionRows(Section):
    """Of every variant with states the best of the seeds that are drawn."""

    NAME = "rows"
    TITLE = "What a head draws on"
    INTRO = (
        "One row of the attention matrix: the weight λ · decay · (q · k) that a position gives to the value of each earlier "
        "token, by the Fenwick bucket that holds the token; with the delta rule, λ · β · (q · what later tokens have left of "
        "k). Diamonds: where the right answer is; in a task that does not say, every earlier place of its token. Triangle: the "
        "position."
    )
    READS_CHECKPOINTS = True

    def find(self, run: Run, trained: TrainedVariant) -> None:
        """Draws at once, as the values are large."""
        if not trained.model.settings.has_states:
            return
        context, choices, task = self.context, self.context.choices, trained.task
        tokens, targets = (x[choices.example] for x in context.sequences(trained))
        layer, head = context.layer_and_head(trained)
        seed = context.best_seed(trained)
        values = context.mixer_values(trained, seed)[layer]
        scored = np.flatnonzero(targets >= 0)
        positions = choices.positions or [int(scored[i]) for i in (0, len(scored) // 2, len(scored) - 1)]
        rows = []
        for position in dict.fromkeys(positions):
            row = row_of_values(values, trained.model.settings, head, position, choices.example)
            if not np.isfinite(row.weight).all():
                raise ValueError(f"seed {seed}: weights are not finite")
            pointed = answer_places(task, tokens, targets, row.position)
            rows.append((row, _titled(task, tokens, targets, row, pointed), pointed))
        name = style.describe_variant(trained.variant)
        seed_name = context.describe_seed(trained, seed)
        message = f"{name}; {seed_name}; {describe_run(run)}; layer {layer}, head {head}"
        figure = draw_attention_rows(rows, task.marks(), len(tokens), message)
        self.add(figure, f"rows-{slug(trained.variant)}", run, name)


def _titled(
    task: BaseTask, tokens: np.ndarray, targets: np.ndarray, row: AttentionRow, pointed: Sequence[int] | np.ndarray
) -> str:
    """The token at the position, what is to be predicted there, and how much is drawn from the answer."""
    at = row.position
    role = task.ROLES[task.roles(tokens[None])[0, at]]
    name = f"position {at}, {role} (token {task.shown(tokens[at])})"
    if targets[at] >= 0:
        name += f", to predict: {task.shown(targets[at])}"
    if len(pointed):
        share = np.abs(row.weight[pointed]).sum() / max(np.abs(row.weight).sum(), 1e-30)
        name += f"; {100 * share:.0f} % of Σ |weight| where the answer is"
    return name
