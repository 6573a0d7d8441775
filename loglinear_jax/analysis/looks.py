"""Does λ find the answers? Which bucket has the largest λ at each query, against the bucket that holds the answer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from jaxtyping import Float, Int

from loglinear_jax.analysis.answers import levels_of_answers
from loglinear_jax.analysis.experiments import describe_run
from loglinear_jax.analysis.section import Section
from loglinear_jax.analysis.style import SeedPanel, describe_variant, draw_seeds
from loglinear_jax.analysis.table import Table, mean_and_std
from loglinear_jax.fenwick import num_levels, occupied_levels
from loglinear_jax.runs.loading import Run, TrainedVariant

SEEN = 1024  # sequences of which the rule by position knows
WHAT = "answers at the largest λ"
BySeed = Mapping[int, Mapping[str, np.ndarray]]


def looks_at_answers(
    lam: Float[np.ndarray, "layers num T H L"], levels: Int[np.ndarray, "num T"]
) -> dict[str, Float[np.ndarray, "layers H"]]:
    """How often λ is largest at the answer's bucket, for each layer and head, over the scored positions: "largest", the
    share of them at which
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


def best_heads(by_seed: BySeed) -> tuple[list[int], dict[str, Float[np.ndarray, "S layers"]]]:
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
    by_variant: Mapping[str, BySeed], accuracy: Mapping[str, Mapping[int, float]], by_position: float, title: str
) -> Table:
    """How often each variant's λ finds the answers: one row for each layer, of which each seed's best head counts.

    by_variant: for each variant, by seed, `looks_at_answers` and the numbers of its "layers"; accuracy: of that seed, from 0 to
    1. by_position: `found_by_position`. The CSV has every seed, layer and head. Seeds whose λ is not finite are counted, and
    left out.
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
        "At the queries: the share of them at which λ of the bucket with the answer is larger than λ of every other occupied "
        "level; and the mean share of that λ in the sum over the occupied levels. Of each layer the head with the largest "
        "first number, mean ± std over seeds. The best rule that sees the position alone, and picks the level that most often "
        f"holds the answer there, finds {100 * by_position:.1f} %."
    )
    return Table(title, rows, note, long=long)


class Looks(Section):
    """From λ at the queries of all sequences, of every seed; for tasks that say where their answers are."""

    NAME = "looks"
    TITLE = "Does λ find the answers?"
    INTRO = (
        "At each query one bucket holds the token that is to be output. Here is how often λ is largest at that bucket, and how "
        "often a rule would be right that sees the query's position alone."
    )
    READS_CHECKPOINTS = True

    def find(self, run: Run, trained: TrainedVariant) -> tuple[BySeed, dict[int, float], str] | None:
        """(`looks_at_answers` by seed, accuracies by seed, which these are)."""
        context = self.context
        if not (layers := self.layers(run, trained, "has_lam", "λ")):
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
        panels: dict[int, SeedPanel] = {}
        most = []
        for variant, seeds in looks.items():
            finite, best = best_heads(seeds)
            if not finite:
                continue
            share, of_seeds = 100 * best["largest"], np.array([accuracy[variant][seed] for seed in finite])
            most.append(f"{describe_variant(variant).removeprefix('λ: ')} {share.mean(0).max():.0f} %")
            for index, layer in enumerate(seeds[finite[0]]["layers"]):
                panel = panels.setdefault(int(layer), SeedPanel(f"layer {layer}, best head", 100 * by_position, {}))
                panel.by_variant[variant] = share[:, index], of_seeds
        if panels:
            shares = f"{', '.join(most)}; a rule by position alone {100 * by_position:.0f} %"
            y, line = f"{next(iter(found.values()))[2]} (%)", "the best rule by position alone"
            message = f"Answers at the largest λ: {shares}\n{describe_run(run)}"
            figure, axis = draw_seeds([panels[layer] for layer in sorted(panels)], f"{WHAT} (%)", y, line, message)
            axis.set_xlim(0, 102)
            self.add(figure, "looks", run, WHAT)
        self.add(looks_table(looks, accuracy, by_position, f"{describe_run(run)}: {WHAT}"), "looks-table", run, WHAT)
