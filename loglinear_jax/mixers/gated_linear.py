"""Gated linear attention: one state, as in Mamba-2."""

from __future__ import annotations

from typing import ClassVar

import flax.linen as nn
from jaxtyping import Array, Float

from loglinear_jax.mixers.base import DecayingMixer, scaled, sow, unit
from loglinear_jax.ops import gated_linear_attention


class GatedLinearMixer(DecayingMixer):
    """o = gated_linear_attention(q, k, v, log decay), log-linear attention with λ ≡ 1. Its cache is the state [B, H, K, V].

    scale_values: multiply each token's value by its step size, as in Mamba-2. qk_norm: divide q and k by their lengths.
    """

    chunk_size: int | None = None
    scale_values: bool = False
    qk_norm: bool = False

    layer: ClassVar[str] = "mamba2"

    def numbers_kept(self, length: int, heads: int, groups: int, key_dim: int, value_dim: int) -> int:
        return heads * key_dim * value_dim

    def check(self) -> None:
        self._check_forms()
        super().check()

    @nn.compact
    def __call__(
        self,
        q: Float[Array, "B T G K"],
        k: Float[Array, "B T G K"],
        v: Float[Array, "B T H V"],
        dt: Float[Array, "B T H"],
        *,
        cache: Float[Array, "B H K V"] | None = None,
        max_length: int | None = None,
    ) -> Float[Array, "B T H V"] | tuple[Float[Array, "B T H V"], Float[Array, "B H K V"]]:
        self._check_room(q, max_length)
        q, k, v = self._converted(q, k, v)
        if self.qk_norm:
            q, k = unit(q), unit(k)
        log_decay, step_size = self._decays(dt)
        v = scaled(v, step_size) if self.scale_values else v
        sow(self, queries=q, keys=k, log_decay=log_decay)
        decoding = cache is not None or max_length is not None
        return gated_linear_attention(
            q, k, v, log_decay, initial_state=cache, return_state=decoding, chunk_size=self.chunk_size
        )
