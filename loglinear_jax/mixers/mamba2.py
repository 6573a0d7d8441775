"""Mamba-2's mixers: gated linear attention with one state, and log-linear attention with a state for each level."""

from __future__ import annotations

import functools

from loglinear_jax.mixers.base import Mamba2Mixer, OneState
from loglinear_jax.mixers.levels import LevelMixer
from loglinear_jax.ops import fenwick_step, gated_linear_attention, log_linear_attention


class GatedLinearMixer(OneState, Mamba2Mixer):
    """o = gated_linear_attention(q, k, v, log decay), log-linear attention with λ ≡ 1."""

    def mix(self, q, k, v, *, dt, cache, max_length, segment_ids=None):
        how = self._how(q, cache, max_length, segment_ids)
        return gated_linear_attention(*self._prepared(q, k, v, dt), **how)


class LogLinearMixer(LevelMixer, Mamba2Mixer):
    """o = log_linear_attention(q, k, v, log decay, λ)."""

    def mix(self, q, k, v, *, dt, d=None, cache, max_length, segment_ids=None):
        arrays = self._prepared(q, k, v, dt)
        step = functools.partial(fenwick_step, implementation=self.implementation)
        return self._attend(log_linear_attention, step, arrays, d, cache, max_length, segment_ids)
