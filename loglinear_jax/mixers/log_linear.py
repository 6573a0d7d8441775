"""Log-linear attention: one state for each level, weighed by λ."""

from __future__ import annotations

import functools
from typing import ClassVar

import flax.linen as nn
from jaxtyping import Array, Float

from loglinear_jax.mixers.base import MixerCache, scaled, sow, unit
from loglinear_jax.mixers.levels import LevelCache, LevelMixer
from loglinear_jax.ops import fenwick_step, log_linear_attention


class LogLinearMixer(LevelMixer):
    """o = log_linear_attention(q, k, v, log decay, λ).

    scale_values: multiply each token's value by its step size, as in Mamba-2. qk_norm: divide q and k by their lengths.
    """

    scale_values: bool = False
    qk_norm: bool = False

    layer: ClassVar[str] = "mamba2"

    @nn.compact
    def __call__(
        self,
        q: Float[Array, "B T G K"],
        k: Float[Array, "B T G K"],
        v: Float[Array, "B T H V"],
        dt: Float[Array, "B T H"],
        d: Float[Array, "B T HL"] | None = None,
        *,
        cache: MixerCache | None = None,
        max_length: int | None = None,
    ) -> Float[Array, "B T H V"] | tuple[Float[Array, "B T H V"], LevelCache]:
        self._check_room(q, max_length)
        q, k, v = self._converted(q, k, v)
        if self.qk_norm:
            q, k = unit(q), unit(k)
        log_decay, step_size = self._decays(dt)
        v = scaled(v, step_size) if self.scale_values else v
        sow(self, queries=q, keys=k, log_decay=log_decay)
        step = functools.partial(fenwick_step, implementation=self.implementation)
        return self._attend(log_linear_attention, step, (q, k, v, log_decay), d, cache, max_length)
