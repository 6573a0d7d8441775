"""Length generalisation: trained models on sequences longer than those they were trained on."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Literal

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float

from loglinear_jax.runs.loading import TrainedVariant
from loglinear_jax.train import scored_sums

BATCH_TOKENS = 1 << 15  # of one evaluation at a time


def lengths_to_test(trained: TrainedVariant, longest: int | None = None) -> list[int]:
    """The trained length and its doubles, as far as λ has levels (model.max_length), or to `longest` without λ."""
    limit = trained.model.settings.max_length if trained.model.settings.has_lam else longest
    lengths = [trained.task.seq_len]
    while limit is not None and 2 * lengths[-1] <= limit:
        lengths.append(2 * lengths[-1])
    return lengths


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
    settings = trained.model.settings
    if settings.has_lam and max(lengths) > settings.max_length:
        raise ValueError(
            f"lengths={list(lengths)}: λ of {trained.variant} has levels for {settings.max_length} tokens; train with a "
            "larger model.max_length"
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
