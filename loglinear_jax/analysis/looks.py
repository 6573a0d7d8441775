"""Does λ find the answers? Which bucket has the largest λ at each query, against the bucket that holds the answer."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

import numpy as np
from jaxtyping import Float, Int
from matplotlib.figure import Figure

from loglinear_jax.analysis.answers import levels_of_answers
from loglinear_jax.analysis.cells import mean_and_std
from loglinear_jax.analysis.experiments import describe_run
from loglinear_jax.analysis.section import Section
from loglinear_jax.analysis.style import SeedPanel, describe_variant, draw_seeds
from loglinear_jax.analysis.table import Table
from loglinear_jax.fenwick import num_levels, occupied_levels
from loglinear_jax.runs.loading import Run, TrainedVariant

SEEN = 1024  # sequences of which the rule by position knows


def looks_at_answers(
    lam: Float[np.ndarray, "layers num T H L"], levels: Int[np.ndarray, "num T"]
) -> dict[str, Float[np.ndarray, "layers H"]]:
    """How often λ finds the answers, for each layer and head, over the scored positions: "largest", the share of them at which
    λ of the answer's bucket is larger than that of every other occupied level; and "weight", the mean of λ there / Σ λ over
    the occupied levels. nan for a head whose λ is not finite.

    levels: of the answers, -1 where nothing is scored, as `levels_of_answers` has them.

    Raises ValueError for levels of another shape, without an answer, or with one where the position has no bucket.
    """
    if levels.shape != lam.shape[1:3]:
        raise ValueError(f"levels has shape {levels.shape}: expected [num, T] = {lam.shape[1:3]}, as lam has")
    sequence, position = np.nonzero(levels >= 0)
    if not len(position):
        raise ValueError("levels has no answer: expected a level from 0 on somewhere")
    answer = levels[sequence, position]
    used = occupied_levels(position, lam.shape[-1])
    is_answer = np.arange(lam.shape[-1]) == answer[:, None]
    if not (used & is_answer).any(1).all():
        wrong = np.flatnonzero(~(used & is_answer).any(1))[0]
        raise ValueError(f"levels has {answer[wrong]} at position {position[wrong]}: no bucket is there")
    at_queries = np.where(used[:, None], lam[:, sequence, position], 0).astype(np.float64)  # layers, queries, H, L
    of_answer = np.where(is_answer[:, None], at_queries, 0).sum(-1)
    of_others = np.where((used & ~is_answer)[:, None], at_queries, -np.inf).max(-1)
    finite = np.isfinite(at_queries).all((1, 3))
    found = {
        "largest": (of_answer > of_others).mean(1),
        "weight": (of_answer / np.maximum(at_queries.sum(-1), 1e-30)).mean(1),
    }
    return {name: np.where(finite, value, np.nan) for name, value in found.items()}


def best_heads(
    by_seed: Mapping[int, Mapping[str, Float[np.ndarray, "layers H"]]],
) -> tuple[list[int], dict[str, Float[np.ndarray, "S layers"]]]:
    """(the seeds whose λ is finite, their `looks_at_answers` of each layer's head that finds the most answers)."""
    finite = [seed for seed, found in by_seed.items() if np.isfinite(found["largest"]).all()]
    if not finite:
        return [], {}
    every = {name: np.stack([by_seed[seed][name] for seed in finite]) for name in ("largest", "weight")}
    best = every["largest"].argmax(-1)[..., None]
    return finite, {name: np.take_along_axis(values, best, -1)[..., 0] for name, values in every.items()}


def found_by_position(levels: Int[np.ndarray, "num T"], seen: Int[np.ndarray, "seen T"]) -> float:
    """The share of the answers that the best rule finds that sees the position alone: it picks the level that most often held
    the answer of that position in sequences that it has `seen`.

    levels, seen: as `levels_of_answers` has them.
    """
    counts = np.zeros((seen.shape[1], num_levels(seen.shape[1])), int)
    np.add.at(counts, (np.nonzero(seen >= 0)[1], seen[seen >= 0]), 1)
    return float(np.mean((counts.argmax(1) == levels)[levels >= 0]))


def looks_table(
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


def draw_looks(
    by_variant: Mapping[str, tuple[Float[np.ndarray, "S layers"], Float[np.ndarray, " S"]]],
    by_position: float,
    accuracy: str,
    message: str,
) -> Figure:
    """Every seed's accuracy against how often λ is largest at the answer's bucket, a panel for each layer.

    by_variant: for each variant (the share of the answers that the best head of each layer finds, accuracy), from 0 to 1.
    by_position: the share that a rule finds that sees the position alone; accuracy: on which set, such as "test accuracy".
    message: the figure's title.
    """
    layers = next(iter(by_variant.values()))[0].shape[1]
    panels = [
        SeedPanel(
            f"layer {layer}, best head",
            100 * by_position,
            {variant: (100 * share[:, layer], of_seeds) for variant, (share, of_seeds) in by_variant.items()},
        )
        for layer in range(layers)
    ]
    line = "the best rule by position alone"
    figure, axis = draw_seeds(panels, 2.9, "answers at the largest λ (%)", f"{accuracy} (%)", line, message)
    axis.set_xlim(0, 102)
    return figure


class Looks(Section):
    """From λ at the queries of all sequences, of every seed; for tasks that say where their answers are."""

    NAME = "looks"
    TITLE = "Does λ find the answers?"
    INTRO = (
        "At each query one bucket holds the token that is to be output. Here is how often λ is largest at that bucket, and how "
        "often a rule would be right that sees the query's position alone."
    )
    READS_CHECKPOINTS = True

    def find(self, run: Run, trained: TrainedVariant) -> tuple[dict[int, dict], dict[int, float], str] | None:
        """(`looks_at_answers` by seed, accuracies by seed, which these are)."""
        if not trained.model.settings.has_lam:
            return None
        context = self.context
        tokens, targets = context.sequences(trained)
        levels = levels_of_answers(trained.task, tokens, targets)
        if levels is None:
            return None

        def compute(seed: int) -> dict[str, np.ndarray]:
            return looks_at_answers(context.lam_of(trained, seed), levels)

        sample = hashlib.sha256(np.ascontiguousarray([tokens, levels]).tobytes()).hexdigest()[:16]
        seeds = context.averaged_seeds(trained)
        return context.over_seeds(trained, "looks", {"sample": sample}, seeds, compute), *context.accuracy(run, trained)

    def show_run(self, run: Run, found: dict[str, Any]) -> None:
        what, by_position, drawn = "answers at the largest λ", self._by_position(run), {}
        looks = {variant: of_seeds for variant, (of_seeds, _, _) in found.items()}
        accuracy = {variant: of_seeds for variant, (_, of_seeds, _) in found.items()}
        for variant, seeds in looks.items():
            finite, best = best_heads(seeds)
            if finite:
                drawn[variant] = best["largest"], np.array([accuracy[variant][seed] for seed in finite])
        if drawn:
            message = f"{_message(drawn, by_position)}\n{describe_run(run)}"
            shown_as = next(iter(found.values()))[2]
            self.add(draw_looks(drawn, by_position, shown_as, message), "looks", run, what)
        table = looks_table(looks, accuracy, by_position, f"{describe_run(run)}: {what}")
        self.add(table, "looks-table", run, what)

    def _by_position(self, run: Run) -> float:
        """`found_by_position` over the report's sequences; the rule has seen others."""
        num = self.context.choices.sequences
        levels = levels_of_answers(run.task, *run.task.inspection_sequences(num + SEEN))
        return found_by_position(levels[:num], levels[num:])


def _message(drawn: dict[str, tuple[np.ndarray, np.ndarray]], by_position: float) -> str:
    """Of each variant the layer that finds the most answers, on average over seeds."""
    most = {variant: 100 * share.mean(0).max() for variant, (share, _) in drawn.items()}
    shown = [f"{describe_variant(variant).removeprefix('λ: ')} {share:.0f} %" for variant, share in most.items()]
    return f"Answers at the largest λ: {', '.join(shown)}; a rule by position alone {100 * by_position:.0f} %"
