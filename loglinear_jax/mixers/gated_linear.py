"""Gated linear attention: one state, as in Mamba-2."""

from __future__ import annotations

from loglinear_jax.mixers.base import Mamba2Mixer, OneState
from loglinear_jax.ops import gated_linear_attention


class GatedLinearMixer(OneState, Mamba2Mixer):
    """o = gated_linear_attention(q, k, v, log decay), log-linear attention with λ ≡ 1."""

    def mix(self, q, k, v, *, dt, cache, max_length):
        arrays = self._prepared(q, k, v, dt)
        decoding = cache is not None or max_length is not None
        return gated_linear_attention(*arrays, initial_state=cache, return_state=decoding, chunk_size=self.chunk_size)
