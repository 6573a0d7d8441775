"""Gated linear attention: one state, as in Mamba-2."""

from __future__ import annotations

from loglinear_jax.mixers.base import Mamba2Mixer, OneState
from loglinear_jax.ops import gated_linear_attention


class GatedLinearMixer(OneState, Mamba2Mixer):
    """o = gated_linear_attention(q, k, v, log decay), log-linear attention with λ ≡ 1."""

    def mix(self, q, k, v, *, dt, cache, max_length, segment_ids=None):
        how = self._how(q, cache, max_length, segment_ids)
        return gated_linear_attention(*self._prepared(q, k, v, dt), **how)
