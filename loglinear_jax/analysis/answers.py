"""Where are the answers, and does λ find them? The Fenwick levels that hold a task's answers, from its sequences alone, and
which bucket has the largest λ at each query."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from jaxtyping import Float, Int
from matplotlib.figure import Figure

from loglinear_jax.analysis import style
from loglinear_jax.analysis.lam_values import layers_that
from loglinear_jax.analysis.paper import describe_run
from loglinear_jax.analysis.section import BySeed, Section
from loglinear_jax.analysis.table import Cell, Table, mean_and_std, percent
from loglinear_jax.fenwick import fenwick_level, num_levels, occupied_levels
from loglinear_jax.runs.loading import Run, TrainedVariant
from loglinear_jax.tasks.base import BaseTask, with_length

SEEN = 1024  # sequences of which the rule by position knows
WHAT = "answers at the largest λ"


# --- From a task alone ------------------------------------------------------------------------------------------------


def answer_levels(task: BaseTask, num: int = 1024) -> Float[np.ndarray, " L"] | None:
    """Count at which Fenwick levels the answers of a task are.

    The query at position t sees the position s of its answer (`BaseTask.sources`) in the bucket of level
    fenwick_level(t, s).

    Args:
        task: whose sequences are drawn; nothing is trained.
        num: sequences to draw, of T tokens, the length of the longest trained sequences.

    Returns:
        The share of the answers at each level 0 .. num_levels(T) - 1; None for a task that does not say where its
        answers are.

    Raises:
        ValueError: for an invalid num, and for invalid sources.
    """
    task = with_length(task.trained_on.longest_part, num, None)
    if type(task).sources is BaseTask.sources:  # asked first: a text would have to be opened
        return None
    tokens, targets = task.inspection_sequences(num)
    levels = levels_of_answers(task, tokens, targets)
    if levels is None:
        return None
    counts = np.bincount(levels[levels >= 0], minlength=num_levels(tokens.shape[1]))
    return counts / counts.sum()


def levels_of_answers(
    task: BaseTask, tokens: Int[np.ndarray, "num T"], targets: Int[np.ndarray, "num T"]
) -> Int[np.ndarray, "num T"] | None:
    """Find the Fenwick level at which each scored position sees its answer.

    Args:
        task: whose `sources` say where the answers are.
        tokens: sequences of the task.
        targets: their targets, -1 where nothing is scored.

    Returns:
        The levels, -1 where nothing is scored; None for a task that does not say where its answers are.

    Raises:
        ValueError: for invalid sources.
    """
    sources = _checked_sources(task, tokens, targets)
    if sources is None:
        return None
    return np.where(targets >= 0, fenwick_level(np.arange(tokens.shape[1]), np.maximum(sources, 0)), -1)


def _checked_sources(task: BaseTask, tokens: np.ndarray, targets: np.ndarray) -> Int[np.ndarray, "num T"] | None:
    """`BaseTask.sources` of these sequences. Raises ValueError if they are not what that promises."""
    given = task.sources(tokens, targets)
    if given is None:
        return None
    name, sources = f"{type(task).__name__}.sources", np.asarray(given)
    if sources.shape != targets.shape or not np.issubdtype(sources.dtype, np.integer):
        found = f"shape {sources.shape} and dtype {sources.dtype}"
        raise ValueError(f"{name} returns {found}: expected integers {targets.shape}")
    scored = targets >= 0
    wrong = np.where(scored, (sources < 0) | (sources > np.arange(targets.shape[1])), sources != -1)
    if wrong.any():
        row, column = np.argwhere(wrong)[0]
        expected = f"0 to {column}, as the position is scored" if scored[row, column] else "-1, as it is not scored"
        raise ValueError(f"{name} returns {sources[row, column]} at position {column}: expected {expected}")
    return sources


def answer_places(
    task: BaseTask, tokens: Int[np.ndarray, " T"], targets: Int[np.ndarray, " T"], position: int
) -> Int[np.ndarray, " answers"]:
    """Find where the answer to one position of a sequence is.

    Returns:
        Positions: none where nothing is scored; for a task without `sources`, every place so far at which the token has
        a role of the task's `ANSWERS`.
    """
    if targets[position] < 0:
        return np.zeros(0, int)
    sources = _checked_sources(task, tokens[None], targets[None])
    if sources is not None:
        return sources[0, position : position + 1]
    roles = [task.ROLES.index(name) for name in task.ANSWERS]
    places = np.flatnonzero((tokens == targets[position]) & np.isin(task.roles(tokens[None])[0], roles))
    return places[places <= position]


def levels_table(shares: Mapping[str, Float[np.ndarray, " L"]]) -> Table:
    """Tabulate the shares of the levels that hold answers, a row for each task.

    Args:
        shares: `answer_levels` by the task in words.
    """
    held = sorted({int(level) for of_task in shares.values() for level in np.flatnonzero(of_task)})
    rows = []
    for task, of_task in shares.items():
        padded = np.pad(of_task, (0, max(held) + 1))
        found = {n: Cell(percent(padded[n], 1) if padded[n] else "–", share=float(padded[n])) for n in held}
        rows.append({"task": task} | {f"level {n}": cell for n, cell in found.items()})
    note = (
        "Share of the answers at each Fenwick level, seen from their queries; other levels have none. Level ℓ ≥ 1 is a "
        "bucket of 2^(ℓ−1) tokens."
    )
    return Table("Levels of the answers", rows, note)


class Answers(Section):
    """The section `answers`: a row for each task of the runs, from its settings alone."""

    NAME = "answers"
    TITLE = "Where the answers are"
    INTRO = (
        "Computed from sequences of each task, without a model. If all answers are at one Fenwick level, a λ that is the "
        "same for every query can select it. If they are at several, the right level may differ from query to query."
    )

    def show_all(self) -> None:
        shares = {}
        for name, run in {run.task.describe(): run for run in self.context.runs}.items():
            with self.context.attempt(run.workdir, "levels of the answers"):
                if (of_task := answer_levels(run.task)) is not None:
                    shares[name] = of_task
        if shares:
            self.add(levels_table(shares), "answer-levels-table")


# --- From λ of a trained model ----------------------------------------------------------------------------------------


def looks_at_answers(
    lam: Float[np.ndarray, "layers num T H L"], levels: Int[np.ndarray, "num T"]
) -> dict[str, Float[np.ndarray, "layers H"]]:
    """Measure how often λ is largest at the bucket of the answer, for each layer and head, over the scored positions.

    Args:
        lam: λ at every token.
        levels: of the answers, -1 where nothing is scored (`levels_of_answers`).

    Returns:
        "largest", the share of positions at which λ of the answer's bucket is larger than λ of every other occupied
        level; and "weight", the mean of λ of that bucket / Σ λ over the occupied levels. nan for a head whose λ is not
        finite.

    Raises:
        ValueError: for levels of another shape, without an answer, or with one where the position has no bucket.
    """
    if levels.shape != lam.shape[1:3]:
        raise ValueError(f"levels has shape {levels.shape}: expected [num, T] = {lam.shape[1:3]}, as lam has")
    sequence, position = np.nonzero(levels >= 0)
    if not len(position):
        raise ValueError("levels has no answer: expected a level from 0 on somewhere")
    used = occupied_levels(position, lam.shape[-1])
    is_answer = np.arange(lam.shape[-1]) == levels[sequence, position][:, None]
    if len(wrong := np.flatnonzero(~(used & is_answer).any(1))):
        place = sequence[wrong[0]], position[wrong[0]]
        raise ValueError(f"levels has {levels[place]} at position {place[1]}: no bucket is there")
    at_queries = np.where(used[:, None], lam[:, sequence, position], 0).astype(np.float64)  # layers, queries, H, L
    of_answer = np.where(is_answer[:, None], at_queries, 0).sum(-1)
    of_others = np.where((used & ~is_answer)[:, None], at_queries, -np.inf).max(-1)
    finite = np.isfinite(at_queries).all((1, 3))
    weight = of_answer / np.maximum(at_queries.sum(-1), 1e-30)
    found = {"largest": (of_answer > of_others).mean(1), "weight": weight.mean(1)}
    return {name: np.where(finite, value, np.nan) for name, value in found.items()}


def best_heads(by_seed: BySeed) -> tuple[list[int], dict[str, Float[np.ndarray, "S layers"]]]:
    """Choose in each layer the head whose λ finds the most answers, for every seed whose λ is finite.

    Args:
        by_seed: `looks_at_answers` by seed.

    Returns:
        The seeds, and "largest" and "weight" of the chosen heads.
    """
    finite = [seed for seed, found in by_seed.items() if np.isfinite(found["largest"]).all()]
    if not finite:
        return [], {}
    every = {name: np.stack([by_seed[seed][name] for seed in finite]) for name in ("largest", "weight")}
    best = every["largest"].argmax(-1)[..., None]
    return finite, {name: np.take_along_axis(values, best, -1)[..., 0] for name, values in every.items()}


def found_by_position(levels: Int[np.ndarray, "num T"], seen: Int[np.ndarray, "seen T"]) -> float:
    """Score the best rule that sees only the position: it picks the level that most often held the answer of that
    position.

    Args:
        levels: of the answers to score (`levels_of_answers`).
        seen: levels in other sequences, from which the rule is made.

    Returns:
        The share of the answers that it finds.
    """
    counts = np.zeros((seen.shape[1], num_levels(seen.shape[1])), int)
    np.add.at(counts, (np.nonzero(seen >= 0)[1], seen[seen >= 0]), 1)
    return float(np.mean((counts.argmax(1) == levels)[levels >= 0]))


def looks_table(
    by_variant: Mapping[str, BySeed], accuracy: Mapping[str, Mapping[int, float]], by_position: float, title: str
) -> Table:
    """Tabulate how often each variant's λ finds the answers, a row for each layer, by each seed's best head.

    Args:
        by_variant: for each variant, by seed, `looks_at_answers` and the numbers of its "layers".
        accuracy: of each variant's seeds, from 0 to 1.
        by_position: `found_by_position`.
        title: of the table.

    Returns:
        The table; its CSV has every seed, layer and head. Seeds whose λ is not finite are counted and left out.
    """
    rows, long = [], []
    for variant, seeds in by_variant.items():
        finite, best = best_heads(seeds)
        left_out = f", not finite: {len(seeds) - len(finite)}" if len(finite) < len(seeds) else ""
        row = {"variant": variant, "seeds": f"{len(finite)}{left_out}"}
        if not finite:
            rows.append(row)
        for index, layer in enumerate(next(iter(seeds.values()))["layers"] if finite else ()):
            largest, weight = (f"{mean_and_std(100 * best[name][:, index])} %" for name in ("largest", "weight"))
            rows.append(row | {"layer": str(layer), WHAT: largest, "λ there / Σ λ": weight})
        for seed, found in seeds.items():
            of_seed = {"variant": variant, "seed": seed, "accuracy": float(accuracy[variant][seed])}
            for index, head in np.ndindex(found["largest"].shape):
                numbers = {name: float(found[name][index, head]) for name in ("largest", "weight")}
                place = {"layer": int(found["layers"][index]), "head": head}
                long.append(of_seed | place | numbers | {"by_position": by_position})
    note = (
        "First number: the share of queries at which λ is larger at the answer's bucket than at every other occupied level. "
        "Second: λ at that bucket as a share of the sum over the occupied levels, averaged over queries. Shown is the head of "
        "each layer with the largest first number, mean ± std over seeds. A rule that knows only the position, and picks the "
        f"level where the answer is most often, finds {100 * by_position:.1f} %."
    )
    return Table(title, rows, note, long=long)


class Looks(Section):
    """The section `looks`: λ at the queries of all sequences, of every seed, for tasks that say where their answers are."""

    NAME = "looks"
    TITLE = "Does λ find the answers?"
    INTRO = (
        "At each query one bucket contains the token to output. This section shows how often λ is largest at that bucket, and "
        "how often a rule that knows only the query's position would be right."
    )
    READS_CHECKPOINTS = True

    def find(self, run: Run, trained: TrainedVariant) -> tuple[BySeed, dict[int, float], str] | None:
        """Returns `looks_at_answers` by seed, accuracies by seed, and which accuracies these are."""
        context = self.context
        if not (layers := layers_that(trained, "has_lam")):
            return None
        tokens, targets = context.sequences(trained)
        levels = levels_of_answers(trained.task, tokens, targets)
        if levels is None:
            return None

        def compute(seed: int) -> dict[str, np.ndarray]:
            values = context.mixer_values(trained, seed)
            lam = np.stack([values[layer]["lam_value"] for layer in layers])
            return looks_at_answers(lam, levels) | {"layers": np.array(layers)}

        seeds = context.averaged_seeds(trained)
        return context.over_seeds(trained, "looks", seeds, compute), *context.accuracy(run, trained)

    def show_run(self, run: Run, found: dict[str, Any]) -> None:
        looks, accuracy = ({variant: of[i] for variant, of in found.items()} for i in (0, 1))
        num = self.context.choices.sequences
        levels = levels_of_answers(run.task, *run.task.inspection_sequences(num + SEEN))
        by_position = found_by_position(levels[:num], levels[num:])  # the rule has seen other sequences
        panels: dict[int, dict[str, tuple]] = {}  # by layer and variant, (share, accuracy) of the seeds
        most = []
        for variant, seeds in looks.items():
            finite, best = best_heads(seeds)
            if not finite:
                continue
            share, of_seeds = 100 * best["largest"], np.array([accuracy[variant][seed] for seed in finite])
            most.append(f"{style.describe_variant(variant).removeprefix('λ: ')} {share.mean(0).max():.0f} %")
            for index, layer in enumerate(seeds[finite[0]]["layers"]):
                panels.setdefault(int(layer), {})[variant] = share[:, index], 100 * of_seeds
        if panels:
            shares = f"{', '.join(most)}; a rule by position alone {100 * by_position:.0f} %"
            message = f"Answers at the largest λ: {shares}\n{describe_run(run)}"
            self.add(
                draw_looks(panels, 100 * by_position, f"{next(iter(found.values()))[2]} (%)", message),
                "looks",
                run,
                WHAT,
            )
        self.add(looks_table(looks, accuracy, by_position, f"{describe_run(run)}: {WHAT}"), "looks-table", run, WHAT)


def draw_looks(panels: Mapping[int, Mapping[str, tuple]], by_position: float, y: str, message: str) -> Figure:
    """Draw every seed's accuracy against how often its λ finds the answers, a panel for each layer.

    Args:
        panels: by layer and variant, (share of the answers found, accuracy) of the seeds, in %.
        by_position: what a rule by position alone finds, in %; a dashed line.
        y: the label of the accuracies.
        message: the figure's title.
    """
    figure, axes = style.panel_grid(len(panels), (5.6, 7.4, style.FULL_WIDTH), 0.9, 2.8)
    looks, handles = style.looks_of(variant for panel in panels.values() for variant in panel), {}
    for axis, (layer, panel) in zip(axes.flat, sorted(panels.items()), strict=False):
        for variant, values in panel.items():
            how = dict(looks[variant]._asdict(), linestyle="none", alpha=0.65, clip_on=False)
            handles[style.describe_variant(variant)] = style.draw_line(axis, *values, **how)
        handles["the best rule by position alone"] = axis.axvline(by_position, color="0.5", linestyle="--", linewidth=1)
        style.label_panel(axis, f"layer {layer}, best head", f"{WHAT} (%)")
    axes[0, 0].set(xlim=(0, 102), ylim=(0, 102))
    for axis in axes[:, 0]:
        axis.set_ylabel(y)
    style.finish(figure, message, handles)
    return figure
