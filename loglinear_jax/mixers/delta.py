"""Mixers with the delta rule: a token overwrites what the states hold under its key, as far as its β says."""

from __future__ import annotations

from typing import Any, ClassVar

import flax.linen as nn
import jax.numpy as jnp
from jaxtyping import Array, Float

from loglinear_jax.mixers.base import DecayingMixer, OneState, TokenMixer, sow, unit
from loglinear_jax.mixers.levels import LevelMixer
from loglinear_jax.ops import gated_delta_attention, log_linear_delta_attention, log_linear_delta_step
from loglinear_jax.settings import SettingError


class _DeltaRule(TokenMixer):
    """β = beta_max · sigmoid(b); q and k are divided by their lengths."""

    beta_max: float = 1.0

    has_states: ClassVar[bool] = True
    layer: ClassVar[str] = "gated_deltanet"

    @property
    def inputs(self) -> dict[str, int]:
        return super().inputs | {"b": 1}

    def check(self) -> None:
        super().check()
        if self.beta_max > 2:
            raise SettingError(
                f"beta_max must be at most 2, got {self.beta_max}: above that states can grow without bound"
            )

    def _beta(self, b: Float[Array, "B T H"]) -> Float[Array, "B T H"]:
        beta = self.beta_max * nn.sigmoid(b.astype(jnp.float32))
        sow(self, beta=beta)
        return beta


class LogLinearDeltaMixer(_DeltaRule, LevelMixer):
    """o = log_linear_delta_attention(q, k, v, log decay, β, λ): log-linear Gated DeltaNet."""

    def mix(self, q, k, v, *, dt, d=None, b, cache, max_length, segment_ids=None):
        log_decay, _ = self._decays(dt)
        q, k, beta = unit(q), unit(k), self._beta(b)
        sow(self, queries=q, keys=k, log_decay=log_decay)
        arrays = q, k, v, log_decay, beta
        return self._attend(
            log_linear_delta_attention, log_linear_delta_step, arrays, d, cache, max_length, segment_ids
        )


class _OneDeltaState(_DeltaRule, OneState):
    """scale_queries: divide unit queries by √K, as the layers of Gated DeltaNet do."""

    scale_queries: bool = False

    def _attend(
        self, q, k, v, log_decay, b, cache: Array | None, max_length: int | None, segment_ids: Array | None
    ) -> Any:
        q, k, beta = unit(q), unit(k), self._beta(b)
        if self.scale_queries:
            q = (q * q.shape[-1] ** -0.5).astype(q.dtype)
        sow(self, queries=q, keys=k, log_decay=log_decay)
        return gated_delta_attention(q, k, v, log_decay, beta, **self._how(q, cache, max_length, segment_ids))


class GatedDeltaMixer(_OneDeltaState, DecayingMixer):
    """o = gated_delta_attention(q, k, v, log decay, β): Gated DeltaNet."""

    def mix(self, q, k, v, *, dt, b, cache, max_length, segment_ids=None):
        log_decay, _ = self._decays(dt)
        return self._attend(q, k, v, log_decay, b, cache, max_length, segment_ids)


class DeltaMixer(_OneDeltaState):
    """`GatedDeltaMixer` without decays: DeltaNet."""

    def mix(self, q, k, v, *, b, cache, max_length, segment_ids=None):
        return self._attend(q, k, v, jnp.zeros(v.shape[:3]), b, cache, max_length, segment_ids)
