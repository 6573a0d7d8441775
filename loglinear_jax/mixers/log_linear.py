"""Log-linear attention: one state for each level, weighed by λ."""

from __future__ import annotations

import functools

from loglinear_jax.mixers.base import Mamba2Mixer
from loglinear_jax.mixers.levels import LevelMixer
from loglinear_jax.ops import fenwick_step, log_linear_attention


class LogLinearMixer(LevelMixer, Mamba2Mixer):
    """o = log_linear_attention(q, k, v, log decay, λ)."""

    def mix(self, q, k, v, *, dt, d=None, cache, max_length, segment_ids=None):
        arrays = self._prepared(q, k, v, dt)
        step = functools.partial(fenwick_step, implementation=self.implementation)
        return self._attend(log_linear_attention, step, arrays, d, cache, max_length, segment_ids)
