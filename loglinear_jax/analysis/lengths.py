"""Length generalisation: trained models on sequences longer than those they were trained on."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Literal

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float

from loglinear_jax.fenwick import num_levels
from loglinear_jax.lam import lam_traits
from loglinear_jax.runs.loading import TrainedVariant
from loglinear_jax.train import scored_sums

BATCH_TOKENS = 1 << 15  # of one evaluation at a time


def lengths_to_test(trained: TrainedVariant, longest: int) -> list[int]:
    """The trained length, its doubles, and `longest` itself, or the longest that λ has levels for (model.max_length)."""
    limit = min(trained.model.settings.longest or longest, longest)
    lengths = [trained.task.trained_on.longest]
    while 2 * lengths[-1] <= limit:
        lengths.append(2 * lengths[-1])
    return lengths + [limit] * (limit > lengths[-1])


def with_highest_trained_level(trained: TrainedVariant) -> TrainedVariant | None:
    """The same parameters, with every level that no trained sequence reached taking the λ of the highest that one did.

    None where λ has no levels of its own, or looks into its buckets.
    """
    settings = trained.model.settings
    if not settings.has_lam:
        return None
    traits = lam_traits(settings.lam)
    if traits.needs_scores or not traits.has_levels:
        return None
    settings = dataclasses.replace(settings, lam_levels=num_levels(trained.task.trained_on.longest))
    return dataclasses.replace(trained, model=type(trained.model)(settings))


def scores_by_length(
    trained: TrainedVariant,
    seed: int,
    lengths: Sequence[int],
    num: int = 256,
    which: Literal["best", "last"] = "best",
) -> dict[str, Float[np.ndarray, " lengths"]]:
    """{"loss": nats, "accuracy": share} of one seed on `num` sequences of each length, the same for every seed. Of a text, as
    many tokens at each length as `num` windows of the trained length have.

    Raises ValueError for a length for which λ has no levels: train with a larger model.max_length.
    """
    longest = trained.model.settings.longest
    if longest is not None and max(lengths) > longest:
        raise ValueError(
            f"lengths={list(lengths)}: λ of {trained.variant} has levels for {longest} tokens; train with a larger "
            "model.max_length"
        )
    params, score = trained.params(seed, which), _scores(trained.model)
    result = np.zeros((2, len(lengths)))
    for index, length in enumerate(lengths):
        tokens, targets = trained.inspection_sequences(num, length)
        size = max(BATCH_TOKENS // length, 1)
        sums = np.zeros(3)
        for first in range(0, len(tokens), size):
            batch = tuple(jnp.asarray(x[first : first + size]) for x in (tokens, targets))
            sums += np.asarray(jax.device_get(score(params, batch)), np.float64)
        result[:, index] = sums[:2] / sums[2]
    return {"loss": result[0], "accuracy": result[1]}


@functools.cache
def _scores(model: nn.Module):
    return jax.jit(lambda params, batch: scored_sums(model, params, batch))
