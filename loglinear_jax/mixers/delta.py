"""Mixers with the delta rule: a token overwrites what the states hold under its key, as far as its β says."""

from __future__ import annotations

from typing import Any, ClassVar

import flax.linen as nn
import jax.numpy as jnp
from jaxtyping import Array, Float

from loglinear_jax.mixers.base import DecayingMixer, MixerCache, TokenMixer, sow, unit
from loglinear_jax.mixers.levels import LevelCache, LevelMixer
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

    @nn.compact
    def __call__(
        self,
        q: Float[Array, "B T G K"],
        k: Float[Array, "B T G K"],
        v: Float[Array, "B T H V"],
        dt: Float[Array, "B T H"],
        d: Float[Array, "B T HL"] | None = None,
        b: Float[Array, "B T H"] | None = None,
        *,
        cache: MixerCache | None = None,
        max_length: int | None = None,
    ) -> Float[Array, "B T H V"] | tuple[Float[Array, "B T H V"], LevelCache]:
        self._check_room(q, max_length)
        q, k, v = self._converted(q, k, v)
        log_decay, _ = self._decays(dt)
        q, k, beta = unit(q), unit(k), self._beta(b)
        sow(self, queries=q, keys=k, log_decay=log_decay)
        arrays = q, k, v, log_decay, beta
        return self._attend(log_linear_delta_attention, log_linear_delta_step, arrays, d, cache, max_length)


class _OneDeltaState(_DeltaRule):
    """One state with the delta rule, [B, H, K, V], which is its cache.

    scale_queries: divide unit queries by √K, as the layers of Gated DeltaNet do.
    """

    scale_queries: bool = False
    chunk_size: int | None = None
    implementation: str | None = None

    @property
    def unused(self) -> set[str]:
        return {"chunk_size"} if self.implementation in ("parallel", "recurrent") else set()

    def numbers_kept(self, length: int, heads: int, groups: int, key_dim: int, value_dim: int) -> int:
        return heads * key_dim * value_dim

    def check(self) -> None:
        self._check_forms()
        super().check()

    def _attend(self, q, k, v, log_decay, b, cache: Array | None, max_length: int | None) -> Any:
        self._check_room(q, max_length)
        q, k, v = self._converted(q, k, v)
        q, k, beta = unit(q), unit(k), self._beta(b)
        if self.scale_queries:
            q = (q * q.shape[-1] ** -0.5).astype(q.dtype)
        sow(self, queries=q, keys=k, log_decay=log_decay)
        form = "recurrent" if cache is not None and q.shape[1] == 1 else self.implementation
        decoding = cache is not None or max_length is not None
        return gated_delta_attention(
            q, k, v, log_decay, beta,
            initial_state=cache, return_state=decoding, chunk_size=self.chunk_size, implementation=form,
        )  # fmt: skip


class GatedDeltaMixer(_OneDeltaState, DecayingMixer):
    """o = gated_delta_attention(q, k, v, log decay, β): Gated DeltaNet."""

    @nn.compact
    def __call__(
        self,
        q: Float[Array, "B T G K"],
        k: Float[Array, "B T G K"],
        v: Float[Array, "B T H V"],
        dt: Float[Array, "B T H"],
        b: Float[Array, "B T H"],
        *,
        cache: Float[Array, "B H K V"] | None = None,
        max_length: int | None = None,
    ) -> Float[Array, "B T H V"] | tuple[Float[Array, "B T H V"], Float[Array, "B H K V"]]:
        log_decay, _ = self._decays(dt)
        return self._attend(q, k, v, log_decay, b, cache, max_length)


class DeltaMixer(_OneDeltaState):
    """`GatedDeltaMixer` without decays: DeltaNet."""

    @nn.compact
    def __call__(
        self,
        q: Float[Array, "B T G K"],
        k: Float[Array, "B T G K"],
        v: Float[Array, "B T H V"],
        b: Float[Array, "B T H"],
        *,
        cache: Float[Array, "B H K V"] | None = None,
        max_length: int | None = None,
    ) -> Float[Array, "B T H V"] | tuple[Float[Array, "B T H V"], Float[Array, "B H K V"]]:
        return self._attend(q, k, v, jnp.zeros(v.shape[:3]), b, cache, max_length)
