"""Which past tokens a head really draws on: the row of the attention matrix at one position."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Literal

import numpy as np
from jaxtyping import Float, Int

from loglinear_jax.analysis.lam_values import mixer_values
from loglinear_jax.fenwick import fenwick_level
from loglinear_jax.mixers import MixerSettings
from loglinear_jax.runs.loading import TrainedVariant


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


def check_index(name: str, value: int, size: int) -> None:
    """Raises ValueError if there is no such index, from 0 or from the end."""
    if not -size <= value < size:
        raise ValueError(f"{name}={value}: expected -{size} to {size - 1}")
