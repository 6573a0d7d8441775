"""Whether λ finds the answers: which bucket has the largest λ at each query, against the bucket that holds the answer."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from jaxtyping import Float, Int

from loglinear_jax.fenwick import num_levels, occupied_levels


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
